"""Rotary embeddings by the caller's own tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from sdpa_xp._checks.arrays import check_one_device, check_one_library
from sdpa_xp._checks.caches import check_same_dtype_and_device
from sdpa_xp._checks.keywords import check_flag, explains_keywords
from sdpa_xp._checks.messages import brief
from sdpa_xp._checks.numbers import check_integers
from sdpa_xp._checks.positions import check_rotation_tables, check_within_tables
from sdpa_xp._checks.shapes import THE_BATCH, check_broadcasts
from sdpa_xp._libraries import has_override, namespace_of
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.positional.positions import ArrayFactory, Consecutive, are_readable
from sdpa_xp.positional.rotation import Positions, Rotation


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RotaryTables(Rotation):
    r"""A rotary embedding by your own cosines and sines, one row for each position.

    At position p, pair i is rotated by row p of the tables:
    $(x_1, x_2) \to (x_1 \cos_{pi} - x_2 \sin_{pi},\; x_1 \sin_{pi} + x_2 \cos_{pi})$.

    Use it wherever a `Rotary` is used, also in `KVCache` and `PagedKVCache`.

    Shapes:
        `P` positions in the tables, `...` batch.

    Args:
        cos: (P, width / 2), floating. Tables with one row of each batch entry are (..., P, width / 2). If your
            tables have the whole width, with each number twice, pass one of the two halves.
        sin: The same shape.
        interleaved: Whether the elements of pair i are neighbours, 2i and 2i + 1. If not, they are i and
            i + width / 2.

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
        _, tables = check_one_library(function, {"cos": self.cos, "sin": self.sin})
        check_same_dtype_and_device(function, tables)
        check_rotation_tables(function, {name: table.shape for name, table in tables.items()})
        check_flag(function, "interleaved", self.interleaved)
        for name, table in tables.items():
            object.__setattr__(self, name, table)
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
                check_within_tables(function, min(row), max(row), length)
        if not batch:
            return self, [*chain(*rows)]
        cos, sin = (_one_table(cast(Array, table)) for table in (self.cos, self.sin))
        step = length if batch[0] > 1 else 0
        places = [entry * step + place for entry, row in enumerate(rows) for place in row]
        return RotaryTables(cos, sin, self.interleaved), places

    @property
    def _default_like(self) -> AnyArray:
        return self.cos

    def _tables(self, positions: Positions, length: int, factory: ArrayFactory) -> tuple[Array, Array]:
        tables = {"rotary.cos": cast(Array, self.cos), "rotary.sin": cast(Array, self.sin)}
        if not has_override(*factory.arrays.values()):  # in a graph, tables are constants
            check_one_library(factory.function, {**factory.arrays, **tables})
            check_one_device(factory.function, {**factory.arrays, **tables})
        rows = self.cos.shape[-2]
        if isinstance(positions, Consecutive):
            if (
                isinstance(positions.first, int)
                and isinstance(positions.shift, int)
                and isinstance(length, int)
            ):
                start = positions.first + positions.shift
                check_within_tables(factory.function, start, start + length - 1, rows)
                cos, sin = (table[..., start : start + length, :] for table in tables.values())
                return cos, sin
            positions = factory.consecutive(positions, length)
        is_read = are_readable(positions)
        integers = check_integers(
            factory.function, "positions", positions, factory.xp, factory.device, traced=not is_read
        )
        if integers.most != math.inf:
            check_within_tables(factory.function, int(integers.least), int(integers.most), rows)
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
