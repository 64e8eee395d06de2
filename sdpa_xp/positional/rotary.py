"""Rotary embeddings: pairs of elements are rotated by angles that grow with the position, or by your tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from .._checks import brief
from .._checks.arrays import check_one_kind
from .._checks.keywords import check_flag, check_instance, explains_keywords
from .._checks.score_arrays import THE_BATCH, check_broadcasts, check_integers
from .._libraries import namespace_of
from .._libraries.protocols import AnyArray, Array
from ..errors import ArgumentValueError
from .positions import ArrayFactory, Consecutive, are_readable
from .rotation import Positions, Rotation
from .scaling import Scaling, base_frequencies, check_width_and_base


@explains_keywords
@dataclass(frozen=True, slots=True)
class Rotary(Rotation):
    r"""A rotary embedding: it rotates pairs of elements by an angle that grows with the position.

    At position p, pair i is rotated by the angle $p f_i$:
    $(x_1, x_2) \to (x_1 \cos p f_i - x_2 \sin p f_i,\; x_1 \sin p f_i + x_2 \cos p f_i)$.
    So scores depend on the distance between positions alone. `KVCache` and `PagedKVCache` take a `Rotary` and
    rotate keys and queries themselves.

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
        Angles are computed in float64 if the device has it, and their sines and cosines rounded to the
        accumulation dtype. Without float64 (JAX without x64), angles have a relative error of up to 6e-8.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import positional, scaled_dot_product_attention
        >>> query = key = value = np.ones((1, 4, 6, 64))
        >>> rotary = positional.Rotary(64)
        >>> query, key = rotary.apply(query, 0), rotary.apply(key, 0)  # the position of the first token
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
        width, base = check_width_and_base(function, self.width, self.base)
        check_flag(function, "interleaved", self.interleaved)
        hint = "Write LinearScaling, NTKScaling, Llama3Scaling or YaRNScaling of `sdpa_xp.positional`."
        check_instance(function, "scaling", self.scaling, Scaling, hint=hint)
        # Once for a value: a cache rotates tokens at each step.
        frequencies = base_frequencies if self.scaling is None else self.scaling.frequencies
        object.__setattr__(self, "frequencies", frequencies(width, base))

    def _tables(self, positions: Positions, length: int, factory: ArrayFactory) -> tuple[Array, Array]:
        if isinstance(positions, Consecutive):
            positions = factory.consecutive(positions, length)
        angles = factory.angles(positions, self.frequencies)
        cos, sin = factory.xp.cos(angles), factory.xp.sin(angles)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        # Without a scaling a graph has no product more, and the tables are exactly the cosines and sines.
        return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RotaryTables(Rotation):
    """A rotary embedding by your own cosines and sines, one row for each position.

    It is used like a `Rotary`.

    Args:
        cos: (P, width / 2), floating, for P positions; with one row of each batch entry, (..., P, width / 2).
            If your tables have the whole width, with each number twice, pass one of the two halves.
        sin: The same shape.
        interleaved: As for `Rotary`.

    Raises:
        TypeError: The tables are not floating arrays of one library and one dtype.
        ValueError: The tables have several shapes, or fewer than 2 axes. When tokens are rotated: a position is
            negative, or beyond the tables. Inside a jit and on a GPU, positions in arrays are not checked.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import positional
        >>> cos, sin = positional.Rotary(2).cos_sin(range(3))
        >>> rotary = positional.RotaryTables(cos, sin)
        >>> rotary.apply(np.asarray([[1.0, 0.0]]), 2).round(2)
        array([[-0.42,  0.91]])

    References:
        `rotary_cos` and `rotary_sin` of flash-attention; `cos_cache` and `sin_cache` of ONNX's RotaryEmbedding.
    """

    cos: AnyArray
    sin: AnyArray
    interleaved: bool = False
    width: int = field(init=False)
    """The number of elements that are rotated."""

    def __post_init__(self) -> None:
        function = "RotaryTables"
        _, tables = check_one_kind(function, {"cos": self.cos, "sin": self.sin})
        cos, sin = (table.shape for table in tables.values())
        if cos != sin or len(cos) < 2 or cos[-1] == 0:
            rule = "`cos` and `sin` must have one shape, (P, width / 2) or (..., P, width / 2)"
            raise ArgumentValueError(function, rule, {"cos.shape": cos, "sin.shape": sin})
        check_flag(function, "interleaved", self.interleaved)
        for name, table in tables.items():
            object.__setattr__(self, name, table)  # without its subclass, as `check_one_kind` returns it
        object.__setattr__(self, "width", 2 * tables["cos"].shape[-1])

    def __repr__(self) -> str:
        options = ", interleaved=True" if self.interleaved else ""
        return f"RotaryTables(cos={brief(self.cos)}, sin={brief(self.sin)}{options})"

    def _of_packed(self, function: str, rows: Sequence[Sequence[int]]) -> tuple[Rotation, list[int]]:
        """Return the tables of all sequences as one, in which the tables of a sequence follow one another."""
        *batch, length, _ = self.cos.shape
        check_broadcasts(function, "rotary.cos", tuple(batch), (len(rows),), THE_BATCH)
        for row in rows:
            if row:
                _check_within_tables(function, min(row), max(row), length)
        if not batch:
            return self, [*chain(*rows)]
        cos, sin = (_one_table(cast(Array, table)) for table in (self.cos, self.sin))
        step = length if batch[0] > 1 else 0
        places = [entry * step + place for entry, row in enumerate(rows) for place in row]
        return RotaryTables(cos, sin, self.interleaved), places

    @property
    def _arrays(self) -> dict[str, AnyArray]:
        return {"rotary.cos": self.cos, "rotary.sin": self.sin}

    def _tables(self, positions: Positions, length: int, factory: ArrayFactory) -> tuple[Array, Array]:
        tables = {name: cast(Array, factory.arrays.get(name, x)) for name, x in self._arrays.items()}
        rows = self.cos.shape[-2]
        if isinstance(positions, Consecutive):
            first, shift = positions
            if isinstance(first, int) and isinstance(shift, int) and isinstance(length, int):
                start = first + shift  # consecutive rows are a slice, which is no copy
                _check_within_tables(factory.function, start, start + length - 1, rows)
                cos, sin = (table[..., start : start + length, :] for table in tables.values())
                return cos, sin
            positions = factory.consecutive(positions, length)
        is_read = are_readable(positions)
        integers = check_integers(
            factory.function, "positions", positions, factory.xp, factory.device, traced=not is_read
        )
        if integers.most != math.inf:
            _check_within_tables(factory.function, int(integers.least), int(integers.most), rows)
        positions = cast(Array, integers.values)
        cos, sin = (_rows_at(factory, table, positions) for table in tables.values())
        return cos, sin


