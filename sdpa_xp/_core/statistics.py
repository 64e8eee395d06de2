"""Statistics of the weights: the queries of a call are divided into tasks, or into blocks of a compiler's loop.

What a task computes, and how, is in `row_statistics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import cast

from .._libraries import computing
from .._libraries.protocols import Array
from .._tiles.plan import Plan
from .._tiles.tile import LeadingSlice, Tile
from . import threads
from .compiled_loops import compute_band, row_bands
from .gradient_sums import between_zeros
from .products import call_buffers
from .row_statistics import Request, Results, joined, statistics_of_few_rows, statistics_of_rows, sums_of_blocks
from .scores import Scores

MOST_STRIP = 2**20
"""The elements of the sums over blocks of queries, for each key, that a task holds."""
SUMS = ("key_sums", "block_sums")
SHARES = 8
"""The parts of the queries whose sums over queries are computed at the same time. The number of threads does
not change it, so the result does not depend on that number."""


def statistics(scores: Scores, plan: Plan, request: Request) -> Results:
    """Return the statistics that are asked for, in the accumulation dtype; indices of keys are int32."""
    grid = scores.grid
    if plan.is_loop:
        bands = [_of_band(scores, plan, band, request) for band in row_bands(scores, plan)]
        return joined(scores.xp, bands, added=SUMS)
    if grid.is_traced:
        plan = replace(plan, rows=max(1, plan.queries), columns=max(1, plan.keys))
        units = [range(plan.queries)]
    else:
        units = [*replace(plan, rows=_rows_of_a_task(plan, request)).row_ranges()]
    # The sums over queries of all rows need common borders.
    plan = replace(plan, rows=max(1, min(plan.rows, len(units[0])))).with_common_borders()
    scores = scores.for_tiles()._replace(known_tiles=None)
    if not grid.is_writeable:
        return joined(scores.xp, [statistics_of_rows(scores, plan, rows, request) for rows in units])
    scores = scores._replace(known_tiles={} if scores.options.mask.is_shared else None)
    # A function may keep the scores that it gets: no buffer holds them.
    if scores.options.has_functions:
        return _in_tasks(scores, plan, units, request)
    with call_buffers(grid) as buffers:
        return _in_tasks(scores._replace(buffers=buffers), plan, units, request)


def _of_band(scores: Scores, plan: Plan, band: range, request: Request) -> Results:
    """Return the statistics of a band of queries, in a loop that the compiler keeps; sums are over the band."""
    xp, keys = scores.xp, scores.key_range(band) or range(0)
    width = 1 if request.block_size is None else request.block_size[1]
    # One tile, of whole blocks of keys.
    columns = range(keys.start // width * width, min(-(-keys.stop // width) * width, plan.keys))
    plan = replace(plan, columns=max(1, len(columns)), align=width)
    names: list[str] = []

    def compute(block: Scores, is_new: Array | None) -> tuple[Results, list[Array]]:
        sums: Results = {}

        def add_weights(tile: Tile, weights: Array) -> None:
            new = weights if is_new is None else xp.where(is_new, weights, 0.0)
            if request.key_sums:
                sums["key_sums"] = xp.sum(new, axis=-2, keepdims=True)
            if request.block_size is not None:
                sums["block_sums"] = _sums_of_blocks_of_both(tile, new, request.block_size)

        computed = statistics_of_few_rows(block, plan, band, request, add_weights)
        names[:] = computed
        return sums, [*computed.values()]

    sums, arrays = compute_band(scores, plan, band, compute, has_sums=True)
    results = dict(zip(names, arrays, strict=True))
    if request.key_sums:
        results["key_sums"] = _of_all_keys(scores, sums.get("key_sums"), 1, columns)
    if request.block_size is not None:
        blocks = range(columns.start // width, -(-columns.stop // width))
        rows = -(-plan.queries // request.block_size[0])
        results["block_sums"] = _of_all_keys(scores, sums.get("block_sums"), rows, blocks, width)
    return results


def _sums_of_blocks_of_both(tile: Tile, weights: Array, block_size: tuple[int, int]) -> Array:
    """Return sums of blocks of queries and keys, (..., all blocks of queries, blocks of keys in the tile)."""
    grid, xp = tile.grid, tile.grid.xp
    rows, columns = block_size
    by_key = xp.matrix_transpose(sums_of_blocks(xp, xp.matrix_transpose(weights), columns))
    # The rows of a loop may lie anywhere, so a product takes each to its block.
    numbers = xp.expand_dims(grid.arange(0, -(-grid.queries // rows)), axis=-1)
    is_in_block = cast(Array, xp.matrix_transpose(tile.row_index // rows) == numbers)
    return xp.astype(is_in_block, grid.dtype) @ by_key


def _of_all_keys(scores: Scores, sums: Array | None, rows: int, columns: range, width: int = 1) -> Array:
    """Return sums of some blocks of keys, with 0 for others, (..., Hq, rows, blocks); None is 0 everywhere."""
    xp, count = scores.xp, -(-scores.grid.keys // width)
    shape = (*scores.leading_shape, rows, count)
    if sums is None:
        return xp.zeros(shape, dtype=scores.grid.dtype, device=None)
    return xp.broadcast_to(between_zeros(xp, sums, -1, columns.start, count - columns.stop), shape)


def _rows_of_a_task(plan: Plan, request: Request) -> int:
    """Return the rows of a task: whole blocks of queries, whose sums it can hold."""
    block = plan.rows if request.block_size is None else request.block_size[0]
    if block > plan.rows:
        return block
    return min(plan.rows // block, max(1, MOST_STRIP // max(1, plan.keys))) * block


def _in_tasks(scores: Scores, plan: Plan, units: Sequence[range], request: Request) -> Results:
    """Return the statistics; threads take one share of the queries of a leading slice after the other."""
    slices: Sequence[LeadingSlice | None] = plan.leading_slices or (None,)
    shares = len(units)
    if request.key_sums:  # each share has its own sums, which are added in order
        shares = min(shares, -(-SHARES // len(slices)) if plan.threads is None else 1)
    # The last queries, which attend most keys under a causal mask, come first.
    tasks = [(leading, share) for share in reversed(range(shares)) for leading in slices]
    outs = _empty_results(scores, plan, request)
    sums = dict[tuple[LeadingSlice | None, int], Array]()

    def compute(task: tuple[LeadingSlice | None, int]) -> None:
        leading, share = task
        with computing(scores.query):  # here too: a library may keep this setting for each thread
            part = scores.slice_leading(leading)
            index = _leading_index(leading)
            for rows in units[share::shares]:
                computed = statistics_of_rows(part, plan, rows, request)
                if (of_keys := computed.pop("key_sums", None)) is not None:
                    sums[task] = sums[task] + of_keys if task in sums else of_keys
                for name, array in computed.items():
                    out, first = outs[name], rows.start
                    if name == "block_sums" and request.block_size is not None:
                        first //= request.block_size[0]
                    out[(*index, slice(first, first + array.shape[-2]), slice(None))] = array

    threads.run(compute, tasks, plan.threads)
    for leading in slices if request.key_sums else ():
        total = reduce(add, (sums[leading, share] for share in range(shares)))
        outs["key_sums"][(*_leading_index(leading), slice(None), slice(None))] = total
    return outs


def _leading_index(leading: LeadingSlice | None) -> tuple[object, ...]:
    return (...,) if leading is None else tuple([slice(r.start, r.stop) for r in leading])


def _empty_results(scores: Scores, plan: Plan, request: Request) -> Results:
    """Return an array without values for each statistic."""
    grid, queries = scores.grid, plan.queries
    shapes = {
        "row_max": (queries, 1) if request.row_max else None,
        "entropy": (queries, 1) if request.entropy else None,
        "top_weights": (queries, request.top_k) if request.top_k else None,
        "top_indices": (queries, request.top_k) if request.top_k else None,
        "key_sums": (1, plan.keys) if request.key_sums else None,
        "block_sums": request.block_size
        and tuple(-(-n // size) for n, size in zip((queries, plan.keys), request.block_size, strict=True)),
    }
    xp, dtypes = scores.xp, {"top_indices": scores.xp.int32}
    return {
        name: xp.empty((*grid.leading_shape, *shape), dtype=dtypes.get(name, grid.dtype), device=grid.device)
        for name, shape in shapes.items()
        if shape is not None
    }
