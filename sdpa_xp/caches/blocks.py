"""The tokens of a PagedKVCache: the positions of each sequence, and how new tokens are written into blocks.

Sequences have different lengths, so each has a `Row` of Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from .._checks.arrays import slice_of_axis
from .._checks.integers import check_integer_list, check_integers_or_rows, check_same_length
from .._checks.keywords import LARGEST_INTEGER, check_integer
from .._checks.messages import brief
from .._libraries import computing, is_number, library_of, namespace_of, with_axes
from .._libraries.protocols import Array
from ..errors import ArgumentValueError
from ..positional.positions import ArrayFactory, Consecutive
from ..positional.rotation import Positions
from .positions import check_in_cache, check_one_start

Row: TypeAlias = range | tuple[int, ...]
"""The positions of the tokens of one sequence; a range, if they follow one another."""


def check_start_rows(
    function: str, first: object, positions: object, lengths: Sequence[int]
) -> tuple[Row, ...]:
    """Check the positions of the first tokens of sequences, either all of them or the `first` of each."""
    check_one_start(function, first, positions)
    if positions is not None:
        return check_rows(function, positions, lengths)
    name = "first_position"
    if is_number(first):
        starts = [check_integer(function, name, first)] * len(lengths)
    else:
        starts = check_integer_list(function, name, first, least=-LARGEST_INTEGER)
        check_same_length(function, {"lengths": lengths, name: starts})
    return tuple(range(start, start + length) for start, length in zip(starts, lengths, strict=True))


def check_rows(
    function: str, positions: object, counts: Sequence[int], starts: Sequence[int] | None = None
) -> tuple[Row, ...]:
    """Check the positions of some tokens of each sequence: that of the first, or all, also one row for each.

    With `starts` the tokens are packed, and one list has the positions of all of them.
    """
    if is_number(positions):
        first = check_integer(function, "positions", positions)
        return tuple(range(first, first + count) for count in counts)
    rows = check_integers_or_rows(function, "positions", positions)
    if starts is not None and (not rows or isinstance(rows[0], int)):
        _check_row_for_each_sequence(function, [rows], [starts[-1]])
        rows = [rows[first:last] for first, last in pairwise(starts)]
    elif rows and isinstance(rows[0], int):
        rows = [rows] * len(counts)
    _check_row_for_each_sequence(function, rows, counts)
    return tuple(tuple(row) or range(0) for row in rows)


def _check_row_for_each_sequence(function: str, rows: list[list[int]], counts: Sequence[int]) -> None:
    """Check that there is a position for each token of each sequence."""
    if [len(row) for row in rows] != [*counts]:
        rule = "`positions` must have one integer for each token of each sequence"
        got = {"integers": [len(row) for row in rows], "tokens": [*counts]}
        raise ArgumentValueError(function, rule, got)


def join_rows(old: Row, new: Row) -> Row:
    """Return the positions of the tokens of a sequence, and of those that are appended to it."""
    # A row that goes on stays a range: two numbers, however long a text gets.
    if isinstance(old, range) and [*new] == [*range(old.stop, old.stop + len(new))]:
        return range(old.start, old.stop + len(new))
    return (*old, *new) if old else new


def following_row(row: Row, count: int) -> Row:
    """Return the next positions of a sequence, for `count` tokens that are appended."""
    start = row.stop if isinstance(row, range) else row[-1] + 1
    return range(start, start + count)


def part_of_row(row: Row, start: int, stop: int) -> Row:
    """Return the positions of the tokens from `start` up to `stop`; without one, that of the next is left."""
    if isinstance(row, range):
        return range(row.start + start, row.start + stop)
    if start < stop:
        return row[start:stop]
    following = row[start] if start < len(row) else row[-1] + 1
    return range(following, following)


def last_of_row(function: str, row: Row, count: int) -> Row:
    """Return the last positions of a sequence; a range goes on in front of its first token."""
    if isinstance(row, range):
        return range(row.stop - count, row.stop)
    check_in_cache(function, count, len(row))
    return row[len(row) - count :]


def as_positions(factory: ArrayFactory, rows: Sequence[Row]) -> Positions:
    """Return rows of one length as positions that a rotation takes."""
    if all(isinstance(row, range) for row in rows):
        return Consecutive([row.start for row in rows if isinstance(row, range)])
    return positions_table(factory, rows)


def positions_table(factory: ArrayFactory, rows: Sequence[Row]) -> Array:
    """Return the positions of all sequences as int32, (N, longest); a shorter one repeats its last position."""
    longest = max(map(len, rows))
    if not all(isinstance(row, range) for row in rows):
        return int32_array(factory, [[*row, *[row[-1] if row else 0] * (longest - len(row))] for row in rows])
    # Two numbers for each sequence, since a step of a decoder comes here with all tokens of all sequences.
    ends = int32_array(factory, [[row.start, row.stop - 1] for row in rows if isinstance(row, range)])
    with factory.computing():
        positions = ends[:, :1] + with_axes(factory.arange(0, longest), 2)
        return factory.xp.where(positions < ends[:, 1:], positions, ends[:, 1:])


def int32_array(factory: ArrayFactory, positions: Sequence[object]) -> Array:
    """Return integers, or rows of integers, as int32."""
    with factory.computing():
        return factory.xp.asarray(positions, dtype=factory.xp.int32, device=factory.device)


def are_slots(rows: Iterable[Row]) -> bool:
    """Return whether each token stands at the position of its place in its sequence."""
    return all(isinstance(row, range) and row.start == 0 for row in rows)


def shown_row(row: Row) -> str:
    """Return the positions of a sequence for a notebook."""
    if not row:
        return ""
    return f"{row[0]} to {row[-1]}" if isinstance(row, range) else brief(row)


def shown_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Return the argument of a cache that gives it these positions, for a repr; none if it is the default."""
    if are_slots(rows):
        return {}
    if all(isinstance(row, range) for row in rows):
        starts = tuple(row.start for row in rows if isinstance(row, range))
        return {"first_position": brief(starts)}
    return {"positions": f"<of {len(rows)} sequences>"}


