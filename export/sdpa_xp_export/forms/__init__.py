"""The forms in which a call can be written, one file each: `unsupported_reason` says why not, `write` writes."""
