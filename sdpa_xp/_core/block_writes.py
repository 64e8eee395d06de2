"""New tokens of a paged cache, written into the blocks of its pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

from sdpa_xp._libraries import device_of, is_traced, library_of, namespace_of, quiet
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.layout import slice_of_axis


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
    with quiet(pools[0]) if library.needs_quiet else nullcontext():
        if library.sets_elements and library.is_accelerator(device_of(pools[0])):
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
    blocks = [write.block for write in writes for _ in range(write.tokens)]
    places = [write.block_offset + token for write in writes for token in range(write.tokens)]
    if not blocks:
        return
    xp = namespace_of(pools[0])
    table = xp.asarray([blocks, places], dtype=xp.int32, device=device_of(pools[0]))
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
    with quiet(pools[0]):
        if not library.sets_elements or not library.is_accelerator(device_of(pools[0])) or is_traced(pools[0]):
            return [_joined(pool, tokens, writes, axis) for pool, tokens in zip(pools, new, strict=True)]
        xp = namespace_of(pools[0])
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
