"""The types in the signatures of sdpa_xp, for annotations of your own.

A = TypeVar("A", bound=Array)

def attend(query: A, key: Array, value: Array, *, layout: Layout = "...HLE") -> A:
    return scaled_dot_product_attention(query, key, value, layout=layout)
"""

from sdpa_xp._checks.arrays import Layout
from sdpa_xp._checks.integers import IntegersLike
from sdpa_xp._checks.keywords import Implementation
from sdpa_xp._libraries.protocols import AnyArray as Array
from sdpa_xp._libraries.protocols import Dtype, Rng
from sdpa_xp.biases.custom import ScoreFunction
from sdpa_xp.caches.positions import TokenPositionsLike
from sdpa_xp.gradients import Pullback
from sdpa_xp.masks.custom import MaskFunction
from sdpa_xp.positional.positions import PositionsLike
from sdpa_xp.positional.rotation import Rotation
from sdpa_xp.states import KeyRanges
from sdpa_xp.statistics import StatisticName, TopKeys

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
