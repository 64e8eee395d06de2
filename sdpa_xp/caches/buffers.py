"""The memory of caches that are appended to in place, which share it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import library_of, namespace_of, quiet
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.layout import slice_of_axis

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Buffers:
    """Two arrays, and what was written into them."""

    arrays: Mapping[str, Array]
    """The keys and the values, by the names "key" and "value"."""
    axis: int
    """The axis of the tokens, -2 or -3."""
    tokens: int
    """The number of tokens in the newest cache."""
    end: int
    """The slot behind the last one that was ever written."""
    are_of_caller: bool = False
    """Whether the caller made the arrays, so that they are never written to."""
    writes: int = 0
    rewrites: list[tuple[int, int, int]] = field(default_factory=list)
    """Each write over older tokens: the number of writes before it, and the slots from start to stop."""

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
        checks.not_overwritten(self._is_overwritten, self.length)
        array, axis = self.buffers.arrays[name], self.buffers.axis
        if len(getattr(array, "shape", ())) < -axis:  # JAX put something else where arrays were, such as axes
            return array
        is_whole = array.shape[axis] == self.length
        if is_whole:
            return array
        with quiet(array) if library_of(array).needs_quiet else nullcontext():
            return array[slice_of_axis(axis, self.start, self.start + self.length)]

    def without(self, first: int, last: int) -> TokenSlots:
        """Return the slots without those of the first and of the last tokens."""
        return replace(self, start=self.start + first, length=self.length - first - last)

    def append(self, function: str, new: Mapping[str, Array]) -> TokenSlots:
        """Write tokens behind these, and return the slots of all.

        If the room behind them is too small because older tokens were dropped, the tokens move to the front.
        """
        buffers, axis = self.buffers, self.buffers.axis
        named = {f"cache.{name}": array for name, array in buffers.arrays.items()}
        checks.writeable(function, "`in_place=True`", named)
        length = self.length + new["key"].shape[axis]
        checks.fits_capacity(function, length, self.length if buffers.are_of_caller else buffers.capacity)
        checks.is_newest(function, self.writes == buffers.writes, self.length, buffers.tokens)
        start = self.start if self.start + length <= buffers.capacity else 0
        moves = start != self.start
        for name, array in buffers.arrays.items():
            if moves:
                # A copy between them, since libraries differ in what a write from an overlapping view does.
                copied = namespace_of(array).concat([self.tokens(name)], axis=axis)
                array[slice_of_axis(axis, 0, self.length)] = copied
            array[slice_of_axis(axis, start + self.length, start + length)] = new[name]
        begin = 0 if moves else start + self.length
        if begin < buffers.end:
            buffers.rewrites.append((buffers.writes, begin, start + length))
        buffers.end = max(buffers.end, start + length)
        buffers.writes, buffers.tokens = buffers.writes + 1, length
        return TokenSlots(buffers, start, length, buffers.writes)

    @property
    def _is_overwritten(self) -> bool:
        if self.writes == self.buffers.writes:
            return False
        return any(
            writes >= self.writes and start < self.start + self.length and self.start < stop
            for writes, start, stop in self.buffers.rewrites
        )


class _HasSlots(Protocol):
    _slots: TokenSlots


C = TypeVar("C", bound=_HasSlots)


def quietly(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Let a method move numbers to the device, such as the ends of a slice, and compute on that of the keys."""

    @functools.wraps(method)
    def quiet_method(cache: C, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        key = cache._slots.buffers.arrays["key"]
        if not library_of(key).needs_quiet:
            return method(cache, *arguments, **keywords)
        with quiet(key):
            return method(cache, *arguments, **keywords)

    return quiet_method
