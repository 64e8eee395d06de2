"""A graph while it is being written: its nodes, its values, and lengths that are names."""
