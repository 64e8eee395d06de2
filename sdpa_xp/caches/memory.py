"""Where the tokens of caches lie in memory, and how new tokens are written there.

A `KVCache` has slots in two buffers, which caches that are appended to in place share. A `PagedKVCache` writes
runs of tokens into the blocks of its pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from sdpa_xp._checks.arrays import slice_of_axis
from sdpa_xp._libraries import computing, library_of, namespace_of
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.caches.checks import check_writeable
from sdpa_xp.errors import ArgumentValueError

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
    are_of_caller: bool = False
    """Whether the caller made the arrays, so that they are never written to."""
    writes: int = 0
    writes_of_slots: list[int] = field(default_factory=list)
    """The number of the last write into each slot, 0 for those before the first; empty until then."""

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
                "A cache with fewer tokens was appended to in place, in the same memory. Use the newest cache."
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
        """Return keys and values."""
        return {name: self.tokens(name) for name in ("key", "value")}

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
        moves = start != self.start
        for name, array in buffers.arrays.items():
            if moves:
                # A copy between them, since libraries differ in what a write from an overlapping view does.
                copied = namespace_of(array).concat([self.tokens(name)], axis=axis)
                array[slice_of_axis(axis, 0, self.length)] = copied
            array[slice_of_axis(axis, start + self.length, start + length)] = new[name]
        buffers.writes, buffers.tokens = buffers.writes + 1, length
        buffers.writes_of_slots = buffers.writes_of_slots or [0] * buffers.capacity
        first, stop = 0 if moves else start + self.length, start + length
        buffers.writes_of_slots[first:stop] = [buffers.writes] * (stop - first)
        return TokenSlots(buffers, start, length, buffers.writes)

    @property
    def _is_overwritten(self) -> bool:
        if self.writes == self.buffers.writes:
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
        if not library_of(key).needs_context:  # each step of a decoder comes here
            return method(cache, *arguments, **keywords)
        with computing(key):
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


class BlockWrite(NamedTuple):
    """A run of new tokens of a sequence that goes into one block."""

    sequence: int
    block: int
    block_offset: int
    """The place of the first token in the block."""
    token_offset: int
    """The place of the first token among the new tokens: of its sequence, or of all if they are packed."""
    tokens: int
    """The number of tokens."""


def split_into_blocks(
    block_table: Sequence[Sequence[int]],
    lengths: Sequence[int],
    block_size: int,
    counts: Sequence[int],
    starts: Sequence[int] | None,
) -> list[BlockWrite]:
    """Return the runs that the new tokens split into, one for each block.

    Sequence n gets `counts[n]` tokens, which begin at place `starts[n]` if they are packed.
    """
    writes = []
    for sequence, (row, length, count) in enumerate(zip(block_table, lengths, counts, strict=True)):
        start, done = 0 if starts is None else starts[sequence], 0
        while done < count:
            block_index, block_offset = divmod(length + done, block_size)
            tokens = min(count - done, block_size - block_offset)
            writes.append(BlockWrite(sequence, row[block_index], block_offset, start + done, tokens))
            done += tokens
    return writes


def write_tokens(pools: Sequence[Array], new: Sequence[Array], writes: Sequence[BlockWrite], axis: int) -> None:
    """Write new tokens, which lie along `axis`, into the pools themselves."""
    library = library_of(pools[0])
    with computing(pools[0]) if library.needs_context else nullcontext():
        if library.sets_elements and library.is_accelerator(library.device(pools[0])):
            _write_at_once(pools, new, writes, axis)
            return
        for pool, tokens in zip(pools, new, strict=True):
            for write in writes:
                places = slice_of_axis(axis, write.block_offset, write.block_offset + write.tokens)
                pool[(write.block, *places)] = _tokens_of(tokens, write, axis)


def _write_at_once(
    pools: Sequence[Array], new: Sequence[Array], writes: Sequence[BlockWrite], axis: int
) -> None:
    """Write all tokens in one operation for each pool; which place each gets travels to the device once."""
    # A write for each block would be a launch for each block.
    blocks = [write.block for write in writes for _ in range(write.tokens)]
    places = [write.block_offset + token for write in writes for token in range(write.tokens)]
    if not blocks:
        return
    library = library_of(pools[0])
    xp = library.namespace(pools[0])
    table = xp.asarray([blocks, places], dtype=xp.int32, device=library.device(pools[0]))
    for pool, tokens in zip(pools, new, strict=True):
        if axis == -2:  # to (..., tokens, heads, width), packed or not
            heads = tokens.ndim - 3
            tokens = xp.permute_dims(tokens, (*range(heads), heads + 1, heads, heads + 2))
        rows = xp.reshape(tokens, (len(blocks), *tokens.shape[-2:]))
        index = (table[0], table[1]) if axis == -3 else (table[0], slice(None), table[1])
        pool[index] = rows


def pools_with_tokens(
    pools: Sequence[Array], new: Sequence[Array], writes: Sequence[BlockWrite], axis: int
) -> list[Array]:
    """Return copies of the pools with the new tokens, which lie along `axis`.

    Blocks and pool are joined from slices, since not every library can write to an array.
    """
    library = library_of(pools[0])
    if not writes:
        return [*pools]
    with computing(pools[0]):
        on_accelerator = library.is_accelerator(library.device(pools[0]))
        if not library.sets_elements or not on_accelerator or library.is_traced(pools[0]):
            return [_joined(pool, tokens, writes, axis) for pool, tokens in zip(pools, new, strict=True)]
        xp = library.namespace(pools[0])
        copied = [xp.astype(pool, pool.dtype, copy=True) for pool in pools]
        _write_at_once(copied, new, writes, axis)
        return copied


def _joined(pool: Array, new: Array, writes: Sequence[BlockWrite], axis: int) -> Array:
    xp, block_size = namespace_of(pool), pool.shape[axis]
    blocks: dict[int, Array] = {}
    for write in writes:
        block = pool[write.block, ...]
        stop = write.block_offset + write.tokens
        pieces = [
            block[slice_of_axis(axis, 0, write.block_offset)],
            _tokens_of(new, write, axis),
            block[slice_of_axis(axis, stop, block_size)],
        ]
        blocks[write.block] = xp.concat([piece for piece in pieces if piece.shape[axis]], axis=axis)
    pieces, copied = [], 0
    for number in sorted(blocks):
        pieces += [pool[copied:number, ...], xp.expand_dims(blocks[number], axis=0)]
        copied = number + 1
    pieces.append(pool[copied:, ...])
    return xp.concat([piece for piece in pieces if piece.shape[0]], axis=0)


def _tokens_of(new: Array, write: BlockWrite, axis: int) -> Array:
    tokens = slice_of_axis(axis, write.token_offset, write.token_offset + write.tokens)
    return new[tokens] if new.ndim == 3 else new[(write.sequence, *tokens)]  # 3 axes are packed
