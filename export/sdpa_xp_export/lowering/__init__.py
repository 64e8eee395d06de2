"""Masks, biases and the attention of a tile, each by the line that defines it."""
