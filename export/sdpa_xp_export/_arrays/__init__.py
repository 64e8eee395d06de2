"""The array API of the values of a graph: each function writes nodes."""
