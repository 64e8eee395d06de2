"""Checks of caches, and of the tokens that are appended to them."""

from __future__ import annotations

from collections.abc import Mapping

from sdpa_xp._checks.arrays import floating, one_device, one_dtype
from sdpa_xp._checks.messages import message, type_name
from sdpa_xp._checks.shapes import known
from sdpa_xp._libraries import has_override, library_of, share_memory
from sdpa_xp._libraries.protocols import Array, Shape


def same_dtype_and_device(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays are floating, of one dtype and on one device."""
    for name, array in arrays.items():
        floating(function, name, array)
    one_dtype(function, arrays)
    one_device(function, arrays)


def same_but_width(function: str, shapes: Mapping[str, Shape]) -> None:
    """Check that two shapes have heads, a length and a width, and differ only in the width."""
    for name, shape in shapes.items():
        known(function, name, shape)
    (first_name, first), (second_name, second) = shapes.items()
    names = f"`{first_name}` and `{second_name}`"
    got = {f"{first_name}.shape": first, f"{second_name}.shape": second}
    if min(len(first), len(second)) < 3:
        raise ValueError(message(function, f"{names} must have at least 3 axes", got))
    if first[:-1] != second[:-1]:
        rule = f"{names} must have the same shape, except for the width (axis -1)"
        raise ValueError(message(function, rule, got))


def same_but(function: str, name: str, shape: Shape, cached: Shape, axis: int) -> None:
    """Check that appended tokens have the shape of the cached tokens, but for the length on `axis`."""
    other_axes = [n for n in range(-len(shape), 0) if n != axis]
    if len(shape) != len(cached) or any(shape[n] != cached[n] for n in other_axes):
        rule = f"`{name}` must have the shape of the cache, except for the length (axis {axis})"
        raise ValueError(message(function, rule, {f"{name}.shape": shape, f"cache.{name}.shape": cached}))


def writeable(function: str, feature: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays are writeable, which `feature` needs."""
    for name, array in arrays.items():
        if not library_of(array).is_writeable(array):
            rule = f"{feature} needs arrays that can be written to"
            hint = "Without it, `append` copies the cache and works with every library."
            raise TypeError(message(function, rule, {name: f"a read-only {type_name(array)}"}, hint))


def no_graph_values(function: str, feature: str, arrays: Mapping[str, Array]) -> None:
    """Check that `feature` gets arrays, and not values of a graph that is being exported."""
    if has_override(*arrays.values()):
        rule = f"{feature} needs arrays, not values of a graph"
        got = {name: type_name(array) for name, array in arrays.items()}
        raise TypeError(message(function, rule, got, "In a graph, use a KVCache without `capacity`."))


def pool_not_empty(function: str, sequences: int, size: int) -> None:
    """Check that there is at least one sequence, and that a block holds at least one token."""
    if sequences == 0:
        rule = "`block_table` must have a row for at least one sequence"
        raise ValueError(message(function, rule, {"block_table": []}))
    if size == 0:
        rule = "a block of `key_blocks` must hold at least one token"
        raise ValueError(message(function, rule, {"tokens of a block": size}))


def separate_pools(function: str, key_blocks: Array, value_blocks: Array) -> None:
    """Check that the pools of keys and values share no element; interleaved views share none."""
    if share_memory(key_blocks, value_blocks):
        rule = "`in_place` needs `key_blocks` and `value_blocks` that do not share memory"
        got = {"value_blocks": "key_blocks" if key_blocks is value_blocks else "a view of the same numbers"}
        raise ValueError(message(function, rule, got, "Copy one of them."))


def appended(function: str, queries: int, tokens: int, sequence: int | None = None) -> None:
    """Check that there are not more queries than tokens, since the queries are the last tokens.

    Symbolic lengths pass.
    """
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "`query` must have at most as many tokens (L) as " + (
            "the cache" if sequence is None else f"sequence {sequence} of the cache"
        )
        hint = "`append` the keys and values of the new tokens first. "
        hint += "For queries that are not the last tokens, or an idle sequence, pass `is_causal=False`."
        raise ValueError(message(function, rule, {"L": queries, "tokens": tokens}, hint))


def fits_capacity(function: str, needed: int, capacity: int) -> None:
    """Check that the tokens fit into the cache's capacity."""
    if needed > capacity:
        hint = "Create the cache with a larger `capacity`, or append without `in_place`."
        rule = "the tokens must fit into the capacity of the cache"
        raise ValueError(message(function, rule, {"tokens": needed, "capacity": capacity}, hint))


def is_newest(function: str, length: int, filled: int) -> None:
    """Check that no cache was made from this one in place, because its tokens would be overwritten."""
    if length != filled:
        rule = "a cache can be appended to in place only once"
        hint = "Append to the newest cache, or without `in_place`."
        got = {"tokens of this cache": length, "tokens of the newest cache": filled}
        raise ValueError(message(function, rule, got, hint))


def block_table(function: str, table: list[list[int]], lengths: list[int], size: int, blocks: int) -> None:
    """Check that each sequence has as many blocks as its length needs, and that the pool has these blocks."""
    for sequence, (row, length) in enumerate(zip(table, lengths, strict=True)):
        needed = -(-length // size)
        if needed > len(row):
            rule = f"`block_table[{sequence}]` must have a block for each {size} tokens"
            raise ValueError(message(function, rule, {"tokens": length, "blocks": len(row)}))
        for place, block in enumerate(row[:needed]):
            if not 0 <= block < blocks:
                rule = f"`block_table[{sequence}][{place}]` must be one of the {blocks} blocks"
                raise ValueError(message(function, rule, {"block": block}))


def exclusive_blocks(function: str, written: list[tuple[int, int]], table: list[list[int]]) -> None:
    """Check that each written block, as (sequence, block), is in the table only once."""
    owners: dict[int, list[int]] = {}
    for sequence, row in enumerate(table):
        for block in row:
            owners.setdefault(block, []).append(sequence)
    for _, block in written:
        if len(owners[block]) > 1:
            rule = "a block that is written to must belong to one sequence"
            hint = "Give one of them a copy of the block."
            raise ValueError(message(function, rule, {"block": block, "sequences": owners[block]}, hint))
