"""A layer as the exporter uses it: its arguments and outputs by name, and copies of it with other arrays."""
