"""The float64 reference, the textbook formula, inputs to try a model with, and when two results agree."""