def _one_table(table: Array) -> Array:
    """Return the tables of all batch entries, (..., P, width), one after the other."""
    *leading, width = table.shape
    return namespace_of(table).reshape(table, (math.prod(leading), width))


def _rows_at(factory: ArrayFactory, table: Array, positions: Array) -> Array:
    """Return the rows of a table (..., P, width) at positions (..., L)."""
    xp, (*batch, rows, width) = factory.xp, table.shape
    if batch:  # the tables of all batch entries as one, in which the entry counts as well
        positions = xp.broadcast_to(positions, (*batch, positions.shape[-1]))
        entries = factory.arange(0, math.prod(batch)) * rows
        positions = positions + xp.reshape(entries, (*batch, 1))
        table = _one_table(table)
    index = positions if positions.ndim == 1 else xp.reshape(positions, (-1,))
    rows_at = xp.take(table, index, axis=0)
    return rows_at if positions.ndim == 1 else xp.reshape(rows_at, (*positions.shape, width))


def _check_within_tables(function: str, least: int, most: int, rows: int) -> None:
    """Check that the tables of a rotation have a row for each position."""
    if least <= most and not 0 <= least <= most < rows:
        # A negative index would read rows from the end of the tables.
        rule = "the tables of the rotary must have a row for each position"
        hint = "Scores depend on distances alone: add one number to all positions of an entry." * (least < 0)
        raise ArgumentValueError(function, rule, {"positions": f"{least} to {most}", "rows": rows}, hint)
