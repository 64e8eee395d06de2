"""The types in the signatures of sdpa_xp, for annotations of your own.

A = TypeVar("A", bound=Array)

def attend(query: A, key: Array, value: Array, *, layout: Layout = "...HLE") -> A:
    return scaled_dot_product_attention(query, key, value, layout=layout)
"""

from ._checks.arrays import Layout
from ._checks.keywords import Implementation
from ._checks.score_arrays import IntegersLike
from ._gradients import Pullback
from ._libraries.protocols import AnyArray as Array
from ._libraries.protocols import Dtype, Rng
from ._states import KeyRanges
from ._statistics import StatisticName, TopKeys
from .biases.custom import ScoreFunction
from .caches.positions import TokenPositionsLike
from .masks.custom import MaskFunction
from .positional.positions import PositionsLike
from .positional.rotation import Rotation

__all__ = [
    "Array",
    "Dtype",
    "Implementation",
    "IntegersLike",
    "KeyRanges",
    "Layout",
    "MaskFunction",
    "PositionsLike",
    "Pullback",
    "Rng",
    "Rotation",
    "ScoreFunction",
    "StatisticName",
    "TokenPositionsLike",
    "TopKeys",
]


def __dir__() -> list[str]:
    """Complete these types, not the modules that define them."""
    return __all__
