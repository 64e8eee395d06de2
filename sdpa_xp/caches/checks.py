"""Checks of caches that are made, read and appended to."""

from __future__ import annotations

from collections.abc import Mapping

from sdpa_xp._checks.arrays import check_known, check_one_kind
from sdpa_xp._checks.messages import type_name
from sdpa_xp._libraries import has_override, library_of
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def check_query_of_cache(function: str, query: Array, name: str, cached: Array) -> None:
    """Check that a query has the library, the dtype and the device of a cache, whose array is called `name`."""
    device = library_of(query).device
    if type(query) is type(cached) and query.dtype == cached.dtype and device(query) == device(cached):
        return  # hot: each step of a decoder comes here
    if not has_override(query, cached):
        check_one_kind(function, {"query": query, name: cached})


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


def check_in_cache(function: str, queries: int, tokens: int) -> None:
    """Check that queries are the last tokens of a cache that has a position for each of them."""
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "queries that are not the last tokens of the cache need `positions`"
        raise ArgumentValueError(function, rule, {"L": queries, "tokens": tokens})


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
