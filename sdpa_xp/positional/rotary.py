"""Rotary embeddings: pairs of entries are turned by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import accumulation_dtype, astype_if_needed, is_number
from sdpa_xp._libraries.protocols import AnyArray, Array, Namespace
from sdpa_xp._tiles.layout import Layout
from sdpa_xp.positional.positions import Place, PositionsLike, as_array, place
from sdpa_xp.positional.scaling import Scaling, geometric

A = TypeVar("A", bound=AnyArray)


@dataclass(frozen=True, slots=True)
class Rotary:
    r"""$(x_1, x_2) \to (x_1 \cos p f_i - x_2 \sin p f_i,\; x_1 \sin p f_i + x_2 \cos p f_i)$ at position p.

    The score of a query and a key that are turned so depends on how far they are apart, and not on where they
    stand. `KVCache` and `PagedKVCache` take one and turn what goes in.

    Args:
        width: How many entries of a query or key are turned, an even number; those behind stay as they are.
        base: Of the frequencies, which are f_i = base^(-2i / width) without a scaling.
        interleaved: Whether a pair is two neighbours, 2i and 2i + 1, as in RoFormer; else it is i and
            i + width / 2, as in Llama's weights on Hugging Face.
        scaling: `LinearScaling`, `NTKScaling`, `Llama3Scaling` or `YaRNScaling`, for longer sequences than
            those that were trained; None for none.

    Raises:
        TypeError: A `scaling` that is not one of these.
        ValueError: An odd width, or a base of 1 or less.

    Numerics:
        Angles are in float64 where the device has it, and rounded to what is computed in: float64 for float64
        input, else float32. Where there is no float64 (JAX without x64), an angle is off by up to 6e-8 of
        itself.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import positional
        >>> rotary = positional.Rotary(2)
        >>> rotary.apply(np.asarray([[1.0, 0.0]] * 3), 0).round(2)
        array([[ 1.  ,  0.  ],
               [ 0.54,  0.84],
               [-0.42,  0.91]])

    References:
        Su et al., "RoFormer", arXiv 2104.09864, section 3.2. RotaryEmbedding of ONNX 23 does the same.
    """

    width: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: Scaling | None = None
    frequencies: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Radians a position, one for each pair."""

    def __post_init__(self) -> None:
        function = "Rotary"
        width = checks.even(function, "width", self.width)
        base = checks.above(function, "base", self.base, 1)
        checks.flag(function, "interleaved", self.interleaved)
        checks.instance(function, "scaling", self.scaling, Scaling)
        made = geometric(width, base) if self.scaling is None else self.scaling.frequencies(width, base)
        object.__setattr__(self, "frequencies", made)

    def apply(self, x: A, positions: PositionsLike | int, *, layout: Layout = "...HLE") -> A:
        """Queries or keys, turned.

        Args:
            x: (..., H, L, E), or (L, E).
            positions: Of the first token, where the others follow; or L of them, as a range, a list or an
                array, which may have a row for each batch entry, (..., L).
            layout: Of `x`: "...HLE", or "...LHE" with heads behind the length.

        Returns:
            The shape, library, device and dtype of `x`.

        Raises:
            TypeError: Something that is no floating array, or positions that are no numbers.
            ValueError: A width below that of the rotation, or positions that do not fit.
        """
        function = "Rotary.apply"
        checks.named(function, "layout", layout, checks.LAYOUTS)
        array = checks.plain_array(function, "x", x)
        at, tokens = _tokens(self, function, "x", array, layout, positions)
        if is_number(positions):
            where = at.following(checks.integer(function, "positions", positions), tokens)
        else:
            where = as_array(function, cast(PositionsLike, positions), at)
            checks.one_each(function, "positions", where.shape, (*array.shape[:-3], tokens), "L")
        return cast(A, _turned(self, array, where, at, layout))

    def cos_sin(self, positions: PositionsLike, *, like: Any = None) -> tuple[Any, Any]:
        """The tables that `apply` multiplies by, as ONNX's RotaryEmbedding takes them.

        Args:
            positions: A range, a list or an array (...).
            like: An array of the library, device and dtype that the tables are to be of. By default those of
                `positions`, or of NumPy, and float64 where the device has it.

        Returns:
            Cosines and sines, each (..., width / 2), times the magnitude of the scaling.

        Raises:
            TypeError: Positions that are no numbers, or an array of another library than `like`.
        """
        function = "Rotary.cos_sin"
        at = place(function, checks.several(function, "positions", positions), like)
        cos, sin = self._tables(as_array(function, positions, at), at)
        if like is None:
            return cos, sin
        return astype_if_needed(at.xp, cos, like.dtype), astype_if_needed(at.xp, sin, like.dtype)

    def _tables(self, positions: Array, at: Place) -> tuple[Array, Array]:
        angles = at.angles(positions, self.frequencies)
        cos, sin = at.xp.cos(angles), at.xp.sin(angles)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


def turned(
    rotary: Rotary | None, function: str, name: str, x: object, until: int | list[int], layout: str
) -> Array:
    """`x`, whose last token stands before position `until`, or before one of them a batch entry.

    `function` and `name` are what messages call it.
    """
    array = checks.plain_array(function, name, x)
    if rotary is None:
        return array
    at, tokens = _tokens(rotary, function, name, array, layout, 0)
    starts = [stop - tokens for stop in until] if isinstance(until, list) else until - tokens
    return _turned(rotary, array, at.following(starts, tokens), at, layout)


def _tokens(
    rotary: Rotary, function: str, name: str, x: Array, layout: str, positions: object
) -> tuple[Place, int]:
    """Where `x` and `positions` live, and how many tokens there are."""
    at = place(function, positions, x, name)
    checks.rotated(function, name, x.shape, rotary.width)
    return at, checks.headed(x.shape, layout)[-2]


def _turned(rotary: Rotary, x: Array, positions: Array, at: Place, layout: str) -> Array:
    """`x` at positions (..., L)."""
    xp, held = at.xp, accumulation_dtype(at.xp, x.dtype)
    cos, sin = (astype_if_needed(xp, table, held) for table in rotary._tables(positions, at))
    if x.ndim > 2:
        heads = -3 if layout == checks.HLE else -2
        cos, sin = (xp.expand_dims(table, axis=heads) for table in (cos, sin))
    front = astype_if_needed(xp, x[..., : rotary.width], held)
    result = _rotation(xp, front, cos, sin, interleaved=rotary.interleaved)
    result = astype_if_needed(xp, result, x.dtype)
    whole = x.shape[-1] == rotary.width
    return result if whole else xp.concat([result, x[..., rotary.width :]], axis=-1)


def _rotation(xp: Namespace, x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    if interleaved:
        one, other = x[..., 0::2], x[..., 1::2]
    else:
        half = x.shape[-1] // 2
        one, other = x[..., :half], x[..., half:]
    pair = [one * cos - other * sin, one * sin + other * cos]
    return xp.reshape(xp.stack(pair, axis=-1), x.shape) if interleaved else xp.concat(pair, axis=-1)
