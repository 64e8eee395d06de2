"""The grid of scores of a call: L queries x S keys for each query head of each batch entry.

Masks and biases know `CallGrid`: what they ask while they are bound to a grid, and about a tile. `ScoreGrid`
answers for arrays, and the exporter's `FormulaGrid` for values of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, cast

from .._checks.arrays import check_floating, check_one_device, check_one_library
from .._checks.keywords import LARGEST_INTEGER, check_integer
from .._checks.score_arrays import (
    THE_BATCH,
    Integers,
    check_added_dtype,
    check_broadcasts,
    check_broadcasts_to_sequences,
    check_ids,
    check_integers,
    check_one_each,
    check_within,
    is_integral,
)
from .._libraries import (
    access_of,
    are_consecutive,
    is_array,
    library_of,
    may_read,
    numpy_array,
    rows_at,
    widest_dtype,
)
from .._libraries.base import Library
from .._libraries.protocols import Access, Array, Device, Dtype, Namespace, Shape
from ..errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from .on_device import BlockBounds, PaddedLengths, Questions


FAR = 2**62
"""Beyond any length."""


class WindowBounds(NamedTuple):
    """What is known, before the run, of a window of the grid of which only a run knows where it lies or ends.

    In a program on several devices each device has its own place. In a program for all lengths the window is
    the grid: its compiler knows a length by its symbol alone, and masks are asked about a tile that goes on to
    `FAR`.
    """

    queries: int
    keys: int
    query_start: Array | None = None
    """The first query of the window; None is the first of the grid."""
    key_start: Array | None = None


class FirstPosition(NamedTuple):
    """The position of the first query among the keys, which caches set; batch entries may differ."""

    values: int | Array
    """One for all, or one for each batch entry, (n, 1, 1, 1)."""
    least: int
    most: int


AT_FIRST_KEY = FirstPosition(0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CallGrid(Protocol):
    """What the arrays of a call are, and how masks and biases check their arguments and convert them."""

    function: str
    """The public function that was called, for messages."""
    library: Library
    xp: Namespace
    device: Device
    dtype: Dtype
    """The accumulation dtype."""
    input_dtype: Dtype
    """The dtype of the query, which biases may have too; None if there is no query."""
    access: Access
    batch: Shape
    heads: int
    """Query heads."""
    has_positions: bool = False
    """Whether tokens have positions of their own, so that the lengths do not bound the distances."""
    questions: Questions | None = None
    """What masks and biases ask of a device while they are bound; None if they are not to ask."""
    placement: WindowBounds | None = None
    """The whole grid, if a compiler knows a length by its symbol alone."""

    @property
    def batch_and_heads(self) -> Shape:
        """(..., Hq)."""
        return (*self.batch, self.heads)

    @property
    def padding(self) -> PaddedLengths | None:
        """The lengths of the batch entries, if they are padded."""
        return None

    def at_positions(self) -> Self:
        """Return the grid of tokens that have positions of their own."""
        return replace(self, has_positions=True)

    def may_read(self, *arrays: Array) -> bool:
        """Return whether values of the call and of `arrays` can be read now, without waiting for a device."""
        return may_read(self.access, *arrays)

    def check_dtype(self, name: str, array: Array) -> None:
        """Refuse an array that is added to the scores, and has a wider dtype than they and the query."""
        check_floating(self.function, name, array)
        if self.input_dtype is not None:
            check_added_dtype(self.function, name, array, self.input_dtype, self.dtype)

    def block_bounds(self, array: Array) -> BlockBounds | None:
        """Return the bounds of an array that broadcasts to the scores, if a device is asked for them now.

        A small array is not asked about: no tile of it could be skipped. An empty one has no bounds.
        """
        if self.questions is None or array.ndim < 2 or 0 in array.shape:
            return None
        from .on_device import SIDE, ask_block_bounds

        is_small = max(array.shape[-2:]) <= SIDE
        return None if is_small else ask_block_bounds(self.questions, self.xp, array)

    def bounds(self, _integers: Array, /) -> Sequence[int] | None:
        """Return the least and the most of some integers; None if they are not known yet, as in a graph."""
        return None

    def check_integers(self, name: str, value: object, least: int = -LARGEST_INTEGER) -> Integers:
        """Check one integer for all batch entries, or one for each: an int or (..., 1, 1, 1)."""

    def check_lengths(self, name: str, value: object, letter: Literal["L", "S"]) -> Integers:
        """Check integers as `check_integers` does, which are at least 0 and at most L or S."""

    def check_offset(self, name: str, value: object) -> Integers:
        """Check the shift of a diagonal to the right, in keys: integers, or "lower_right"."""

    def check_ids(self, name: str, value: object, letter: Literal["L", "S"], hint: str = "") -> Array:
        """Check an id for each query or key, (..., L) or (..., S)."""

    def check_scores_shape(self, name: str, array: Array) -> Array:
        """Check an array that broadcasts to the scores."""

    def check_heads_shape(self, name: str, array: Array) -> Array:
        """Check an array that broadcasts to (..., Hq); returns it as (..., Hq, 1, 1)."""

    def lengths(self, name: str, letters: str = "LS") -> list[int]:
        """Return how far the places of the queries and of the keys go; a graph may not know it."""

    def distances(self) -> tuple[float, float]:
        """Return the smallest and the largest j - i of the pairs; infinite if they are not known."""

    def put(self, numbers: Sequence[float], dtype: Dtype) -> Array:
        """Return a list of numbers as an array."""

    def entry_numbers(self, count: int) -> Sequence[int]:
        """Return the numbers of the grid's batch entries among `count`, or the one number of 1 for all."""
        return range(count)

    def slice_entries(self, array: Array, axes: int, /) -> Array:
        """Return the part of `array` for the grid's batch entries; behind the batch axis stand `axes` axes."""

    def in_all_axes(self, array: Array, last: int = 0) -> Array:
        """Return an array with `last` new axes behind its own, and with all axes if it must have them."""

    def head_index(self) -> Array:
        """Return the number of each query head, (Hq, 1, 1)."""

    def arange(self, start: Any, stop: Any) -> Array:
        """Return the integers from `start` up to `stop`."""


