"""sdpa_xp inside of other libraries: a file a library, whose functions import it when they are called."""
