"""The executors of programs: in threads, in loops of a compiler, or at once.

A NaN or inf of a masked pair may spoil results. When a program's can be looked at is known here: values of a
trace cannot be read, a device is waited for once, after its last result, and arrays on the CPU are looked at
range by range, while they are in the cache. Groups of sequences are looked at together, by `_sequences`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product

from .._libraries import computing
from .._libraries.protocols import Array, Shape
from .._tiles import LeadingSlice, Target
from .._tiles.grid import ScoreGrid
from .._tiles.plan import Plan, Task
from . import threads
from .bands import run_in_loops
from .buffers import call_buffers
from .program import Program, Repairable, WrittenResult, in_pieces, joined


def run(program: Program, outs: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return the targets of a program, each an array of its own.

    In tasks, targets are computed in the arrays `outs` that have their names, shapes and dtypes: zeros, unless
    the program writes to all of them.
    """
    plan, grid = program.plan, program.grid
    if plan.is_loop:
        return run_in_loops(program)
    if joins(plan, grid):
        return _run_and_join(program)
    with nullcontext() if program.keeps_scores else call_buffers(grid) as buffers:
        # Each part of the heads has tiles of the same queries: a mask that answers alike is asked once.
        is_shared = program.shares_tiles and bool(plan.leading_slices)
        scores = program.scores.in_memory(buffers, shares_tiles=is_shared)
        return _run_in_tasks(replace(program, scores=scores), outs or {})


def run_repaired(program: Repairable, outs: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return the targets of a program, as `run` does, without what a masked pair has brought in."""
    access = program.grid.access
    if access.is_traced:
        return run(program.guarded())
    if (right := program.trusted(reads_ranges=access.is_writeable)) is not None:
        return run(right, outs)
    results = run(program.with_checksum())
    repaired = program.repaired(results)
    return results if repaired is None else run(repaired)


def joins(plan: Plan, grid: ScoreGrid) -> bool:
    """Return whether targets are joined from pieces, and not written to."""
    return plan.is_small or not grid.access.is_writeable


def runs_at_once(plan: Plan, grid: ScoreGrid) -> bool:
    """Return whether a call is so small that all of its queries are computed without a program."""
    return plan.is_small and grid.access.is_writeable and not grid.is_reproducible


def _run_and_join(program: Program) -> dict[str, Array]:
    """Return the targets without writing to an array; each range of queries has all heads at once."""
    plan, grid = program.plan, program.grid
    ranges = [*plan.row_ranges()]
    columns: list[range] = []  # not list[range](), which not every compiler traces
    if any("columns" in target.axes for target in program.targets.values()):
        keys = range(plan.keys)
        columns = [*plan.column_ranges(keys)] or [keys]  # or one piece of no element
    results = in_pieces(program, ranges, columns)
    autograd = None if grid.access.is_traced or grid.access.is_writeable else grid.library.autograd
    for rows in ranges:
        if autograd is not None and program.is_recomputed:
            computed = autograd.recomputed(partial(_compute_rows, program, rows))
            for name, array in computed.items():
                results[name].add(program.scores.tile(rows, range(1)), array)
        else:
            program.add_rows(results, rows)
    return joined(results)


def _compute_rows(program: Program, rows: range) -> dict[str, Array]:
    """Return what a range of queries contributes to targets without columns."""
    results = in_pieces(program, [rows], [])
    program.add_rows(results, rows)
    return joined(results)


def _run_in_tasks(program: Program, outs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the targets; threads take one task after the other."""
    plan, grid, targets = program.plan, program.grid, program.targets

    def zeros(target: Target) -> Array:
        return grid.xp.zeros(target.shape, dtype=target.dtype or grid.dtype, device=grid.device)

    arrays = {name: outs[name] if name in outs else zeros(target) for name, target in targets.items()}
    # Sinks, slopes and tables have few elements, and every slice adds to all of them. They are kept aside,
    # as are the sums over queries of all tasks of a slice but the first. They are added in the order of the
    # slices, so that the result does not depend on which thread ends first.
    small = {name for name, target in targets.items() if target.axes == (None, None)}
    summed = {name for name, target in targets.items() if not target.has_own_rows}
    kept: dict[tuple[LeadingSlice | None, int], dict[str, Array]] = {}

    @cache  # two threads may compute equal parts at once, of which one is kept
    def part_of(leading: LeadingSlice | None) -> tuple[Program, dict[str, WrittenResult]]:
        results = {}
        for name, target in targets.items():
            of_part = target.slice_leading(leading) if name in summed else target
            results[name] = WrittenResult(of_part, grid, arrays[name][target.slices(leading)])
        return program if leading is None else program.slice_leading(leading), results

    def compute(task: Task) -> None:
        with computing(program.scores.query):  # here too: a library may keep this setting for each thread
            for leading in task.slices:
                part, results = part_of(leading)
                if task.plan is not plan:
                    part = replace(part, plan=task.plan)
                if aside := summed if task.number else small:
                    empty = {name: zeros(results[name].target) for name in aside}
                    kept[leading, task.number] = empty
                    results = results | {n: results[n]._replace(array=array) for n, array in empty.items()}
                for rows in task.ranges:
                    part.add_rows(results, rows)

    tasks = plan.tasks()
    if summed:
        tasks = _summing_tasks(plan, [targets[name] for name in targets if name not in small], grid)
    threads.run_tasks(compute, tasks, plan.threads)
    numbers = sorted({task.number for task in tasks}) if kept else ()
    for place in product(plan.leading_slices or (None,), numbers):
        for name, array in kept.get(place, {}).items():
            arrays[name][targets[name].slices(place[0])] += array
    return arrays


def _summing_tasks(plan: Plan, targets: Sequence[Target], grid: ScoreGrid) -> list[Task]:
    """Return the tasks of a call that sums over queries, those of the same slices in one order."""
    groups = _independent_groups(plan.leading_slices, targets, grid.leading_shape)
    shares = plan.shares(len(groups))
    return [Task(group, ranges, plan, number) for group in groups for number, ranges in enumerate(shares)]


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
