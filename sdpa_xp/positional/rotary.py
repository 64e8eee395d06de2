"""Rotary embeddings: pairs of elements are rotated by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import accumulation_dtype, astype_if_needed, is_number
from sdpa_xp._libraries.protocols import AnyArray, Array, Namespace
from sdpa_xp._tiles.layout import Layout
from sdpa_xp.positional.positions import ArrayFactory, PositionsLike, array_factory, as_array
from sdpa_xp.positional.scaling import Scaling, base_frequencies

A = TypeVar("A", bound=AnyArray)


@dataclass(frozen=True, slots=True)
class Rotary:
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
        width = checks.even(function, "width", self.width)
        base = checks.above(function, "base", self.base, 1)
        checks.flag(function, "interleaved", self.interleaved)
        checks.instance(function, "scaling", self.scaling, Scaling)
        frequencies = base_frequencies if self.scaling is None else self.scaling.frequencies
        object.__setattr__(self, "frequencies", frequencies(width, base))

    def apply(self, x: A, positions: PositionsLike | int, *, layout: Layout = "...HLE") -> A:
        """Return queries or keys, rotated by their positions.

        Args:
            x: (..., H, L, E), or (L, E).
            positions: The position of the first token, if the others follow one by one. Or the positions of all
                L tokens, as a range, a list or an array, which may have one row for each batch entry, (..., L).
            layout: The layout of `x`: "...HLE", or "...LHE" with heads after the length.

        Returns:
            An array with the shape, library, device and dtype of `x`.

        Raises:
            TypeError: `x` is not a floating array, or the positions are not numbers.
            ValueError: `x` is narrower than the rotation, or the positions do not fit.
        """
        function = "Rotary.apply"
        checks.named(function, "layout", layout, checks.LAYOUTS)
        array = checks.plain_array(function, "x", x)
        factory, length = _factory_and_length(self, function, "x", array, layout, positions)
        if is_number(positions):
            token_positions = factory.positions_from(checks.integer(function, "positions", positions), length)
        else:
            token_positions = as_array(function, cast(PositionsLike, positions), factory)
            checks.one_each(function, "positions", token_positions.shape, (*array.shape[:-3], length), "L")
        return cast(A, _rotate_at(self, array, token_positions, factory, layout))

    def cos_sin(self, positions: PositionsLike, *, like: Any = None) -> tuple[Any, Any]:
        """Return the cosines and sines that `apply` multiplies by, as ONNX's RotaryEmbedding takes them.

        Args:
            positions: A range, a list or an array of any shape (...).
            like: An array with the library, device and dtype of the tables. By default the library and device
                are those of `positions`, or NumPy's, and the dtype is float64 if the device has it, else
                float32.

        Returns:
            Cosines and sines, each (..., width / 2), multiplied by the `magnitude` of the scaling.

        Raises:
            TypeError: The positions are not numbers, or are an array of another library than `like`.
        """
        function = "Rotary.cos_sin"
        factory = array_factory(function, checks.not_one_number(function, "positions", positions), like)
        cos, sin = self._tables(as_array(function, positions, factory), factory)
        if like is None:
            return cos, sin
        return astype_if_needed(factory.xp, cos, like.dtype), astype_if_needed(factory.xp, sin, like.dtype)

    def _tables(self, positions: Array, factory: ArrayFactory) -> tuple[Array, Array]:
        angles = factory.angles(positions, self.frequencies)
        cos, sin = factory.xp.cos(angles), factory.xp.sin(angles)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


def rotate(
    rotary: Rotary | None, function: str, name: str, x: object, stop: int | list[int], layout: str
) -> Array:
    """Rotate tokens that end before position `stop`, or before one `stop` for each batch entry.

    Without a rotary the tokens pass through unchanged. `function` and `name` are for messages.
    """
    array = checks.plain_array(function, name, x)
    if rotary is None:
        return array
    factory, length = _factory_and_length(rotary, function, name, array, layout, 0)
    starts = [entry_stop - length for entry_stop in stop] if isinstance(stop, list) else stop - length
    return _rotate_at(rotary, array, factory.positions_from(starts, length), factory, layout)


def _factory_and_length(
    rotary: Rotary, function: str, name: str, x: Array, layout: str, positions: object
) -> tuple[ArrayFactory, int]:
    """Check `x` and `positions`, and return their array factory and the number of tokens."""
    factory = array_factory(function, positions, x, name)
    checks.fits_rotation(function, name, x.shape, rotary.width)
    return factory, checks.headed(x.shape, layout)[-2]


def _rotate_at(rotary: Rotary, x: Array, positions: Array, factory: ArrayFactory, layout: str) -> Array:
    """Rotate tokens that stand at positions (..., L)."""
    xp, dtype = factory.xp, accumulation_dtype(factory.xp, x.dtype)
    cos, sin = (astype_if_needed(xp, table, dtype) for table in rotary._tables(positions, factory))
    if x.ndim > 2:
        head_axis = -3 if layout == checks.HLE else -2
        cos, sin = (xp.expand_dims(table, axis=head_axis) for table in (cos, sin))
    front = astype_if_needed(xp, x[..., : rotary.width], dtype)
    rotated = _rotate_pairs(xp, front, cos, sin, interleaved=rotary.interleaved)
    rotated = astype_if_needed(xp, rotated, x.dtype)
    is_whole = x.shape[-1] == rotary.width
    return rotated if is_whole else xp.concat([rotated, x[..., rotary.width :]], axis=-1)


def _rotate_pairs(xp: Namespace, x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Rotate each pair (x_1, x_2) of elements by its angle."""
    if interleaved:
        x_1, x_2 = x[..., 0::2], x[..., 1::2]
    else:
        half = x.shape[-1] // 2
        x_1, x_2 = x[..., :half], x[..., half:]
    pair = [x_1 * cos - x_2 * sin, x_1 * sin + x_2 * cos]
    return xp.reshape(xp.stack(pair, axis=-1), x.shape) if interleaved else xp.concat(pair, axis=-1)
