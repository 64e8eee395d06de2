"""Rotary embeddings: pairs of elements are rotated by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass, field

from sdpa_xp._checks.keywords import check_flag, explains_keywords
from sdpa_xp._checks.positions import check_above, check_even, check_instance
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.positional.positions import ArrayFactory, Consecutive
from sdpa_xp.positional.rotation import Positions, Rotation
from sdpa_xp.positional.scaling import Scaling, base_frequencies


@explains_keywords
@dataclass(frozen=True, slots=True)
class Rotary(Rotation):
    r"""A rotary embedding: it rotates pairs of elements by an angle that grows with the position.

    At position p, pair i is rotated by the angle $p f_i$:
    $(x_1, x_2) \to (x_1 \cos p f_i - x_2 \sin p f_i,\; x_1 \sin p f_i + x_2 \cos p f_i)$.

    The score of a rotated query and a rotated key depends on the distance between their positions, not on the
    positions themselves. `KVCache` and `PagedKVCache` take a `Rotary` and rotate keys and queries themselves.

    Args:
        width: The number of elements of a query or key that are rotated, an even number. The elements after
            them do not change.
        base: The base of the frequencies. Without a scaling, f_i = base^(-2i / width).
        interleaved: Whether the elements of pair i are neighbours, 2i and 2i + 1, as in RoFormer. If not, they
            are i and i + width / 2, as in Llama's weights on Hugging Face.
        scaling: `LinearScaling`, `NTKScaling`, `Llama3Scaling` or `YaRNScaling`, for sequences longer than in
            training; or None.

    Raises:
        TypeError: `scaling` is not one of these.
        ValueError: The width is odd, or the base is 1 or less.

    Numerics:
        Angles are computed in float64 if the device has it. Their sines and cosines are rounded to the dtype of
        the rotation: float64 for float64 input, else float32. Without float64 (JAX without x64) the relative
        error of an angle is up to 6e-8.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import positional
        >>> rotary = positional.Rotary(2)
        >>> rotary.apply(np.asarray([[1.0, 0.0]] * 3), 0).round(2)
        array([[ 1.  ,  0.  ],
               [ 0.54,  0.84],
               [-0.42,  0.91]])

        Rotate query and key, and attend; 0 is the position of the first token:

        >>> from sdpa_xp import scaled_dot_product_attention
        >>> query = key = value = np.ones((1, 4, 6, 64))
        >>> rotary = positional.Rotary(64)
        >>> query, key = rotary.apply(query, 0), rotary.apply(key, 0)
        >>> scaled_dot_product_attention(query, key, value, is_causal=True).shape
        (1, 4, 6, 64)

    References:
        Su et al., "RoFormer", arXiv 2104.09864, section 3.2. RotaryEmbedding of ONNX 23 does the same.
    """

    width: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: Scaling | None = None
    frequencies: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """The frequency f_i of each pair, in radians per position."""

    def __post_init__(self) -> None:
        function = "Rotary"
        width = check_even(function, "width", self.width)
        base = check_above(function, "base", self.base, 1)
        check_flag(function, "interleaved", self.interleaved)
        check_instance(function, "scaling", self.scaling, Scaling)
        frequencies = base_frequencies if self.scaling is None else self.scaling.frequencies
        object.__setattr__(self, "frequencies", frequencies(width, base))

    def _tables(self, positions: Positions, length: int, factory: ArrayFactory) -> tuple[Array, Array]:
        if isinstance(positions, Consecutive):
            positions = factory.consecutive(positions, length)
        angles = factory.angles(positions, self.frequencies)
        cos, sin = factory.xp.cos(angles), factory.xp.sin(angles)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)
