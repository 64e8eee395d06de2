"""How torch differentiates a call: as one operation, by the library's own gradients and jets."""
