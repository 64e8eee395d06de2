"""Masks and biases of the library as pieces of graph, computed from the lengths that a run has."""
