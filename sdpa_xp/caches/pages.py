"""Where the tokens of a PagedKVCache lie in the blocks of a pool, and how new tokens are written there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._checks.arrays import slice_of_axis
from .._checks.keywords import check_flag
from .._libraries import library_of, namespace_of, share_memory
from .._libraries.protocols import Array
from ..errors import ArgumentValueError
from .slots import check_writeable, context_of


class Write(NamedTuple):
    """A run of new tokens of a sequence that goes into one block."""

    block: int
    start: int
    """The place of the first token in the block."""
    stop: int
    source: tuple[Any, ...]
    """The index of the run among the new tokens."""


class NewTokens(NamedTuple):
    """The tokens that a call brings to each sequence."""

    counts: list[int]
    starts: list[int] | None = None
    """Where those of each sequence begin, if they are packed."""


class Pages(NamedTuple):
    """The blocks of the sequences of one cache, in pools that other caches share."""

    pools: dict[str, Array]
    """The keys and the values by the names "key_blocks" and "value_blocks"; if quantised, with their scales."""
    axis: int
    """The axis of the tokens, -2 or -3."""
    table: list[list[int]]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of tokens that fit into a block."""
        return self.pools["key_blocks"].shape[self.axis]

    def read(self, name: str) -> Array:
        return self.pools[name]

    def arrays(self) -> dict[str, Array]:
        return self.pools

    def blocks_in_use(self) -> list[list[int]]:
        """Return the blocks that each sequence needs; behind these, its row may hold any numbers."""
        size, rows = self.size, zip(self.table, self.lengths, strict=True)
        return [row[: -(-length // size)] for row, length in rows]

    def check(self, function: str, lengths: Sequence[int]) -> Pages:
        """Check that the pool has the blocks which sequences of these lengths need, and return their pages."""
        size, blocks = self.size, self.pools["key_blocks"].shape[0]
        for sequence, (row, length) in enumerate(zip(self.table, lengths, strict=True)):
            needed = -(-length // size)  # behind these a row may hold anything, such as -1
            if needed > len(row):
                rule = f"`block_table[{sequence}]` must have a block for each {size} tokens"
                raise ArgumentValueError(function, rule, {"tokens": length, "blocks": len(row)})
            for place, block in enumerate(row[:needed]):
                if not 0 <= block < blocks:
                    rule = f"`block_table[{sequence}][{place}]` must be one of the {blocks} blocks"
                    raise ArgumentValueError(function, rule, {"block": block})
        return Pages(self.pools, self.axis, self.table, tuple(lengths))

    def grown(self, function: str, new: NewTokens) -> tuple[Pages, list[Write]]:
        """Return the pages with new tokens, which are still to be written, as one run for each block."""
        pages = self.check(function, [n + count for n, count in zip(self.lengths, new.counts, strict=True)])
        rows, size, writes = pages.blocks_in_use(), self.size, list[Write]()
        for sequence, (row, length, count) in enumerate(zip(rows, self.lengths, new.counts, strict=True)):
            first, done = 0 if new.starts is None else new.starts[sequence], 0
            while done < count:
                number, start = divmod(length + done, size)
                tokens = min(count - done, size - start)
                source = slice_of_axis(self.axis, first + done, first + done + tokens)
                source = source if new.starts is not None else (sequence, *source)
                writes.append(Write(row[number], start, start + tokens, source))
                done += tokens
        _check_owners(function, writes, rows)
        return pages, writes

    def write(
        self, function: str, arrays: Mapping[str, Array], writes: Sequence[Write], in_place: object
    ) -> Pages:
        """Write tokens, an array for each pool, and return the pages; without `in_place`, of copied pools."""
        pools = self.pools
        if is_in_place := check_flag(function, "in_place", in_place):
            check_writeable(function, "`in_place=True`", pools, arrays.values())
            key, value, *_ = pools.values()
            if share_memory(key, value):  # interleaved views share no element
                rule = "`in_place` needs `key_blocks` and `value_blocks` that do not share memory"
                got = {"value_blocks": "key_blocks" if key is value else "a view of the same numbers"}
                raise ArgumentValueError(function, rule, got, "Copy one of them.")
        written = _written([*pools.values()], [*arrays.values()], writes, self.axis, in_place=is_in_place)
        return Pages(dict(zip(pools, written, strict=True)), self.axis, self.table, self.lengths)


def _check_owners(function: str, writes: Sequence[Write], rows: Sequence[Sequence[int]]) -> None:
    """Check that each block that is written to belongs to one sequence."""
    owners: dict[int, list[int]] = {}
    for sequence, row in enumerate(rows):
        for block in row:
            owners.setdefault(block, []).append(sequence)
    for write in writes:
        if len(owners[write.block]) > 1:
            rule = "a block that is written to must belong to one sequence, and stand in its row once"
            got = {"block": write.block, "sequences": owners[write.block]}
            raise ArgumentValueError(function, rule, got, "Give one of them a copy of the block.")


def _written(
    pools: list[Array], new: Sequence[Array], writes: Sequence[Write], axis: int, *, in_place: bool
) -> list[Array]:
    """Write new tokens, which lie along `axis`, into pools or into copies of them, and return these."""
    library = library_of(new[0])  # which may have derivatives that the pools do not have
    # A write for each block would be a launch for each block.
    is_at_once = library.sets_elements and library.is_accelerator(library.device(pools[0]))
    with context_of(pools[0]):
        if not writes:
            return pools
        if not in_place and (not is_at_once or library.is_traced(pools[0])):
            return [_joined(pool, tokens, writes, axis) for pool, tokens in zip(pools, new, strict=True)]
        if not in_place:
            xp = library.namespace(pools[0])
            pools = [xp.astype(pool, pool.dtype, copy=True) for pool in pools]
        if is_at_once:
            _write_at_once(pools, new, writes, axis)
            return pools
        for pool, tokens in zip(pools, new, strict=True):
            for write in writes:
                places = slice_of_axis(axis, write.start, write.stop)
                pool[(write.block, *places)] = tokens[write.source]
        return pools


def _write_at_once(pools: Sequence[Array], new: Sequence[Array], writes: Sequence[Write], axis: int) -> None:
    """Write all tokens in one operation for each pool; which place each gets travels to the device once."""
    blocks = [write.block for write in writes for _ in range(write.start, write.stop)]
    places = [place for write in writes for place in range(write.start, write.stop)]
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


def _joined(pool: Array, new: Array, writes: Sequence[Write], axis: int) -> Array:
    """Return a copy of a pool, joined from slices, since not every library can write to an array."""
    xp, size = namespace_of(new), pool.shape[axis]
    pieces, copied = [], 0
    for write in sorted(writes, key=lambda write: write.block):
        block = pool[write.block, ...]
        front, back = (block[slice_of_axis(axis, *ends)] for ends in ((0, write.start), (write.stop, size)))
        parts = front, new[write.source], back
        joined = xp.concat([part for part in parts if part.shape[axis]], axis=axis)
        pieces += [pool[copied : write.block, ...], xp.expand_dims(joined, axis=0)]
        copied = write.block + 1
    return xp.concat([piece for piece in (*pieces, pool[copied:, ...]) if piece.shape[0]], axis=0)
