"""A graph while it is being written: its nodes, its values, and lengths that are names."""

from .graph import BRANCH_HINT, CONTRIB, Graph, GraphValue
from .lengths import FloatOfLengths, Length, broadcasts_to, has_names, length_error, plain
from .moved_inputs import moved_inputs
from .terms import added, joined_name, parts

__all__ = ["BRANCH_HINT", "CONTRIB", "FloatOfLengths", "Graph", "GraphValue", "Length"]
__all__ += ["added", "broadcasts_to", "has_names", "joined_name", "length_error", "moved_inputs", "parts"]
__all__ += ["plain"]
