"""Where the tokens of a KVCache lie in memory, and how new tokens are written there.

A cache has slots in two buffers, which caches that are appended to in place share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .._checks.arrays import check_known, check_one_kind, slice_of_axis
from .._checks.messages import type_name
from .._libraries import computing, has_override, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Shape
from ..errors import ArgumentTypeError, ArgumentValueError

P = ParamSpec("P")
T = TypeVar("T")


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
class TokenSlots:
    """The slots of the tokens of one cache."""

    buffers: Buffers
    start: int
    length: int
    writes: int = 0
    """The number of writes into the buffers when the cache was made."""

    def tokens(self, name: str) -> Array:
        """Return the tokens, as a view."""
        if self._is_overwritten:
            rule = "the tokens of a cache must not be overwritten"
            hint = (
                "A cache with fewer tokens was appended to in place, in the same memory, or an exception ended "
                "an append that moved these. Use the newest cache, or create one."
            )
            raise ArgumentValueError("KVCache", rule, {"tokens of this cache": self.length}, hint)
        array, axis = self.buffers.arrays[name], self.buffers.axis
        if len(getattr(array, "shape", ())) < -axis:  # JAX put something else where arrays were, such as axes
            return array
        is_whole = array.shape[axis] == self.length
        if is_whole:
            return array
        # A decoder reads its cache at each step: only libraries whose settings matter get a context.
        with computing(array) if library_of(array).needs_context else nullcontext():
            return array[slice_of_axis(axis, self.start, self.start + self.length)]

    def arrays(self) -> dict[str, Array]:
        return {name: self.tokens(name) for name in self.buffers.arrays}

    def without(self, first: int, last: int) -> TokenSlots:
        """Return the slots without those of the first and of the last tokens."""
        return replace(self, start=self.start + first, length=self.length - first - last)

    def append(self, function: str, new: Mapping[str, Array]) -> TokenSlots:
        """Write tokens behind these, and return the slots of all.

        If the room behind them is too small because older tokens were dropped, the tokens move to the front.
        """
        buffers, axis = self.buffers, self.buffers.axis
        named = {f"cache.{name}": array for name, array in buffers.arrays.items()}
        check_writeable(function, "`in_place=True`", named)
        length = self.length + new["key"].shape[axis]
        capacity = self.length if buffers.are_of_caller else buffers.capacity
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
            pairs = {name: [self.tokens(name), new[name]] for name in buffers.arrays}
            first, written = 0, {name: namespace_of(x[0]).concat(x, axis=axis) for name, x in pairs.items()}
        # Announced before the first number changes: an exception may come at any line, and from here on a cache
        # that has one of these slots raises an error. Others stay as they are, and this one can be appended to.
        buffers.begun = write = buffers.begun + 1
        buffers.writes_of_slots = buffers.writes_of_slots or [0] * buffers.capacity
        buffers.writes_of_slots[first : start + length] = [write] * (start + length - first)
        for name, array in buffers.arrays.items():
            array[slice_of_axis(axis, first, start + length)] = written[name]
        buffers.writes, buffers.tokens = write, length
        return TokenSlots(buffers, start, length, write)

    @property
    def _is_overwritten(self) -> bool:
        if self.writes == self.buffers.begun:
            return False
        # Slots behind the cache are not asked about: what is appended to it goes there.
        last_writes = self.buffers.writes_of_slots[self.start : self.start + self.length]
        return any(write > self.writes for write in last_writes)


class _HasSlots(Protocol):
    _slots: TokenSlots


C = TypeVar("C", bound=_HasSlots)


def in_context_of_keys(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Let a method move numbers to the device, such as the ends of a slice, and compute on that of the keys."""

    @functools.wraps(method)
    def computing_method(cache: C, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        key = cache._slots.buffers.arrays["key"]
        # Each step of a decoder comes here: only libraries whose settings matter get a context.
        with computing(key) if library_of(key).needs_context else nullcontext():
            return method(cache, *arguments, **keywords)

    return computing_method


def with_room(array: Array, room: int, axis: int) -> Array:
    """Return a copy with `room` more elements along an axis."""
    xp = namespace_of(array)
    shape = list(array.shape)
    shape[axis] = room
    with computing(array):
        free = xp.zeros(tuple(shape), dtype=array.dtype, device=library_of(array).device(array))
        return xp.concat([array, free], axis=axis)


def check_same_but_width(function: str, shapes: Mapping[str, Shape]) -> None:
    """Check that two shapes have heads, a length and a width, and differ only in the width."""
    for name, shape in shapes.items():
        check_known(function, name, shape)
    (first_name, first), (second_name, second) = shapes.items()
    names = f"`{first_name}` and `{second_name}`"
    got = {f"{first_name}.shape": first, f"{second_name}.shape": second}
    if min(len(first), len(second)) < 3:
        raise ArgumentValueError(function, f"{names} must have at least 3 axes", got)
    if first[:-1] != second[:-1]:
        rule = f"{names} must have the same shape, except for the width (axis -1)"
        raise ArgumentValueError(function, rule, got)


def check_new_tokens(
    function: str, new: Mapping[str, AnyArray], cached: Mapping[str, Array], targets: Sequence[Shape], axis: int
) -> dict[str, Array]:
    """Return the key and the value that are appended: arrays of the kind of the `cached`.

    They differ from the shapes `targets` in their length on `axis`.
    """
    named = {f"cache.{name}": array for name, array in cached.items()}
    _, arrays = check_one_kind(function, {**new, **named})
    tokens = {name: arrays[name] for name in new}
    for (name, array), target in zip(tokens.items(), targets, strict=True):
        shape = array.shape
        other_axes = [n for n in range(-len(shape), 0) if n != axis]
        if len(shape) != len(target) or any(shape[n] != target[n] for n in other_axes):
            rule = f"`{name}` must have the shape of the cache, except for the length (axis {axis})"
            raise ArgumentValueError(function, rule, {f"{name}.shape": shape, f"cache.{name}.shape": target})
    check_same_but_width(function, {name: array.shape for name, array in tokens.items()})
    return tokens


def check_writeable(function: str, feature: str, arrays: Mapping[str, Array]) -> None:
    """Check that each element of the arrays can be written to without another one, which `feature` needs."""
    for name, array in arrays.items():
        if not library_of(array).is_writeable(array):
            rule = f"{feature} needs arrays that can be written to"
            hint = "Without it, `append` copies the cache and works with every library."
            raise ArgumentTypeError(
                function, rule, {name: f"a read-only or broadcast {type_name(array)}"}, hint
            )


def refuse_graph_values(function: str, feature: str, arrays: Mapping[str, object]) -> None:
    """Check that `feature` gets arrays, and not values of a graph that is being exported."""
    if has_override(*arrays.values()):
        rule = f"{feature} needs arrays, not values of a graph"
        got = {name: type_name(array) for name, array in arrays.items()}
        raise ArgumentTypeError(function, rule, got, "In a graph, use a KVCache without `capacity`.")
