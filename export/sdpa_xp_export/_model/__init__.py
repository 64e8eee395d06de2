"""A model and its numbers, which may be too large for one protobuf message."""
