"""Views by strides."""
