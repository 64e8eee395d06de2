"""Biases: what is added to the scores. They combine with `+`, also with floating arrays.

Pass any of them as `bias`. A bias computes one tile of the scores at a time, so no L x S array is built. Arrays
and offsets are checked when a call uses the bias. Unlike a mask, a bias does not copy its arrays, so that they
get gradients: it follows what you write to them.
"""

from .algebra import Bias
from .alibi import alibi
from .custom import from_array, from_function, to_array
from .relative import relative

__all__ = ["Bias", "alibi", "from_array", "from_function", "relative", "to_array"]


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
