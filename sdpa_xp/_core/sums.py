"""The executors of sums over the tiles of a call: in threads, in loops of a compiler, or at once.

A program has targets, and says what a range of queries adds to each. It does not know who runs it, and an
executor does not know what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Protocol, Self, TypeAlias

from .._libraries import computing
from .._libraries.protocols import Array, Namespace, Shape
from .._tiles.plan import Plan
from .._tiles.tile import LeadingSlice, Target
from . import threads
from .accumulators import Accumulator, between_zeros
from .compiled_loops import compute_band, row_bands
from .products import call_buffers
from .scores import Scores

Sums: TypeAlias = Mapping[str, Accumulator]


class Program(Protocol):
    """What is summed over the tiles of a call."""

    @property
    def scores(self) -> Scores: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def targets(self) -> Mapping[str, Target]:
        """The arrays that are computed, by name."""

    @property
    def keeps_scores(self) -> bool:
        """Whether the scores of a tile are needed after the next one is computed: then no buffer holds them."""

    def slice_leading(self, leading: LeadingSlice | None) -> Self:
        """Return the part of some batch entries and heads."""

    def add_rows(self, sums: Sums, rows: range, is_new: Array | None) -> None:
        """Add what a range of queries contributes; only rows where `is_new`, (rows, 1), is True count."""

    def cut(self, scores: Scores, plan: Plan) -> Self:
        """Return the program of other scores and tiles."""


def sum_over_tiles(program: Program) -> dict[str, Array]:
    """Return for each target the sum of what the program adds.

    If arrays can be written to, the leading slices of the plan are computed one by one, in threads.
    """
    plan, grid = program.plan, program.scores.grid
    if plan.is_loop:
        return _sum_in_loops(program)
    # The sums over queries need common borders.
    program = program.cut(program.scores, plan.with_common_borders())
    if not grid.is_writeable:
        keys = range(plan.keys)
        columns = [*program.plan.column_ranges(keys)] or [keys]  # one piece of no element
        sums = _accumulators(program, plan.row_ranges(), columns)
        for rows in plan.row_ranges():
            program.add_rows(sums, rows, None)
        return {name: accumulator.array() for name, accumulator in sums.items()}
    if program.keeps_scores:
        return _sum_in_tasks(program)
    with call_buffers(grid) as buffers:
        return _sum_in_tasks(program.cut(program.scores._replace(buffers=buffers), program.plan))


def _sum_in_tasks(program: Program) -> dict[str, Array]:
    """Return the sums; threads take one share of the queries of some leading slices after the other."""
    plan, grid, targets = program.plan, program.scores.grid, program.targets

    def zeros(target: Target) -> Array:
        return grid.xp.zeros(target.shape, dtype=target.dtype or grid.dtype, device=grid.device)

    sums = {name: zeros(target) for name, target in targets.items()}
    # Sinks, slopes and tables have few elements, and every slice adds to all of them. They are kept aside, as
    # the sums over queries of all shares but the first. They are added in the order of the slices, so that the
    # result does not depend on which thread ends first.
    small = {name for name, target in targets.items() if target.axes == (None, None)}
    kept: dict[tuple[LeadingSlice | None, int], dict[str, Array]] = {}
    large = [target for name, target in targets.items() if name not in small]
    groups = _independent_groups(plan.leading_slices, large, grid.leading_shape)
    shares = plan.shares(len(groups))

    def compute(task: tuple[list[LeadingSlice | None], int]) -> None:
        slices, share = task
        with computing(program.scores.query):  # here too: a library may keep this setting for each thread
            for leading in slices:
                part = program.slice_leading(leading)
                aside = kept[leading, share] = {
                    name: zeros(target)
                    for name, target in part.targets.items()
                    if name in small or (share > 0 and target.axes[0] != "rows")
                }
                outs = {name: sums[name][target.slices(leading)] for name, target in targets.items()} | aside
                accumulators = _accumulators(part, (), (), outs)
                for rows in shares[share]:
                    part.add_rows(accumulators, rows, None)

    threads.run(compute, [(x, n) for x in groups for n in range(len(shares))], plan.threads)
    for leading in plan.leading_slices or (None,):
        for share in range(len(shares)):
            for name, array in kept[leading, share].items():
                sums[name][targets[name].slices(leading)] += array
    return sums


def _sum_in_loops(program: Program) -> dict[str, Array]:
    """Return the sums of a call whose values cannot be read, in loops that the compiler keeps."""
    scores = program.scores
    bands = [_sum_of_band(program, band) for band in row_bands(scores, program.plan)]
    join = partial(scores.xp.concat, axis=-2)
    return {
        name: (join if target.axes[0] == "rows" else partial(reduce, add))([band[name] for band in bands])
        for name, target in program.targets.items()
    }


def _sum_of_band(program: Program, band: range) -> dict[str, Array]:
    """Return the sums over a band of queries, or its rows of what has a row for each query."""
    scores, targets, xp = program.scores, program.targets, program.scores.xp
    columns = scores.key_range(band) or range(0)  # one that is empty may begin anywhere
    plan = replace(program.plan, columns=max(1, len(columns)))
    of_rows = [name for name, target in targets.items() if target.axes[0] == "rows"]

    def compute(block: Scores, is_new: Array | None) -> tuple[dict[str, Array], list[Array]]:
        rows = range(band.start, band.start + block.tile(band, range(1)).shape[-2])
        accumulators = _accumulators(program, [rows], [columns])
        program.cut(block, plan).add_rows(accumulators, band, is_new)
        sums = {name: accumulator.array() for name, accumulator in accumulators.items()}
        return sums, [sums.pop(name) for name in of_rows]

    sums, others = compute_band(scores, plan, band, compute, has_sums=True)
    sums |= zip(of_rows, others, strict=True)
    return {name: _in_all_columns(xp, x, targets[name], columns, plan.keys) for name, x in sums.items()}


def _in_all_columns(xp: Namespace, array: Array, target: Target, columns: range, keys: int) -> Array:
    """Return the sum of a target from its part of some keys: 0 for the others."""
    if "columns" not in target.axes or len(columns) == keys:
        return array
    return between_zeros(xp, array, target.axes.index("columns") - 2, columns.start, keys - columns.stop)


def _independent_groups(
    slices: Sequence[LeadingSlice], targets: Iterable[Target], leading_shape: Shape
) -> list[list[LeadingSlice | None]]:
    """Group slices that add into the same array, so that the order of summation is fixed."""
    if not slices:
        return [[None]]
    is_broadcast = [target.broadcast_axes(leading_shape) for target in targets]
    groups: dict[tuple[range, ...], list[LeadingSlice | None]] = {}
    for leading in slices:
        unshared = tuple(r for axis, r in enumerate(leading) if not any(flags[axis] for flags in is_broadcast))
        groups.setdefault(unshared, []).append(leading)
    return [*groups.values()]


def _accumulators(
    program: Program, rows: Iterable[range], columns: Iterable[range], outs: Mapping[str, Array] | None = None
) -> dict[str, Accumulator]:
    rows, columns, grid = [*rows], [*columns], program.scores.grid
    return {
        name: Accumulator(target, rows, columns, grid, None if outs is None else outs[name])
        for name, target in program.targets.items()
    }
