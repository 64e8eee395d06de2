"""Where a token stands: encodings that are added to it, rotations of queries and keys, slopes of a bias.

Positions are integers, or numbers of any floating dtype: a range, a list, or an array of any shape.
"""

from sdpa_xp.biases.alibi import alibi_slopes
from sdpa_xp.positional.learned import learned
from sdpa_xp.positional.rotary import Rotary
from sdpa_xp.positional.scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YaRNScaling
from sdpa_xp.positional.sinusoidal import sinusoidal

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Rotary",
    "Scaling",
    "YaRNScaling",
    "alibi_slopes",
    "learned",
    "sinusoidal",
]
