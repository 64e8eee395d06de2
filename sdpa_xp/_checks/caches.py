"""Checks of caches, and of the tokens that are appended to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdpa_xp._checks.arrays import check_floating, check_one_device, check_one_dtype, check_one_library
from sdpa_xp._checks.messages import type_name
from sdpa_xp._checks.shapes import check_known
from sdpa_xp._libraries import has_override, library_of, share_memory
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def check_same_dtype_and_device(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays are floating, of one dtype and on one device."""
    for name, array in arrays.items():
        check_floating(function, name, array)
    check_one_dtype(function, arrays)
    check_one_device(function, arrays)


def check_query_of_cache(function: str, query: Array, name: str, cached: Array) -> None:
    """Check that a query has the library, the dtype and the device of a cache, whose array is called `name`."""
    device = library_of(query).device
    if type(query) is type(cached) and query.dtype == cached.dtype and device(query) == device(cached):
        return  # hot: each step of a decoder comes here
    if not has_override(query, cached):
        check_same_dtype_and_device(function, check_one_library(function, {"query": query, name: cached})[1])


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


def check_same_but_length(function: str, name: str, shape: Shape, cached: Shape, axis: int) -> None:
    """Check that appended tokens have the shape of the cached tokens, but for the length on `axis`."""
    other_axes = [n for n in range(-len(shape), 0) if n != axis]
    if len(shape) != len(cached) or any(shape[n] != cached[n] for n in other_axes):
        rule = f"`{name}` must have the shape of the cache, except for the length (axis {axis})"
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, f"cache.{name}.shape": cached})


def check_writeable(function: str, feature: str, arrays: Mapping[str, Array]) -> None:
    """Check that each element of the arrays can be written to without another one, which `feature` needs."""
    for name, array in arrays.items():
        if not library_of(array).is_writeable(array):
            rule = f"{feature} needs arrays that can be written to"
            hint = "Without it, `append` copies the cache and works with every library."
            raise ArgumentTypeError(
                function, rule, {name: f"a read-only or broadcast {type_name(array)}"}, hint
            )


def refuse_graph_values(function: str, feature: str, arrays: Mapping[str, Array]) -> None:
    """Check that `feature` gets arrays, and not values of a graph that is being exported."""
    if has_override(*arrays.values()):
        rule = f"{feature} needs arrays, not values of a graph"
        got = {name: type_name(array) for name, array in arrays.items()}
        raise ArgumentTypeError(function, rule, got, "In a graph, use a KVCache without `capacity`.")


def check_pool_not_empty(function: str, sequences: int, size: int, name: str = "block_table") -> None:
    """Check that `name` has at least one sequence, and that a block holds at least one token."""
    if sequences == 0:
        rule = f"`{name}` must have a row for at least one sequence"
        raise ArgumentValueError(function, rule, {name: []})
    if size == 0:
        rule = "a block of `key_blocks` must hold at least one token"
        raise ArgumentValueError(function, rule, {"tokens of a block": size})


def check_separate_pools(function: str, key_blocks: Array, value_blocks: Array) -> None:
    """Check that the pools of keys and values share no element; interleaved views share none."""
    if share_memory(key_blocks, value_blocks):
        rule = "`in_place` needs `key_blocks` and `value_blocks` that do not share memory"
        got = {"value_blocks": "key_blocks" if key_blocks is value_blocks else "a view of the same numbers"}
        raise ArgumentValueError(function, rule, got, "Copy one of them.")


def check_appended(function: str, queries: int, tokens: int, sequence: int | None = None) -> None:
    """Check that there are not more queries than tokens, since the queries are the last tokens.

    Symbolic lengths pass.
    """
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "`query` must have at most as many tokens (L) as " + (
            "the cache" if sequence is None else f"sequence {sequence} of the cache"
        )
        hint = "`append` the keys and values of the new tokens first. "
        hint += "For queries that are not the last tokens, or an idle sequence, pass `is_causal=False`."
        raise ArgumentValueError(function, rule, {"L": queries, "tokens": tokens}, hint)


def check_capacity(function: str, needed: int, capacity: int) -> None:
    """Check that the tokens fit into the cache's capacity."""
    if needed > capacity:
        hint = "Create the cache with a larger `capacity`, or append without `in_place`."
        rule = "the tokens must fit into the capacity of the cache"
        raise ArgumentValueError(function, rule, {"tokens": needed, "capacity": capacity}, hint)


