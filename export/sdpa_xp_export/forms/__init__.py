"""The forms in which a call can be written, one file each, with the functions `unsupported_reason` and `write`."""
