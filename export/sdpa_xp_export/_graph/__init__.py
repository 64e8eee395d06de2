"""A graph while it is being written: its nodes, its values, and lengths that are names.

graph         the graph, and its values: arrays whose operators write nodes
written       the messages of ONNX
library       the values as a library, on which the code of sdpa_xp runs
length_names  the names of lengths: the sums that they stand for, and where to read them
lengths       what stands in the shapes of a layer, and is computed with like a number
"""

from .graph import BRANCH_HINT, CONTRIB, Graph, GraphSettings, GraphValue, value_info
from .length_names import added, length_error, parts
from .lengths import FloatOfLengths, Length, broadcasts_to, has_names, plain
from .written import moved_inputs

__all__ = ["BRANCH_HINT", "CONTRIB", "FloatOfLengths", "Graph", "GraphSettings", "GraphValue", "Length"]
__all__ += ["added", "broadcasts_to", "has_names", "length_error", "moved_inputs", "parts", "plain"]
__all__ += ["value_info"]
