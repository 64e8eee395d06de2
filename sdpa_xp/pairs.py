"""All pairs (b, h, i, j) of a call: batch entry, head, query and key. Masks and biases are bound to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sdpa_xp import checks
from sdpa_xp._libraries import (
    ExecutionKind,
    Library,
    device_of,
    execution_kind,
    is_array,
    library_of,
    numpy_array,
    widest_dtype,
)
from sdpa_xp._libraries.protocols import Array, Device, Dtype, Namespace, Shape
from sdpa_xp.checks import Integers


class Block(NamedTuple):
    """`length` queries from `start` on, which only a rolled loop knows."""

    start: Array
    length: int

    def of(self, array: Array) -> Array:
        """The block's rows of an array that broadcasts to (..., L, width)."""
        return array if array.ndim < 2 or array.shape[-2] == 1 else library_of(array).rows_from(array, *self)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The lengths of a call, and what it takes to make arrays that fit its scores.

    Packed sequences and paged caches are computed one batch entry at a time, since their lengths differ.
    `entry` is its number then: arrays with an entry for each are cut down to that one.
    """

    function: str
    library: Library
    xp: Namespace
    device: Device
    dtype: Dtype
    """The accumulation dtype."""
    input_dtype: Dtype
    """That of the query, which arrays of a bias may have as well; None where there is none."""
    execution_kind: ExecutionKind
    batch: Shape
    heads: int
    queries: int
    keys: int
    flat: bool = False
    """Whether the caller's arrays have no head axis."""
    position: int = 0
    """Where the first query stands among the keys; a cache sets it."""
    entry: int | None = None
    part: tuple[range, ...] | None = None
    """Which of the leading axes of `scores` are computed now, a range for each; None is all."""
    block: Block | None = None
    """Which of the rows of a tile are computed now; None is all. What a mask says of the tile holds of each."""

    @property
    def traced(self) -> bool:
        """Whether values cannot be read now."""
        return self.execution_kind == "traced"

    @property
    def writeable(self) -> bool:
        """Whether what was computed can be written to."""
        return self.execution_kind in ("blas_threaded", "threaded")

    @property
    def shape(self) -> Shape:
        """Of the scores: (..., Hq, L, S)."""
        lengths = (self.queries, self.keys)
        return lengths if self.flat else (*self.batch, self.heads, *lengths)

    @property
    def scores(self) -> Shape:
        """The shape that scores are computed in: with a head axis, and without a batch for one entry."""
        leading = self.leading if self.part is None else map(len, self.part)
        return (*leading, self.queries, self.keys)

    @property
    def leading(self) -> Shape:
        """The axes before the lengths, (..., Hq); one entry of a batch has no others than its heads."""
        return (self.heads,) if self.entry is not None else (*self.batch, self.heads)

    @property
    def with_heads(self) -> Shape:
        """(..., Hq)."""
        return (*self.batch, self.heads)

    def of_batch(self, batch: Shape) -> Pairs:
        """The same pairs, for entries that are no axis of the arrays."""
        return replace(self, batch=batch)

    def one_entry(self, entry: int, queries: int, keys: int, position: int = 0) -> Pairs:
        """The pairs of one entry, whose lengths are its own."""
        return replace(self, entry=entry, queries=queries, keys=keys, position=position)

    def integers(self, name: str, value: object, least: int = -checks.LARGEST_INTEGER) -> Integers:
        """One integer for all, or one a batch entry: an int or (..., 1, 1, 1)."""
        if self.entry is not None and (isinstance(value, tuple | list) or is_array(value)):
            value = self._own(name, value)
        found = checks.integers(
            self.function, name, value, self.xp, self.device, traced=self.traced, least=least
        )
        if isinstance(found.values, int):
            return found
        if found.shape == (1,) and not self.batch:
            return found._replace(values=self.xp.reshape(found.values, (1, 1, 1)))
        if self.entry is None:
            checks.broadcasts(self.function, name, found.shape, self.batch, "the batch (...)")
        return found._replace(values=self.xp.reshape(found.values, (*found.shape, 1, 1, 1)))

    def _own(self, name: str, value: Any) -> object:
        """The entry's own of integers with one for each entry, or one for all of them."""
        shape = (len(value),) if isinstance(value, tuple | list) else value.shape
        checks.broadcasts(self.function, name, shape, self.batch, "the batch (...)")
        return value if not shape else value[self.entry if shape[0] > 1 else 0]

    def fits(self, name: str, array: Array) -> None:
        """Refuse an array that joins the scores in another dtype than theirs or the query's."""
        checks.floating(self.function, name, array)
        if self.input_dtype is not None:
            checks.added_dtype(self.function, name, array, self.input_dtype, self.dtype)

    def offset(self, name: str, value: object) -> Integers:
        """How far a diagonal is shifted to the right: what `integers` takes, or "lower_right"."""
        if isinstance(value, str):
            checks.named(self.function, name, value, ("lower_right",), "integers, one a batch entry")
            return Integers(*[self.keys - self.queries - self.position] * 3)
        return self.integers(name, value)

    def along(self, name: str, value: object, length: int, letter: str, hint: str = "") -> Array:
        """An id for each of `length` queries or keys, (..., length)."""
        ids = checks.ids(self.function, name, value, self.xp, self.device)
        checks.one_each(self.function, name, ids.shape, (*self.batch, length), letter, hint)
        return self.cut(ids, 1)

    def cut(self, array: Array, axes: int) -> Array:
        """The part of `array` for `entry`, without a batch axis; it has `axes` axes behind that."""
        if self.entry is None or array.ndim <= axes:
            return array
        return array[self.entry if array.shape[0] > 1 else 0, ...]

    def entries(self) -> Array:
        """Number of the batch entry, (..., 1, 1, 1)."""
        if self.entry is not None:
            return self.xp.reshape(self._count(self.entry, self.entry + 1), (1, 1, 1))
        return self.xp.reshape(self._count(0, math.prod(self.batch)), (*self.batch, 1, 1, 1))

    def head_index(self) -> Array:
        """Number of the query head, (Hq, 1, 1)."""
        return self.xp.reshape(self._count(0, self.heads), (self.heads, 1, 1))

    def query_index(self, rows: range) -> Array:
        """Where the queries stand among the keys, (rows, 1)."""
        if self.block is not None:
            rows = range(self.block.length)
        index = self._count(rows.start + self.position, rows.stop + self.position)
        if self.block is not None:
            index = index + self.block.start
        return self.xp.expand_dims(index, axis=-1)

    def key_index(self, columns: range) -> Array:
        """Number of the key, (1, columns)."""
        return self.xp.expand_dims(self._count(columns.start, columns.stop), axis=0)

    def _count(self, start: int, stop: int) -> Array:
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self.device)


