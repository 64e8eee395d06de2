"""Nothing that the library calls."""