def check_is_newest(function: str, newest: bool, length: int, filled: int) -> None:
    """Check that no cache was made from this one in place, because its tokens would be overwritten."""
    if not newest:
        rule = "a cache can be appended to in place only once"
        hint = "Append to the newest cache, or without `in_place`."
        got = {"tokens of this cache": length, "tokens of the newest cache": filled}
        raise ArgumentValueError(function, rule, got, hint)


def check_not_overwritten(overwritten: bool, tokens: int) -> None:
    """Check that the tokens of a cache are still in the memory that it shares with other caches."""
    if overwritten:
        rule = "the tokens of a cache must not be overwritten"
        hint = "A cache with fewer tokens was appended to in place, in the same memory. Use the newest cache."
        raise ArgumentValueError("KVCache", rule, {"tokens of this cache": tokens}, hint)


def check_one_start(function: str, first_position: object, positions: object) -> None:
    """Check that positions are given in one way."""
    is_zero = isinstance(first_position, int) and first_position == 0
    if positions is not None and not is_zero:
        rule = "`first_position` and `positions` must not both be given"
        raise ArgumentValueError(function, rule, {"first_position": first_position})


def check_in_cache(function: str, queries: int, tokens: int) -> None:
    """Check that queries are the last tokens of a cache that has a position for each of them."""
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "queries that are not the last tokens of the cache need `positions`"
        raise ArgumentValueError(function, rule, {"L": queries, "tokens": tokens})


def check_row_for_each_sequence(function: str, rows: list[list[int]], counts: Sequence[int]) -> None:
    """Check that there is a position for each token of each sequence."""
    if [len(row) for row in rows] != [*counts]:
        rule = "`positions` must have one integer for each token of each sequence"
        got = {"integers": [len(row) for row in rows], "tokens": [*counts]}
        raise ArgumentValueError(function, rule, got)


def check_has_tokens(function: str, counts: Sequence[int], lengths: Sequence[int]) -> None:
    """Check that sequences have the tokens that are dropped."""
    for sequence, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if count > length:
            rule = f"`count` must be at most the tokens of sequence {sequence}"
            raise ArgumentValueError(function, rule, {"count": count, "tokens": length})


def check_whole_blocks(function: str, counts: Sequence[int], size: int) -> None:
    """Check that whole blocks are dropped, since a sequence begins with a block."""
    for count in counts:
        if count % size:
            rule = "`count` must be a multiple of the block size"
            hint = "Drop fewer tokens, and hide the others with `masks.sliding_window`."
            raise ArgumentValueError(function, rule, {"count": count, "block size": size}, hint)


def check_among(function: str, name: str, least: int, most: int, limit: int, letter: str) -> None:
    """Check that numbers are from 0 up to `limit`."""
    if least < 0 or most >= limit:
        rule = f"`{name}` must be from 0 to {letter} - 1"
        raise ArgumentValueError(function, rule, {name: least if least < 0 else most, letter: limit})


def check_has_batch(function: str, shape: Shape) -> None:
    """Check that keys (..., H, S, E) have batch entries."""
    if len(shape) < 4:
        rule = "the cache must have batch entries, on an axis before the heads"
        raise ArgumentValueError(function, rule, {"cache.key.shape": shape})


def check_one_axis(function: str, name: str, shape: Shape) -> None:
    """Check that an array has one axis."""
    if len(shape) != 1:
        raise ArgumentValueError(function, f"`{name}` must have one axis", {f"{name}.shape": shape})


def check_row_for_each_entry(function: str, shape: Shape, cached: Shape) -> None:
    """Check that slots are (n,), or (B, n) for keys (B, H, S, E)."""
    if len(shape) != 2 or len(cached) != 4 or shape[0] != cached[0]:
        rule = "`slots` must be (n,), or (B, n) with one row for each entry of one batch axis"
        raise ArgumentValueError(function, rule, {"slots.shape": shape, "cache.key.shape": cached})


def check_block_table(
    function: str, table: list[list[int]], lengths: list[int], size: int, blocks: int
) -> None:
    """Check that each sequence has as many blocks as its length needs, and that the pool has these blocks."""
    for sequence, (row, length) in enumerate(zip(table, lengths, strict=True)):
        needed = -(-length // size)
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