def pairs_of(
    function: str, name: str, shape: Sequence[int], held: Iterable[tuple[str, object]], like: object
) -> Pairs:
    """The pairs of scores (L, S) or (..., Hq, L, S), for arrays like `like`, like those held, or NumPy's."""
    if not isinstance(shape, tuple | list):
        rule = "`shape` must be (L, S) or (..., Hq, L, S)"
        raise TypeError(checks.message(function, rule, {"shape": repr(shape)}))
    sizes = tuple(checks.integer(function, f"shape[{axis}]", n, least=0) for axis, n in enumerate(shape))
    if len(sizes) < 2:
        rule = "`shape` must be (L, S) or (..., Hq, L, S)"
        raise ValueError(checks.message(function, rule, {"shape": shape}))
    named = {} if like is None else {"like": like}
    named |= {f"{name}.{argument} ({n + 1})": array for n, (argument, array) in enumerate(held)}
    xp, arrays = checks.one_library(function, named or {"like": numpy_array()})
    checks.one_device(function, arrays)
    first = next(iter(arrays.values()))
    device = device_of(first)
    return Pairs(
        function=function,
        library=library_of(first),
        xp=xp,
        device=device,
        dtype=widest_dtype(first),
        input_dtype=None,
        execution_kind=execution_kind(arrays.values()),
        batch=sizes[:-3],
        heads=sizes[-3] if len(sizes) > 2 else 1,
        queries=sizes[-2],
        keys=sizes[-1],
        flat=len(sizes) == 2,
    )