class BatchPart(NamedTuple):
    """Some entries of a batch, which are computed together because they have equal lengths, or are padded.

    Arrays with one element for each batch entry are indexed with their numbers.
    """

    entries: tuple[int, ...]
    """The numbers of the batch entries."""
    is_packed: bool = False
    """Whether the queries of the batch entries are packed, so that their numbers may differ."""
    entry_index: Array | None = None
    """`entries` as int32 (n,) on the device, if they are there already."""
    padding: PaddedLengths | None = None
    """The lengths of the entries, if they are padded to those of the grid: on a device."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreGrid(CallGrid):
    """The lengths of a call, and how to make arrays that fit its scores.

    Masks and biases are bound to a grid: they check their arguments against it, and convert them to its
    library.
    """

    queries: int
    keys: int
    is_2d: bool = False
    """Whether the caller's arrays are 2-D: one head, and no head axis."""
    position: FirstPosition = AT_FIRST_KEY
    part: BatchPart | None = None
    """The batch entries that the grid is for; None is all of them."""
    needs_all_axes: bool = False
    """Whether arrays meet the scores with all of their axes: JAX may be set to broadcast no others."""
    is_reproducible: bool = False
    """Whether the bits of a row must not depend on the other rows: see `_programs/fixed_blocks.py`."""

    @property
    def padding(self) -> PaddedLengths | None:
        """The lengths of the batch entries, if they are padded."""
        return None if self.part is None else self.part.padding

    @property
    def sides(self) -> tuple[range, range]:
        """All queries and all keys, as the ranges of a tile."""
        return (range(FAR),) * 2 if self.placement is not None else (range(self.queries), range(self.keys))

    def asking(self) -> ScoreGrid:
        """Return the grid whose masks and biases note what they ask of a device, if it has to be waited for."""
        if not self.access.waits:
            return self
        from .on_device import Questions

        return replace(self, questions=Questions())

    def with_symbols(self) -> ScoreGrid:
        """Return the grid for lengths that a compiler may know by their symbols alone."""
        if all(map(self.library.is_known, (self.queries, self.keys))):
            return self
        position = self.position
        if not self.library.is_known(position.values):
            position = position._replace(least=-FAR, most=FAR)
        return replace(self, placement=WindowBounds(self.queries, self.keys), position=position)

    def caller_shapes(self) -> list[Shape]:
        """Return the shape of the scores as the caller sees them, (..., Hq, L, S), or (L, S) for 2-D inputs.

        With `padding` there are two, of the shortest and of the longest lengths.
        """
        padding, lengths = self.padding, [(self.queries, self.keys)]
        if padding is not None:
            lengths = [(choose(padding.queries), choose(padding.keys)) for choose in (min, max)]
        return [pair if self.is_2d else (*self.batch_and_heads, *pair) for pair in lengths]

    @property
    def shape(self) -> Shape:
        """The shape of the scores as they are computed: always with heads, and with one axis for entries."""
        return (*self.leading_shape, self.queries, self.keys)

    @property
    def leading_shape(self) -> Shape:
        """`shape` without the last two axes."""
        return self.batch_and_heads if self.part is None else (len(self.part.entries), self.heads)

    def for_entries(self, part: BatchPart, queries: int, keys: int, position: int = 0) -> ScoreGrid:
        """Return the grid of some batch entries, which have their own lengths."""
        first = FirstPosition(position, position, position)
        return replace(self, part=part, queries=queries, keys=keys, position=first)

    def for_padded(self, part: BatchPart, padding: PaddedLengths) -> ScoreGrid:
        """Return the grid of some batch entries, which are padded to the longest of them."""
        least, most = min(padding.first_positions), max(padding.first_positions)
        grid = self.for_entries(part, max(padding.queries), max(padding.keys), least)
        # Sequences of equal lengths have no padding to be masked, and one position for all.
        if len({*zip(padding.queries, padding.keys, padding.first_positions, strict=True)}) == 1:
            return grid
        position = FirstPosition(padding.positions, least, most)
        return replace(grid, part=part._replace(padding=padding), position=position)

    def check_integers(self, name: str, value: object, least: int = -LARGEST_INTEGER) -> Integers:
        return self._checked_integers(name, self._integers_of_entries(name, value), least)

    def check_lengths(self, name: str, value: object, letter: Literal["L", "S"]) -> Integers:
        value = self._integers_of_entries(name, value)
        lengths = self._checked_integers(name, value, least=0)
        if self.padding is None:
            limit = self.queries if letter == "L" else self.keys
            if self.library.is_known(limit):
                check_within(self.function, name, lengths, limit, letter)
            return lengths
        limits = self.padding.lengths(letter)
        numbers = value if isinstance(value, list) else [lengths.most] * len(limits)
        for number, limit in zip(numbers, limits, strict=True):
            check_within(self.function, name, Integers(number, number, number), limit, letter)
        return lengths

    def _checked_integers(self, name: str, value: object, least: int) -> Integers:
        if not (isinstance(value, tuple | list) or is_array(value)):  # one number has no shape to check
            number = check_integer(self.function, name, value, least)
            return Integers(number, number, number)
        checked = check_integers(self.function, name, value, self.xp, self.device, least=least, store=self)
        values = cast(Array, checked.values)
        if values.shape == (1,) and not self.batch:  # a list of one for inputs without a batch
            return checked._replace(values=self.in_all_axes(values, 2))
        if self.part is None:
            check_broadcasts(self.function, name, values.shape, self.batch, THE_BATCH)
        return checked._replace(values=self.in_all_axes(values, 3))

    def check_offset(self, name: str, value: object) -> Integers:
        if isinstance(value, str):
            if self.padding is not None:
                return self.padding.lower_right()
            offset = self.keys - self.queries - cast(int, self.position.values)
            return Integers(offset, *([-math.inf, math.inf] if self.placement is not None else [offset] * 2))
        return self.check_integers(name, value)

    def check_ids(self, name: str, value: object, letter: Literal["L", "S"], hint: str = "") -> Array:
        ids = check_ids(self.function, name, value, self.xp, self.device, self)
        length = self.queries if letter == "L" else self.keys
        for number in (length,) if self.padding is None else self.padding.lengths(letter):
            check_one_each(self.function, name, ids.shape, (*self.batch, number), letter, hint)
        return self.slice_entries(ids, 1)

    def check_scores_shape(self, name: str, array: Array) -> Array:
        for shape in self.caller_shapes():
            if self.part is None:
                check_broadcasts(self.function, name, array.shape, shape, "(..., Hq, L, S)")
            else:
                is_packed = self.part.is_packed
                check_broadcasts_to_sequences(self.function, name, array.shape, shape, packed=is_packed)
        return self.in_all_axes(self.slice_entries(array, 3))

    def check_heads_shape(self, name: str, array: Array) -> Array:
        check_broadcasts(self.function, name, array.shape, self.batch_and_heads, "(..., Hq)")
        return self.in_all_axes(self.slice_entries(array, 1), 2)

    def lengths(self, name: str, letters: str = "LS") -> list[int]:
        position = self.position
        if position.least < 0 and self.placement is None:
            rule = f"`{name}` must be used with at most as many queries as keys in a cache"
            raise ArgumentValueError(self.function, rule, {"L": self.queries, "S": self.keys})
        last_position = position.most if self.placement is None else cast(int, position.values)
        ends = {"L": self.queries + last_position, "S": self.keys}
        return [ends[letter] for letter in letters]

    def distances(self) -> tuple[float, float]:
        if self.has_positions or self.placement is not None:
            return -math.inf, math.inf
        return 1 - self.queries - self.position.most, self.keys - 1 - self.position.least

    def put(self, numbers: Sequence[float], dtype: Dtype) -> Array:
        """Return a list of numbers as an array; a device that has to be waited for gets each list once."""
        sharing = self.library.sharing() if self.access.waits else None
        if sharing is None:
            return self.xp.asarray(numbers, dtype=dtype, device=self.device)
        from .on_device import put_once

        return put_once(self.library, self.xp, self.device, dtype, numbers, sharing)

    def bounds(self, integers: Array) -> Sequence[int] | None:
        """Return the least and the most of some integers; None if they are not known yet."""
        if self.access.is_traced:
            return None
        if self.questions is None or 0 in integers.shape:
            return library_of(integers).bounds(integers)
        return self.questions.ask(lambda: self.xp.stack([self.xp.min(integers), self.xp.max(integers)], axis=0))

    def entry_numbers(self, count: int) -> Sequence[int]:
        return range(count) if self.part is None or count == 1 else self.part.entries

    def slice_entries(self, array: Array, axes: int, /) -> Array:
        if self.part is None or array.ndim <= axes or array.shape[0] == 1:
            return array
        if self.part.entry_index is not None and not are_consecutive(self.part.entries):
            return self.xp.take(array, self.part.entry_index, axis=0)
        return rows_at(array, self.part.entries)

    def in_all_axes(self, array: Array, last: int = 0) -> Array:
        shape = (*array.shape, *[1] * last)
        missing = len(self.leading_shape) + 2 - len(shape) if self.needs_all_axes else 0
        return self.xp.reshape(array, (*[1] * missing, *shape)) if missing or last else array

    def arange(self, start: int, stop: int) -> Array:
        """Return the int32 from `start` up to `stop`."""
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self.device)

    def batch_index(self) -> Array:
        """Return the numbers of the batch entries, (..., 1, 1, 1); batch axes are counted through."""
        if self.part is None:
            return self.xp.reshape(self.arange(0, math.prod(self.batch)), (*self.batch, 1, 1, 1))
        numbers, entries = self.part.entry_index, self.part.entries
        if numbers is None:
            numbers = self.xp.asarray([*entries], dtype=self.xp.int32, device=self.device)
        return self.xp.reshape(numbers, (len(entries), 1, 1, 1))

    def head_index(self) -> Array:
        """Return the numbers of the query heads, (Hq, 1, 1)."""
        return self.in_all_axes(self.arange(0, self.heads), 2)

    def _integers_of_entries(self, name: str, value: Any) -> object:
        """Return the integers of `entries`, out of one for each batch entry or one for all."""
        if self.part is None or not (isinstance(value, tuple | list) or is_array(value)):
            return value
        entries = self.part.entries
        shape = (len(value),) if isinstance(value, tuple | list) else value.shape
        check_broadcasts(self.function, name, shape, self.batch, THE_BATCH)
        if not shape:
            return value
        if shape[0] == 1 or len(entries) == 1:  # one number, not an array, so that tiles outside can be skipped
            entry = entries[0] if shape[0] > 1 else 0
            return value[entry] if is_array(value) else self._integer_of(name, value, entry)
        if is_array(value):
            is_read = self.padding is not None and is_integral(value)
            if not is_read:
                return rows_at(value, entries)
            value = library_of(value).to_list(value)  # each is compared with a length, so all are read at once
        integers = [value[entry] for entry in entries]
        is_equal = len(set(integers)) == len(set(map(type, integers))) == 1  # True == 1, which is refused
        return self._integer_of(name, value, entries[0]) if is_equal else integers

    def _integer_of(self, name: str, values: Any, entry: int) -> int:
        return check_integer(self.function, f"{name}[{entry}]", values[entry], -LARGEST_INTEGER)


