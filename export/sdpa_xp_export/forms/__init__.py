"""The forms in which a call can be written, one file each, with `unsupported_reason` and `write`."""
