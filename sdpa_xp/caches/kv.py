"""A cache of keys and values, for decoding token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from .._checks.arrays import HLE, Layout, check_one_kind
from .._checks.integers import IntegersLike
from .._checks.keywords import LARGEST_INTEGER, check_flag, check_integer, check_layout, explains_keywords
from .._display import table
from .._libraries import has_override, namespace_of
from .._libraries.protocols import AnyArray, Array
from ..errors import ArgumentValueError
from ..positional.rotation import Positions, Rotation, check_fits_rotation, check_rotary, rotate
from . import memory
from .attention import CacheAttention
from .positions import (
    TokenPositionsLike,
    check_positions,
    check_slots,
    check_start,
    elements_at,
    joined_positions,
    positions_after,
    positions_array,
    positions_of_entries,
    positions_without,
    shown_positions,
)
from .quantisation import kinds, wide_shape

A = TypeVar("A", bound=AnyArray)


@explains_keywords
class KVCache(CacheAttention[A]):
    """The keys and values of the tokens so far, for decoding one token after the other.

    A cache does not change: `append` returns one with more tokens. A loop of single steps gives the same result
    as one causal call.

    Shapes:
        `S` tokens in the cache, `n` new ones, `L` queries, `Hq` query heads, `H` key heads, `E` and `Ev`
        widths, `...` batch.

    Args:
        key: (..., H, S, E): the keys of the prompt. S may be 0. Without `capacity`, arrays are not copied.
        value: (..., H, S, Ev).
        capacity: The number of tokens to reserve memory for, so that `append(..., in_place=True)` copies only
            the new tokens. It needs writeable arrays (NumPy, CuPy, torch).
        layout: "...HLE", or "...LHE" with heads after the length, of all inputs and outputs.
        rotary: A `positional.Rotary` or `positional.RotaryTables`, which rotates the keys of the prompt, keys
            when they are appended, and queries when they attend, each by its position.
        rotated: Whether `key` is rotated already, such as the `key` of another cache with a rotary.
        first_position: The position of the first token in its sequence, not 0 if tokens are missing in front of
            it: one, or one for each batch entry, as a list or an integer array that broadcasts to (...). -p for
            a text with p tokens of padding on its left.
        positions: The position of each token, if they do not follow one another: S integers, or an integer
            array (..., S), such as the `positions` of another cache.

    Positions:
        A token keeps its position when others are dropped. `rotary`, and masks and biases with a formula of i
        and j, count positions. What holds a number for each token (arrays, `from_array`, `document`,
        `padding`), and `is_causal`, count tokens as they lie in the cache.

    Raises:
        TypeError: The arrays have several libraries or dtypes, or are not writeable although there is a
            `capacity`; or the positions are not integers.
        ValueError: The shapes do not fit, the arrays are on several devices, or the capacity is below S.

    Examples:
        >>> import numpy as np
        >>> token = np.ones((1, 1, 2))  # one head, one token
        >>> cache = KVCache(token, token, capacity=8)
        >>> for _ in range(3):
        ...     cache = cache.append(token, token, in_place=True)
        >>> len(cache), cache.attend(token).shape
        (4, (1, 1, 2))

    References:
        Pope et al., "Efficiently Scaling Transformer Inference", arXiv 2211.05102, section 2.1.
    """

    __slots__ = ()

    def __init__(
        self,
        key: A,
        value: AnyArray,
        *,
        capacity: int | None = None,
        layout: Layout = "...HLE",
        rotary: Rotation | None = None,
        rotated: bool = False,
        first_position: IntegersLike = 0,
        positions: TokenPositionsLike | None = None,
    ) -> None:
        function = "KVCache"
        self._quantisation = None
        check_layout(function, layout)
        check_rotary(function, rotary)
        self._layout, self._rotary, axis = layout, rotary, -2 if layout == HLE else -3
        _, arrays = check_one_kind(function, {"key": key, "value": value})
        memory.check_same_but_width(function, {name: array.shape for name, array in arrays.items()})
        length = arrays["key"].shape[axis]
        self._positions: Positions = check_start(function, first_position, positions, length, arrays["key"])
        if check_flag(function, "rotated", rotated) and rotary is not None:
            check_fits_rotation(function, "key", arrays["key"].shape, rotary.width)
        else:
            arrays["key"] = rotate(rotary, function, "key", arrays["key"], lambda _: self._positions, layout)
        if capacity is not None:  # values of a graph cannot be written to
            memory.refuse_graph_values(function, "`capacity`", arrays)
            room = check_integer(function, "capacity", capacity, least=length) - length
            arrays = {name: memory.with_room(array, room, axis) for name, array in arrays.items()}
            memory.check_writeable(function, "`capacity`", arrays)
        buffers = memory.Buffers(arrays, axis, length, are_of_caller=capacity is None)
        self._slots = memory.TokenSlots(buffers, 0, length)

    def __repr__(self) -> str:
        length, buffers = self._slots.length, self._slots.buffers
        shown = {name: self._shown(name) for name in ("key", "value")}
        # The arrays of a caller have no room, and may be anything in a tree. A length of a graph may be a name.
        if not buffers.are_of_caller and isinstance(length, int) and buffers.capacity > length:
            shown = {"tokens": f"{length:,} of {buffers.capacity:,}", **shown}
        shown |= {} if self._layout == HLE else {"layout": repr(self._layout)}
        shown |= shown_positions(self._positions)
        if self._quantisation is not None:
            shown["per"] = repr(self._quantisation.per)
        return f"KVCache({', '.join(f'{name}={text}' for name, text in shown.items())})"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        length, buffers = self._slots.length, self._slots.buffers
        room = "" if buffers.are_of_caller or buffers.capacity == length else f" of {buffers.capacity:,}"
        rows = [
            ("tokens", f"{length:,}{room}"),
            ("axes", "..., heads, tokens, width" if self._layout == HLE else "..., tokens, heads, width"),
            ("key", self._facts("key")),
            ("value", self._facts("value")),
            ("bytes", self._shown_bytes()),
            *shown_positions(self._positions).items(),
            ("rotary", "" if self._rotary is None else str(self._rotary)),
        ]
        return table("KVCache", [row for row in rows if row[1]])

    @memory.in_context_of_keys
    def append(
        self, key: A, value: AnyArray, *, positions: TokenPositionsLike | None = None, in_place: bool = False
    ) -> KVCache[A]:
        """Return a cache with n more tokens.

        Args:
            key: (..., H, n, E), with the cache's library, device and dtype.
            value: (..., H, n, Ev).
            positions: The positions of the tokens, if they do not follow the last token, as in a draft that
                branches: the position of the first, or n integers, or an integer array (..., n).
            in_place: Write into the memory that `capacity` reserved. This cache does not change, but you cannot
                append to it in place again, and torch can no longer differentiate attention that was computed
                from it. If False, the new cache is a copy without reserved memory. After an exception in the
                middle, a cache is as it was, or raises an error when used.

        Returns:
            The new cache. With `in_place`, it shares its arrays with this one.

        Raises:
            TypeError: The tokens have another library or dtype than the cache.
            ValueError: The shapes or devices do not fit, the memory is too small, or this cache was appended to
                in place already.
        """
        function, length, axis = "KVCache.append", self._slots.length, self._slots.buffers.axis
        old = self._slots.arrays()
        targets = [wide_shape(self._quantisation, old[name]) for name in ("key", "value")]
        passed: dict[str, AnyArray] = {"key": key, "value": value}
        new = memory.check_new_tokens(function, passed, kinds(self._quantisation, old), targets, axis)
        count = new["key"].shape[axis]
        # A key is rotated once, when it comes, and not at each step that attends to it.
        added: Positions = positions_after(self._positions, length)
        if positions is not None:
            added = check_positions(function, positions, count, new["key"].shape[:-3], new["key"])
        new["key"] = rotate(self._rotary, function, "key", new["key"], lambda _: added, self._layout)
        joined = joined_positions(function, new["key"], self._positions, length, added, count)
        if self._quantisation is not None:
            new = self._quantisation.stored(new, axis)
        if check_flag(function, "in_place", in_place):
            return self._with(self._slots.append(function, new), joined)
        xp = namespace_of(new["key"])
        return self._copied({name: xp.concat([old[name], new[name]], axis=axis) for name in new}, joined)

    def drop_first(self, count: int) -> KVCache[A]:
        """Return a cache without its first `count` tokens. The others keep their positions.

        Nothing is copied. If you append in place, `cache.append(...).drop_first(1)` rolls: when the memory
        behind the tokens is full, they move to its front, so that a capacity of twice the tokens is enough.

        Args:
            count: From 0 to S.
        """
        return self._without(self._counted("drop_first", count), 0)

    def drop_last(self, count: int) -> KVCache[A]:
        """Return a cache without its last `count` tokens, such as a draft that was rejected.

        Nothing is copied. Appending in place overwrites the dropped tokens, also in arrays that you read
        before; caches that have these tokens raise an error when used.

        Args:
            count: From 0 to S.
        """
        return self._without(0, self._counted("drop_last", count))

    @memory.in_context_of_keys
    def take_tokens(self, slots: Sequence[int] | AnyArray) -> KVCache[A]:
        """Return a copy of some tokens, which keep their positions, without reserved memory.

        Use it to evict tokens, or to keep the accepted path of a draft that branches.

        Args:
            slots: The numbers of the tokens, from 0 to S - 1: n integers, as a list, a range or an integer
                array. A cache with one batch axis also takes an array (B, n), one row for each batch entry.
        """
        function = "KVCache.take_tokens"
        array, axis = self._slots.tokens("key"), self._slots.buffers.axis
        index = check_slots(function, "slots", slots, self._slots.length, "S", array)
        if index.ndim > 1 and (index.ndim != 2 or array.ndim != 4 or index.shape[0] != array.shape[0]):
            rule = "`slots` must be (n,), or (B, n) with one row for each entry of one batch axis"
            got = {"slots.shape": index.shape, "cache.key.shape": self._shape("key")}
            raise ArgumentValueError(function, rule, got)
        if index.shape[-1] == 0:  # the position of the next token is left, which no index would say
            return self._without(self._slots.length, 0)
        positions = positions_array(function, array, self._positions, self._slots.length)
        arrays = {name: elements_at(tokens, index, axis) for name, tokens in self._slots.arrays().items()}
        return self._copied(arrays, elements_at(positions, index, -1))

    @memory.in_context_of_keys
    def take_entries(self, entries: Sequence[int] | AnyArray) -> KVCache[A]:
        """Return a copy of some batch entries, in any order and also repeatedly, as a beam search needs.

        Args:
            entries: The numbers of the entries on the first axis: a list, a range or an integer array.
        """
        function = "KVCache.take_entries"
        key = self._slots.tokens("key")
        if key.ndim < 4:
            rule = "the cache must have batch entries, on an axis before the heads"
            raise ArgumentValueError(function, rule, {"cache.key.shape": self._shape("key")})
        index = check_slots(function, "entries", entries, key.shape[0], "B", key)
        if index.ndim != 1:
            raise ArgumentValueError(function, "`entries` must have one axis", {"entries.shape": index.shape})
        arrays = {name: elements_at(tokens, index, 0) for name, tokens in self._slots.arrays().items()}
        cache = self._copied(arrays, positions_of_entries(self._positions, index, key.shape[:-3]))
        if self._quantisation is not None:
            cache._quantisation = self._quantisation.of_entries(lambda array: elements_at(array, index, 0))
        return cache

    def _counted(self, method: str, count: int) -> int:
        function, length = f"KVCache.{method}", self._slots.length
        most = length if isinstance(length, int) else LARGEST_INTEGER  # or a name, in a graph
        return check_integer(function, "count", count, least=0, most=most)

    @memory.in_context_of_keys
    def _without(self, first: int, last: int) -> KVCache[A]:
        """Return the cache without its first and its last tokens."""
        if first == last == 0:
            return self
        positions = positions_without(self._positions, self._slots.length, first, last)
        if not has_override(self._slots.tokens("key")):
            return self._with(self._slots.without(first, last), positions)
        # A graph cuts its values, and has no buffers that several caches share.
        index = (..., slice(first, -last if last else None), *[slice(None)] * (-1 - self._slots.buffers.axis))
        return self._copied({name: array[index] for name, array in self._slots.arrays().items()}, positions)

    def _copied(self, arrays: Mapping[str, Array], positions: Positions) -> KVCache[A]:
        axis = self._slots.buffers.axis
        length = arrays["key"].shape[axis]
        return self._with(memory.TokenSlots(memory.Buffers(arrays, axis, length), 0, length), positions)

    def _with(self, slots: memory.TokenSlots, positions: Positions) -> KVCache[A]:
        cache = object.__new__(KVCache)  # what it is made of has been checked
        cache._layout, cache._rotary, cache._quantisation = self._layout, self._rotary, self._quantisation
        cache._slots, cache._positions = slots, positions
        return cache