def grid_of(
    function: str, name: str, shape: Sequence[int], arrays: Iterable[tuple[str, object]], like: object
) -> ScoreGrid:
    """Return a grid of `shape`, (L, S) or (..., Hq, L, S), without a call.

    The library is that of `like`, else of the first of `arrays`, else NumPy.
    """
    rule = "`shape` must be (L, S) or (..., Hq, L, S)"
    if not isinstance(shape, tuple | list):
        raise ArgumentTypeError(function, rule, {"shape": repr(shape)})
    sizes = tuple(check_integer(function, f"shape[{axis}]", n, least=0) for axis, n in enumerate(shape))
    if len(sizes) < 2:
        raise ArgumentValueError(function, rule, {"shape": shape})
    named = {} if like is None else {"like": like}
    named |= {f"{name}.{argument} ({n + 1})": array for n, (argument, array) in enumerate(arrays)}
    xp, checked = check_one_library(function, named or {"like": numpy_array()})
    check_one_device(function, checked)
    first = next(iter(checked.values()))
    library = library_of(first)
    return ScoreGrid(
        function=function,
        library=library,
        xp=xp,
        device=library.device(first),
        dtype=widest_dtype(function, first),
        input_dtype=None,
        access=access_of(checked.values()),
        batch=sizes[:-3],
        heads=sizes[-3] if len(sizes) > 2 else 1,
        queries=sizes[-2],
        keys=sizes[-1],
        is_2d=len(sizes) == 2,
        needs_all_axes=library.refuses_unlike_axes(),
    )