def check_pool_not_empty(function: str, sequences: int, size: int, name: str = "block_table") -> None:
    """Check that `name` has at least one sequence, and that a block holds at least one token."""
    if sequences == 0:
        rule = f"`{name}` must have a row for at least one sequence"
        raise ArgumentValueError(function, rule, {name: []})
    if size == 0:
        rule = "a block of `key_blocks` must hold at least one token"
        raise ArgumentValueError(function, rule, {"tokens of a block": size})


def check_block_table(
    function: str, table: list[list[int]], lengths: list[int], size: int, blocks: int
) -> None:
    """Check that each sequence has as many blocks as its length needs, and that the pool has these blocks."""
    for sequence, (row, length) in enumerate(zip(table, lengths, strict=True)):
        needed = -(-length // size)  # behind these a row may hold anything, such as -1
        if needed > len(row):
            rule = f"`block_table[{sequence}]` must have a block for each {size} tokens"
            raise ArgumentValueError(function, rule, {"tokens": length, "blocks": len(row)})
        for place, block in enumerate(row[:needed]):
            if not 0 <= block < blocks:
                rule = f"`block_table[{sequence}][{place}]` must be one of the {blocks} blocks"
                raise ArgumentValueError(function, rule, {"block": block})


def check_exclusive_blocks(function: str, written: list[tuple[int, int]], table: list[list[int]]) -> None:
    """Check that each written block, as (sequence, block), is in the table only once."""
    owners: dict[int, list[int]] = {}
    for sequence, row in enumerate(table):
        for block in row:
            owners.setdefault(block, []).append(sequence)
    for _, block in written:
        if len(owners[block]) > 1:
            rule = "a block that is written to must belong to one sequence"
            hint = "Give one of them a copy of the block."
            raise ArgumentValueError(function, rule, {"block": block, "sequences": owners[block]}, hint)


class BlockWrite(NamedTuple):
    """A run of new tokens of a sequence that goes into one block."""

    sequence: int
    block: int
    block_offset: int
    """The place of the first token in the block."""
    token_offset: int
    """The place of the first token among the new tokens: of its sequence, or of all if they are packed."""
    tokens: int


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
    # Each step of a decoder comes here: only libraries whose settings matter get a context.
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
