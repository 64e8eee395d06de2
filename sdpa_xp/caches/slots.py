"""Where the tokens of a KVCache lie in memory, and how new tokens are written there.

A cache has slots in two buffers, which caches that are appended to in place share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from .._checks import type_name
from .._checks.arrays import slice_of_axis
from .._libraries import computing, library_of, namespace_of
from .._libraries.protocols import Array
from ..errors import ArgumentTypeError, ArgumentValueError


@dataclass(slots=True, eq=False)
class Buffers:
    """The arrays of keys and values, and what was written into them."""

    arrays: Mapping[str, Array]
    """The keys and the values, by the names "key" and "value"; of a quantised cache with their scales."""
    axis: int
    """The axis of the tokens, -2 or -3."""
    tokens: int
    """The number of tokens in the newest cache."""
    are_of_caller: bool = False
    """Whether the caller made the arrays, so that they are never written to."""
    writes: int = 0
    """The number of the last write that was completed. The newest cache has it."""
    begun: int = 0
    """The number of the last write that was begun: an exception may have left some of its tokens."""
    writes_of_slots: list[int] = field(default_factory=list)
    """The number of the last write that was begun into each slot, 0 for those before the first; empty until
    then."""

    @property
    def capacity(self) -> int:
        return self.arrays["key"].shape[self.axis]


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The slots of the tokens of one cache."""

    buffers: Buffers
    start: int
    length: int
    writes: int = 0
    """The number of writes into the buffers when the cache was made."""

    @property
    def room(self) -> int:
        """The number of tokens that there is free memory for; arrays of the caller have none."""
        buffers, length = self.buffers, self.length
        return buffers.capacity - length if not buffers.are_of_caller and buffers.capacity > length else 0

    def read(self, name: str) -> Array:
        """Return the tokens, as a view."""
        buffers, stop = self.buffers, self.start + self.length
        # Slots behind the cache are not asked about: what is appended to it goes there.
        if self.writes != buffers.begun and any(
            write > self.writes for write in buffers.writes_of_slots[self.start : stop]
        ):
            rule = "the tokens of a cache must not be overwritten"
            hint = (
                "A cache with fewer tokens was appended to in place, in the same memory, or an exception ended "
                "an append that moved these. Use the newest cache, or create one."
            )
            raise ArgumentValueError("KVCache", rule, {"tokens of this cache": self.length}, hint)
        array, axis = buffers.arrays[name], buffers.axis
        # JAX may have put something else where arrays were, such as axes.
        if len(getattr(array, "shape", ())) < -axis or array.shape[axis] == self.length:
            return array
        with context_of(array):
            return array[slice_of_axis(axis, self.start, stop)]

    def arrays(self) -> dict[str, Array]:
        return {name: self.read(name) for name in self.buffers.arrays}

    def without(self, first: int, last: int) -> Slots:
        """Return the slots without those of the first and of the last tokens."""
        return replace(self, start=self.start + first, length=self.length - first - last)

    def append(self, function: str, new: Mapping[str, Array]) -> Slots:
        """Write tokens behind these, and return the slots of all.

        If the room behind them is too small because older tokens were dropped, the tokens move to the front.
        """
        buffers, axis = self.buffers, self.buffers.axis
        named = {f"cache.{name}": array for name, array in buffers.arrays.items()}
        check_writeable(function, "`in_place=True`", named, new.values())
        length, capacity = self.length + new["key"].shape[axis], self.length + self.room
        if length > capacity:
            hint = "Create the cache with a larger `capacity`, or append without `in_place`."
            rule = "the tokens must fit into the capacity of the cache"
            raise ArgumentValueError(function, rule, {"tokens": length, "capacity": capacity}, hint)
        if self.writes != buffers.writes:  # its next tokens would be overwritten
            rule = "a cache can be appended to in place only once"
            hint = "Append to the newest cache, or without `in_place`."
            got = {"tokens of this cache": self.length, "tokens of the newest cache": buffers.tokens}
            raise ArgumentValueError(function, rule, got, hint)
        # A window rolls: its tokens go on in the room behind them, and then from the front.
        start = self.start if self.start + length <= buffers.capacity else 0
        first, written = start + self.length, new
        if start != self.start:
            # Copied first, since libraries differ in what a write from an overlapping view does.
            pairs = {name: [self.read(name), new[name]] for name in buffers.arrays}
            first, written = 0, {name: namespace_of(x[0]).concat(x, axis=axis) for name, x in pairs.items()}
        # Announced before the first number changes: an exception may come at any line, and from here on a cache
        # that has one of these slots raises an error. Others stay as they are, and this one can be appended to.
        buffers.begun = write = buffers.begun + 1
        buffers.writes_of_slots = buffers.writes_of_slots or [0] * buffers.capacity
        buffers.writes_of_slots[first : start + length] = [write] * (start + length - first)
        for name, array in buffers.arrays.items():
            array[slice_of_axis(axis, first, start + length)] = written[name]
        buffers.writes, buffers.tokens = write, length
        return Slots(buffers, start, length, write)


def slots_of(
    arrays: Mapping[str, Array], axis: int, room: int | None = None, *, are_of_caller: bool = False
) -> Slots:
    """Return the slots of all tokens of arrays; with `room`, those of copies with so many more slots."""
    shape = getattr(arrays["key"], "shape", ())  # JAX may have put something else where arrays were
    length = shape[axis] if len(shape) >= -axis else 0
    if room is not None:
        arrays = {name: _with_room(array, room, axis) for name, array in arrays.items()}
    return Slots(Buffers(arrays, axis, length, are_of_caller), 0, length)


def _with_room(array: Array, room: int, axis: int) -> Array:
    """Return a copy with `room` more elements along an axis."""
    shape = [*array.shape]
    shape[axis], xp = room, namespace_of(array)
    with computing(array):
        free = xp.zeros(tuple(shape), dtype=array.dtype, device=library_of(array).device(array))
        return xp.concat([array, free], axis=axis)


def context_of(array: Array) -> AbstractContextManager[object]:
    """Return the context that an array is computed in, if its library has settings that matter.

    A decoder comes here at each step: another library would only make and drop a context.
    """
    return computing(array) if library_of(array).needs_context else nullcontext()


def check_writeable(
    function: str, feature: str, arrays: Mapping[str, Array], new: Iterable[Array] = ()
) -> None:
    """Check that each element of the arrays can be written to without another one, which `feature` needs.

    `new` will be written there; its derivatives, if it has any, would be lost in arrays without derivatives.
    """
    for name, array in arrays.items():
        library = library_of(array)
        has_derivatives = any(library_of(x) is not library for x in new)
        if has_derivatives or not library.is_writeable(array):
            rule = f"{feature} needs arrays that can be written to"
            text = f"{type_name(array)}, and new tokens with derivatives"
            got = {name: text if has_derivatives else f"a read-only or broadcast {type_name(array)}"}
            hint = "Without it, `append` copies the cache and works with every library."
            raise ArgumentTypeError(function, rule, got, hint)
