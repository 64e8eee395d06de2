"""Biases: what is added to the scores. They combine with `+`, also with floating arrays.

Pass any of them as `bias`. A bias computes one tile of the scores at a time, so no L x S array is built. Arrays
and offsets are checked when a call uses the bias. Unlike a mask, a bias does not copy its arrays, so that they
get gradients: it follows what you write to them.
"""

from typing import TYPE_CHECKING

from .._tiles.modifier import loaded
from .algebra import Bias

if TYPE_CHECKING:
    from .buckets import relative
    from .custom import from_array, from_function, to_array
    from .slopes import alibi

__all__ = ["Bias", "alibi", "from_array", "from_function", "relative", "to_array"]

_FILES = {"buckets": "relative", "custom": "from_array from_function to_array", "slopes": "alibi"}
"""The files that are loaded when one of their names is first used."""

if not TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        return loaded(__name__, name, _FILES)


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
