"""The grid of scores of a call: L queries x S keys for each query head of each batch entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from .._checks.arrays import check_floating
from .._checks.integers import (
    DeviceNumbers,
    Integers,
    check_ids,
    check_integers,
    check_one_each,
    check_within,
    is_integral,
)
from .._checks.keywords import LARGEST_INTEGER, check_integer
from .._checks.score_arrays import THE_BATCH, check_added_dtype, check_broadcasts, check_broadcasts_to_sequences
from .._libraries import are_consecutive, is_array, is_traced, library_of, rows_at
from .._libraries.base import Library
from .._libraries.protocols import Access, Array, Device, Dtype, Namespace, Shape
from ..errors import ArgumentValueError

if TYPE_CHECKING:  # few grids are on a device
    from .on_device import BlockBounds, PaddedLengths, Questions


FAR = 2**62
"""Beyond any length."""


class WindowPlace(NamedTuple):
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
    position: int = 0
    """The position of the first query among the keys, in a program for all lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreGrid:
    """The lengths of a call, and how to make arrays that fit its scores.

    Masks and biases are bound to a grid: they check their arguments against it, and convert them to its
    library.

    The sequences of a packed batch or of a paged cache have different lengths. Sequences of equal lengths
    share a grid, which names their batch `entries`: arrays with one element for each batch entry are indexed
    with them. On a device, sequences of unlike lengths share a grid too, which has their `padding`.
    """

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
    queries: int
    keys: int
    is_2d: bool = False
    """Whether the caller's arrays are 2-D: one head, and no head axis."""
    position: int = 0
    """The position of the first query among the keys; caches set it. With `padding` it is the least of all."""
    needs_all_axes: bool = False
    """Whether arrays meet the scores with all of their axes: JAX may be set to broadcast no others."""
    entries: tuple[int, ...] | None = None
    """The numbers of the batch entries that the grid is for, or None if it is for all of them."""
    has_positions: bool = False
    """Whether tokens have positions of their own, so that the lengths do not bound the distances."""
    is_packed: bool = False
    """Whether the queries of the batch entries are packed, so that their numbers may differ."""
    entry_index: Array | None = None
    """`entries` as int32 (n,) on the device, if they are there already."""
    padding: PaddedLengths | None = None
    """The lengths of the batch entries, if they are padded to `queries` and `keys`."""
    position_spread: int = 0
    """The difference between the largest and the smallest position of a first query."""
    is_reproducible: bool = False
    """Whether the bits of a row must not depend on the other rows: see `_programs/fixed_blocks.py`."""
    questions: Questions | None = None
    """What masks and biases ask of a device while they are bound; None if they are not to ask."""
    placement: WindowPlace | None = None
    """The whole grid, if a compiler knows a length by its symbol alone."""

    @property
    def is_traced(self) -> bool:
        """Whether values cannot be read now."""
        return self.access.is_traced

    @property
    def is_writeable(self) -> bool:
        """Whether computed arrays can be written to."""
        return self.access.is_writeable

    @property
    def waits(self) -> bool:
        """Whether to read a value is to wait for a device, as on a GPU."""
        return self.access.waits

    def may_read(self, *arrays: Array) -> bool:
        """Return whether values of the call and of `arrays` can be read now, without waiting for a device."""
        return not (self.is_traced or self.waits or any(map(is_traced, arrays)))

    @property
    def uses_our_threads(self) -> bool:
        """Whether calls are divided among threads of sdpa_xp: see `Access`."""
        return self.access.uses_our_threads

    @property
    def positions(self) -> int | Array:
        """The position of the first query among the keys; with `padding` one for each entry, (n, 1, 1, 1)."""
        if self.placement is not None:
            return self.placement.position
        return self.position if self.padding is None else self.padding.positions

    @property
    def sides(self) -> tuple[range, range]:
        """All queries and all keys, as the ranges of a tile."""
        return (range(FAR),) * 2 if self.placement is not None else (range(self.queries), range(self.keys))

    def with_symbols(self) -> ScoreGrid:
        """Return the grid for lengths that a compiler may know by their symbols alone."""
        if all(map(self.library.is_known, (self.queries, self.keys))):
            return self
        placement, position = WindowPlace(self.queries, self.keys, position=self.position), self.position
        if self.library.is_known(position):
            return replace(self, placement=placement)
        return replace(self, placement=placement, position=-FAR, position_spread=2 * FAR)

    @property
    def caller_shape(self) -> Shape:
        """The shape of the scores as the caller sees them, (..., Hq, L, S), or (L, S) for 2-D inputs."""
        lengths = (self.queries, self.keys)
        return lengths if self.is_2d else (*self.batch_and_heads, *lengths)

    def caller_shapes(self) -> tuple[Shape, ...]:
        """Return `caller_shape`; with `padding` those of the shortest and of the longest lengths."""
        if self.padding is None:
            return (self.caller_shape,)
        lengths = (self.padding.queries, self.padding.keys)
        return tuple((*self.batch_and_heads, *map(choose, lengths)) for choose in (min, max))

    @property
    def shape(self) -> Shape:
        """The shape of the scores as they are computed: always with heads, and with one axis for `entries`."""
        return (*self.leading_shape, self.queries, self.keys)

    @property
    def leading_shape(self) -> Shape:
        """`shape` without the last two axes."""
        return self.batch_and_heads if self.entries is None else (len(self.entries), self.heads)

    @property
    def batch_and_heads(self) -> Shape:
        """(..., Hq)."""
        return (*self.batch, self.heads)

    def for_entries(self, entries: tuple[int, ...], queries: int, keys: int, position: int = 0) -> ScoreGrid:
        """Return the grid of some batch entries, which have their own lengths."""
        return replace(self, entries=entries, queries=queries, keys=keys, position=position)

    def for_padded(self, entries: tuple[int, ...], index: Array, padding: PaddedLengths) -> ScoreGrid:
        """Return the grid of some batch entries, which are padded to the longest of them."""
        least, most = min(padding.first_positions), max(padding.first_positions)
        lengths = max(padding.queries), max(padding.keys)
        # Sequences of equal lengths have no padding to be masked, and one position for all.
        is_padded = len({*zip(padding.queries, padding.keys, padding.first_positions, strict=True)}) > 1
        grid = replace(self.for_entries(entries, *lengths, least), entry_index=index)
        return replace(grid, padding=padding, position_spread=most - least) if is_padded else grid

    def check_integers(self, name: str, value: object, least: int = -LARGEST_INTEGER) -> Integers:
        """Check one integer for all batch entries, or one for each: an int or (..., 1, 1, 1)."""
        return self._checked_integers(name, self._integers_of_entries(name, value), least)

    def check_lengths(self, name: str, value: object, letter: Literal["L", "S"]) -> Integers:
        """Check integers as `check_integers` does, which are at least 0 and at most L or S."""
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
        xp, device, waiting = self.xp, self.device, self._waiting()
        checked = check_integers(
            self.function, name, value, xp, device, traced=self.is_traced, least=least, waiting=waiting
        )
        values = cast(Array, checked.values)
        if values.shape == (1,) and not self.batch:  # a list of one for inputs without a batch
            return checked._replace(values=self.in_all_axes(values, 2))
        if self.entries is None:
            check_broadcasts(self.function, name, values.shape, self.batch, THE_BATCH)
        return checked._replace(values=self.in_all_axes(values, 3))

    def check_offset(self, name: str, value: object) -> Integers:
        """Check the shift of a diagonal to the right, in keys: integers, or "lower_right"."""
        if isinstance(value, str):
            if self.padding is not None:
                return self.padding.lower_right()
            offset = self.keys - self.queries - cast(int, self.positions)
            return Integers(offset, *([-math.inf, math.inf] if self.placement is not None else [offset] * 2))
        return self.check_integers(name, value)

    def check_ids(self, name: str, value: object, letter: Literal["L", "S"], hint: str = "") -> Array:
        """Check an id for each query or key, (..., L) or (..., S)."""
        ids = check_ids(self.function, name, value, self.xp, self.device, self._waiting())
        length = self.queries if letter == "L" else self.keys
        for number in (length,) if self.padding is None else self.padding.lengths(letter):
            check_one_each(self.function, name, ids.shape, (*self.batch, number), letter, hint)
        return self.slice_entries(ids, 1)

    def check_scores_shape(self, name: str, array: Array) -> Array:
        """Check an array that broadcasts to the scores."""
        if self.entries is None:
            check_broadcasts(self.function, name, array.shape, self.caller_shape, "(..., Hq, L, S)")
        else:
            for shape in self.caller_shapes():
                check_broadcasts_to_sequences(self.function, name, array.shape, shape, packed=self.is_packed)
        return self.in_all_axes(self.slice_entries(array, 3))

    def check_heads_shape(self, name: str, array: Array) -> Array:
        """Check an array that broadcasts to (..., Hq); returns it as (..., Hq, 1, 1)."""
        check_broadcasts(self.function, name, array.shape, self.batch_and_heads, "(..., Hq)")
        return self.in_all_axes(self.slice_entries(array, 1), 2)

    def check_dtype(self, name: str, array: Array) -> None:
        """Refuse an array that is added to the scores, and has a wider dtype than they and the query."""
        check_floating(self.function, name, array)
        if self.input_dtype is not None:
            check_added_dtype(self.function, name, array, self.input_dtype, self.dtype)

    def lengths(self, name: str, letters: str = "LS") -> list[int]:
        """Return how far the places of the queries and of the keys go; a graph may not know it."""
        if self.position < 0 and self.placement is None:
            rule = f"`{name}` must be used with at most as many queries as keys in a cache"
            raise ArgumentValueError(self.function, rule, {"L": self.queries, "S": self.keys})
        place = self.placement
        last_position = self.position + self.position_spread if place is None else place.position
        ends = {"L": self.queries + last_position, "S": self.keys}
        return [ends[letter] for letter in letters]

    def put(self, numbers: Sequence[float], dtype: Dtype) -> Array:
        """Return a list of numbers as an array; a device that has to be waited for gets each list once."""
        sharing = self.library.sharing() if self.waits else None
        if sharing is None:
            return self.xp.asarray(numbers, dtype=dtype, device=self.device)
        from .on_device import put_once

        return put_once(self.library, self.xp, self.device, dtype, numbers, sharing)

    def block_bounds(self, array: Array) -> BlockBounds | None:
        """Return the bounds of an array that broadcasts to the scores, if a device is asked for them now.

        A small array is not asked about: no tile of it could be skipped. An empty one has no bounds.
        """
        if self.questions is None or array.ndim < 2 or 0 in array.shape:
            return None
        from .on_device import SIDE, ask_block_bounds

        if max(array.shape[-2:]) <= SIDE:
            return None
        return ask_block_bounds(self.questions, self.xp, array)

    def _waiting(self) -> DeviceNumbers | None:
        if not self.waits:
            return None
        return DeviceNumbers(lambda numbers: self.put(numbers, self.xp.int32), self._bounds)

    def _bounds(self, integers: Array) -> Sequence[int] | None:
        def bounds() -> Array:
            return self.xp.stack([self.xp.min(integers), self.xp.max(integers)], axis=0)

        if self.questions is not None:
            return self.questions.ask(bounds)
        return cast(list[int], self.library.to_list(bounds()))

    def slice_entries(self, array: Array, axes: int) -> Array:
        """Return the part of `array` for `entries`; the batch axis stands before the last `axes` axes."""
        if self.entries is None or array.ndim <= axes or array.shape[0] == 1:
            return array
        if self.entry_index is not None and not are_consecutive(self.entries):
            return self.xp.take(array, self.entry_index, axis=0)
        return rows_at(array, self.entries)

    def in_all_axes(self, array: Array, last: int = 0) -> Array:
        """Return an array with `last` new axes behind its own, and, with `needs_all_axes`, others in front."""
        shape = (*array.shape, *[1] * last)
        missing = len(self.leading_shape) + 2 - len(shape) if self.needs_all_axes else 0
        return self.xp.reshape(array, (*[1] * missing, *shape)) if missing or last else array

    def arange(self, start: int, stop: int) -> Array:
        """Return the int32 from `start` up to `stop`."""
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self.device)

    def batch_index(self) -> Array:
        """Return the numbers of the batch entries, (..., 1, 1, 1); batch axes are counted through."""
        if self.entries is not None:
            numbers = self.entry_index
            if numbers is None:
                numbers = self.xp.asarray([*self.entries], dtype=self.xp.int32, device=self.device)
            return self.xp.reshape(numbers, (len(self.entries), 1, 1, 1))
        return self.xp.reshape(self.arange(0, math.prod(self.batch)), (*self.batch, 1, 1, 1))

    def head_index(self) -> Array:
        """Return the numbers of the query heads, (Hq, 1, 1)."""
        return self.in_all_axes(self.arange(0, self.heads), 2)

    def _integers_of_entries(self, name: str, value: Any) -> object:
        """Return the integers of `entries`, out of one for each batch entry or one for all."""
        entries = self.entries
        if entries is None or not (isinstance(value, tuple | list) or is_array(value)):
            return value
        shape = (len(value),) if isinstance(value, tuple | list) else value.shape
        check_broadcasts(self.function, name, shape, self.batch, THE_BATCH)
        if not shape:
            return value
        if shape[0] == 1 or len(entries) == 1:  # one number, not an array, so that tiles outside can be skipped
            return value[entries[0] if shape[0] > 1 else 0]
        if is_array(value):
            is_read = self.padding is not None and is_integral(value) and not self.is_traced
            if not is_read:
                return rows_at(value, entries)
            value = library_of(value).to_list(value)  # each is compared with a length, so all are read at once
        integers = [value[entry] for entry in entries]
        is_equal = len(set(integers)) == len(set(map(type, integers))) == 1  # True == 1, which is refused
        return integers[0] if is_equal else integers
