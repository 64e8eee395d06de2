"""How a call is cut into tiles, and its queries into blocks with a list of keys each."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from .._libraries.protocols import Dtype, Shape
from ..errors import PACKAGE, ArgumentValueError
from . import LeadingSlice, tuning
from .grid import ScoreGrid

if TYPE_CHECKING:  # few calls have patches
    from .key_lists import Patches

VARIABLE = "SDPA_XP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of a call: at most `rows` x `columns` of L queries x S keys."""

    queries: int
    keys: int
    rows: int
    columns: int
    is_empty: bool = False
    """Whether no key needs to be read, as if the result has no elements."""
    align: int = 1
    """Tiles begin and end at a multiple of this many keys, such as the block size of a paged cache."""
    first_key: int = 0
    """The key, less than `align`, from which these multiples count."""
    leading_slices: tuple[LeadingSlice, ...] = ()
    """Parts of the leading axes that are computed one by one; () is all at once."""
    threads: int | None = 1
    """None is as many threads as the environment or the BLAS allows."""
    tries_without_maximum: bool = False
    """Whether to compute the softmax without a maximum first."""
    is_loop: bool = False
    """Whether blocks of `rows` queries are the iterations of a loop that a compiler runs."""
    patches: Patches | None = None
    """The blocks of queries of which the output is computed instead, each with its keys: see `plan_patches`."""
    own_tasks: tuple[Task, ...] = ()
    """The tasks of a call whose queries are cut in another way."""

    @property
    def is_one_tile(self) -> bool:
        """Whether all queries, keys, batch entries and heads are computed at once."""
        return not self.leading_slices and self.queries <= self.rows and self.keys <= self.columns

    @property
    def is_small(self) -> bool:
        """Whether a call is one tile for which it does not pay to prepare memory and threads."""
        return self.is_one_tile and not (self.tries_without_maximum or self.own_tasks)

    def tasks(self) -> list[Task]:
        """Return the tasks. The last queries, which attend most keys under a causal mask, come first."""
        if self.own_tasks:
            return [*self.own_tasks]
        row_ranges = [*self.row_ranges()][::-1]
        slices = self.leading_slices or (None,)
        return [Task((leading,), (rows,), self) for rows in row_ranges for leading in slices]

    def row_ranges(self) -> Iterator[range]:
        """Return the ranges of queries; one empty range if there is no query."""
        return _ranges(0, self.queries, self.rows) if self.queries else iter((range(0),))

    def shares(self, groups: int) -> list[list[range]]:
        """Return the ranges of queries in parts of equal work: several if there are fewer groups than cores.

        Each of the `groups` of heads is divided in this way. The number of threads does not change it, so no
        result depends on that number.
        """
        ranges, cores = [*self.row_ranges()], os.cpu_count() or 1
        count = 1 if self.threads == 1 else min(len(ranges), tuning.MOST_SHARES, -(-cores // groups))
        # Under a causal mask each part has both queries that attend few keys and queries that attend many.
        return [
            [rows for n, rows in enumerate(ranges) if n % (2 * count) in (share, 2 * count - 1 - share)]
            for share in range(count)
        ]

    def bands(self) -> list[range]:
        """Return the queries in up to `MOST_BANDS` ranges of whole blocks."""
        blocks = -(-self.queries // self.rows)
        return [*_ranges(0, self.queries, -(-blocks // tuning.MOST_BANDS) * self.rows)]

    def column_ranges(self, key_range: range) -> Iterator[range]:
        """Return the ranges of keys that cover `key_range`; none if the result is empty."""
        if self.is_empty or not key_range:
            return iter(())
        start, stop = key_range.start, key_range.stop
        if self.align > 1:
            start -= (start - self.first_key) % self.align
            stop += (self.first_key - stop) % self.align
        before = range(self.first_key if start < 0 else 0)  # a tile that is shorter than all others
        tiles = _ranges(max(start, before.stop), min(stop, self.keys), self.columns)
        return itertools.chain([before], tiles) if before else tiles

    def with_common_borders(self) -> Plan:
        """Return the plan whose tiles begin and end at the same keys for all queries, for sums over queries."""
        return replace(self, align=self.columns)


class Task(NamedTuple):
    """What a thread computes without a break: ranges of queries of some batch entries and heads."""

    slices: Sequence[LeadingSlice | None]
    ranges: Sequence[range]
    plan: Plan
    """The tiles of its keys."""
    number: int = 0
    """Which of the tasks of these slices it is, if several add to the same sums."""


def plan_tiles(grid: ScoreGrid, group: int, widths: int) -> Plan:
    """Choose the tiles of a call with `group` query heads for each key head, and `widths` = E + Ev.

    Traced and lazy arrays get one tile, because a graph must not grow with the number of tiles. If the compiler
    has loops and there are many scores, they get loops over blocks of queries.
    """
    (queries, keys), heads = map(len, grid.sides), math.prod(grid.leading_shape)
    is_empty = heads == 0 or queries == 0
    if grid.placement is not None:  # one tile, whose borders no mask moves
        return Plan(queries, keys, queries, keys, is_empty or 0 in grid.shape).with_common_borders()
    if (
        grid.access.is_traced
        and not is_empty
        and (loops := grid.library.loops) is not None
        and grid.library.is_known(heads)
        and heads * queries * keys > tuning.DEVICE.scores
    ):
        most_rows = max(tuning.SMALLEST_SIDE, loops.most_scores(tuning.DEVICE.scores) // (heads * keys))
        least = -(-queries // most_rows)
        # Blocks without remainder can have rows from everywhere: see `_compute_band` in `_run/bands.py`.
        iterations = next((n for n in range(least, 2 * least) if queries % n == 0), least)
        return Plan(queries, keys, -(-queries // iterations), keys, is_loop=True)
    if grid.access.is_traced or is_empty or keys == 0:
        return Plan(queries, keys, max(1, queries), max(1, keys), is_empty)
    if not grid.access.is_writeable:  # all heads are computed in one operation: more heads, smaller tiles
        rows, columns, most_scores = tuning.EQUAL_TILES if grid.library.compiles_shapes else tuning.DEVICE
        if grid.access.waits and queries < rows:
            return _plan_few_rows(queries, keys, heads, most_scores)
        while heads * rows * columns > most_scores and columns > tuning.SMALLEST_SIDE:
            columns //= 2
            rows = max(rows // 2, tuning.SMALLEST_SIDE)
        return Plan(queries, keys, rows, columns)
    cores, key_heads = os.cpu_count() or 1, heads // group
    has_threads = takes_threads(grid, heads * queries * keys * widths)
    # Without threads of ours the library divides each operation, so a tile may have what all cores can take.
    size, cores_of_a_tile = (tuning.ONE_CORE, 1) if grid.access.uses_our_threads else (tuning.ALL_CORES, cores)
    share = grid.library.tile_share
    size = tuning.TileSize(size.rows, max(1, size.columns // share), size.scores // share)
    # With threads, rows are cut so that each core gets about two tasks: one that starts late delays the end
    # less.
    fair_share = -(-queries * key_heads // (2 * cores)) if has_threads else queries
    rows = min(queries, max(1, size.rows // group), max(tuning.SMALLEST_SIDE, fair_share))
    # If there are few rows, as in decoding, a tile gets more keys instead: fewer, larger products.
    columns = max(size.scores // (rows * group), size.columns)
    # With few keys, queries and outputs are larger than the scores.
    heads_that_fit = size.scores * cores_of_a_tile // (rows * group * max(min(columns, keys), widths // 2, 1))
    heads_of_a_core = key_heads // cores if has_threads else heads_that_fit
    if grid.is_reproducible:
        rows = -(-rows // tuning.ROWS_OF_A_PRODUCT) * tuning.ROWS_OF_A_PRODUCT
        columns = columns // tuning.KEYS_OF_A_PRODUCT * tuning.KEYS_OF_A_PRODUCT
    holds_blas = has_threads or (grid.is_reproducible and widths > tuning.MOST_WIDTHS_OF_ONE_THREAD)
    return Plan(
        queries,
        keys,
        rows,
        columns,
        leading_slices=_leading_slices(grid.leading_shape, group, max(1, min(heads_that_fit, heads_of_a_core))),
        align=tuning.KEYS_OF_A_PRODUCT if grid.is_reproducible else 1,
        threads=None if holds_blas else 1,
        tries_without_maximum=grid.library.has_free_shift
        and heads * queries * keys >= tuning.LEAST_SCORES_WITHOUT_MAXIMUM,
    )


def _plan_few_rows(queries: int, keys: int, heads: int, most_scores: int) -> Plan:
    """Choose the tiles of a device for fewer queries than a tile has rows, as in decoding: fewer, wider tiles.

    Each tile takes about 16 launches, however small it is. A few queries have fewer scores than their keys have
    elements, so their tiles may have more scores and still take little memory.
    """
    rows = queries
    most_scores *= tuning.MOST_OF_FEW_ROWS if rows <= tuning.SMALLEST_SIDE else 1
    while rows > tuning.SMALLEST_SIDE and heads * rows * tuning.SMALLEST_SIDE > most_scores:
        rows = max(rows // 2, tuning.SMALLEST_SIDE)
    return Plan(queries, keys, rows, max(tuning.SMALLEST_SIDE, most_scores // (heads * rows)))


def takes_threads(grid: ScoreGrid, multiplications: int) -> bool:
    """Return whether threads of ours compute so much work."""
    return grid.access.uses_our_threads and multiplications >= tuning.LEAST_WORK_FOR_THREADS


def plan_recomputed(plan: Plan, grid: ScoreGrid) -> Plan:
    """Return a plan of fewer rows if a library may record the call, and computes it again for its gradients.

    All keys of some queries are in memory while their gradients are computed.
    """
    size = math.prod(grid.shape)
    is_eager = not (grid.access.is_traced or grid.access.is_writeable)
    if not is_eager or grid.library.autograd is None or size <= tuning.MOST_SCORES_KEPT:
        return plan
    most = tuning.DEVICE.scores * plan.queries // size
    return replace(plan, rows=min(plan.rows, max(tuning.SMALLEST_SIDE, most)))


def plan_pages(grid: ScoreGrid, group: int, widths: int, block_size: int) -> Plan:
    """Choose the tiles of a call whose keys and values lie in blocks, which are copied for each tile.

    In traced calls a tile is one block, so that no copy of all blocks is in the graph.
    """
    is_empty = 0 in grid.shape
    if grid.access.is_traced or is_empty:
        return Plan(grid.queries, grid.keys, tuning.DEVICE.rows, block_size, is_empty, align=block_size)
    plan, key_heads = plan_tiles(grid, group, widths), grid.heads // group
    if grid.is_reproducible:
        return plan
    most_copied = tuning.MOST_COPIED
    if grid.access.waits:
        most_copied = tuning.MOST_COPIED_ON_DEVICE // math.prod(grid.leading_shape[:-1])
    most_columns = min(plan.columns, most_copied // (key_heads * widths))
    columns = max(1, most_columns // block_size) * block_size
    leading_slices = plan.leading_slices
    if grid.access.is_writeable:  # others have no leading slices
        sequences = max(1, tuning.MOST_COPIED // (key_heads * widths * min(columns, grid.keys)))
        leading_slices = _leading_slices(grid.leading_shape, group, key_heads * sequences)
    return replace(plan, columns=columns, leading_slices=leading_slices, align=block_size)


def plan_for(dtype: Dtype, grid: ScoreGrid, group: int, widths: int) -> Plan:
    """Choose the tiles of a call whose keys have this dtype, which may be narrower than that of the query."""
    choose = plan_tiles if dtype == grid.input_dtype else plan_widened
    return choose(grid, group, widths)


def plan_widened(grid: ScoreGrid, group: int, widths: int) -> Plan:
    """Choose the tiles of a call whose keys and values are narrow or quantised, and widened for each tile."""
    plan = plan_tiles(grid, group, widths)
    if plan.is_empty or grid.placement is not None:
        return plan
    if grid.access.is_traced:
        return replace(
            plan, columns=min(plan.columns, max(tuning.LEAST_WIDENED, -(-plan.keys // tuning.MOST_TILES)))
        )
    heads = map(len, plan.leading_slices[0]) if plan.leading_slices else grid.leading_shape
    most_copied = tuning.MOST_COPIED_ON_DEVICE if grid.access.waits else tuning.MOST_COPIED
    most_columns = most_copied * group // (math.prod(heads) * max(1, widths))
    return replace(plan, columns=min(plan.columns, max(tuning.SMALLEST_SIDE, most_columns)))


def with_patches(
    plan: Plan, patches: Patches, grid: ScoreGrid, key_range: Callable[[range], range], widths: int
) -> Plan:
    """Return the plan with patches, if they take at most half of the time of ranges of keys."""
    heads = math.prod(grid.leading_shape)
    in_ranges = sum([len(rows) * len(key_range(rows)) for rows in plan.row_ranges()])
    in_patches = patches.blocks * patches.keys * (patches.queries + tuning.COST_OF_A_COPY)
    if 2 * in_patches > in_ranges or heads * in_ranges < tuning.LEAST_PATCHED_PAIRS:
        return plan
    if grid.access.is_traced:
        # All blocks are one tile, for which keys are copied at once. Several devices would exchange them.
        copied = heads * patches.blocks * patches.keys * widths
        is_small = plan.is_loop and copied <= tuning.MOST_COPIED_ON_DEVICE
        if not is_small or (loops := grid.library.loops) is None or loops.may_be_shared():
            return plan
    return replace(plan, patches=patches)


def plan_patches(plan: Plan, grid: ScoreGrid, group: int, widths: int) -> Plan:
    """Choose the tiles of the blocks of a plan: heads (..., H, blocks) of G * n queries and m keys each.

    A tile has the same blocks of all heads and batch entries that fit.
    """
    patches, leading = cast("Patches", plan.patches), (*grid.batch, grid.heads // group)
    queries, keys, heads = group * patches.queries, patches.keys, math.prod(leading)
    most = (
        tuning.MOST_COPIED_ON_DEVICE if grid.access.waits or grid.access.is_traced else tuning.MOST_GATHERED
    ) // (keys * widths)
    has_threads = takes_threads(grid, heads * patches.blocks * queries * keys * widths)
    fair_share = -(-patches.blocks // (2 * (os.cpu_count() or 1))) if has_threads else patches.blocks
    of_blocks = _ranges(0, patches.blocks, min(fair_share, max(1, most // heads)))
    # Without an array to write to, the parts are joined along the blocks alone.
    others = _leading_slices(leading, 1, max(1, most)) if grid.access.is_writeable else ()
    parts = itertools.product(of_blocks, others or [tuple(map(range, leading))])
    return Plan(
        queries,
        keys,
        queries,
        keys,
        leading_slices=tuple([(*heads, blocks) for blocks, heads in parts]),
        threads=None if has_threads else 1,
        tries_without_maximum=plan.tries_without_maximum,
    )


def plan_full_rows(grid: ScoreGrid, *, in_task: bool = False) -> Plan:
    """Choose tiles with all keys, for results that have a column for each key.

    A task of a lazy call has numbers, though the grid of the call has none.
    """
    (queries, keys), heads = map(len, grid.sides), math.prod(grid.leading_shape)
    rows = (
        queries
        if grid.access.is_traced and not in_task
        else max(1, tuning.DEVICE.scores // max(1, heads * keys))
    )
    return Plan(queries, keys, rows, keys, heads == 0 or queries == 0)


def _leading_slices(leading_shape: Shape, group: int, key_heads: int) -> tuple[LeadingSlice, ...]:
    """Cut the leading axes (..., Hq) into parts of about `key_heads` key heads; () if that is one part."""
    ranges: list[list[range]] = []
    unit = group
    for length in reversed(leading_shape):
        size = min(length // unit, key_heads) * unit
        ranges.insert(0, [*_ranges(0, length, size)])
        key_heads, unit = max(1, key_heads * unit // size), 1
    return () if all(len(of_axis) == 1 for of_axis in ranges) else tuple(itertools.product(*ranges))


def _ranges(start: int, stop: int, step: int) -> Iterator[range]:
    for first in range(start, stop, step):
        yield range(first, min(first + step, stop))


def asked_threads() -> int | None:
    """Return the number of threads that the environment asks for, or None if it does not say.

    Raises:
        ValueError: The variable holds something other than a positive integer.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        rule = f"the environment's {VARIABLE} must be a positive integer"
        raise ArgumentValueError(PACKAGE, rule, {VARIABLE: text})
    return int(text)
