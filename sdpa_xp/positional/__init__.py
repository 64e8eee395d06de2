"""Positions of tokens: encodings to add to embeddings, rotations of queries and keys, and slopes for ALiBi.

Pass positions as a range, a list of integers, or an array of integers or floating numbers of any shape.
"""

from ..biases.slopes import alibi_slopes
from .encodings import learned, sinusoidal
from .rotary import Rotary, RotaryTables
from .rotation import Rotation
from .scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YaRNScaling

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Rotary",
    "RotaryTables",
    "Rotation",
    "Scaling",
    "YaRNScaling",
    "alibi_slopes",
    "learned",
    "sinusoidal",
]


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
