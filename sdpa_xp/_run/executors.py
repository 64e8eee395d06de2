"""The executors of programs: in threads, at once, or in loops of a compiler (`loops.py`).

The results of some programs may be wrong at first, because a NaN or inf of a masked pair got in. To keep one
out costs more than to notice it, so these programs begin with a weak guard or none. They are looked at

    in a trace    never: no value can be read, so all is guarded that a graph can afford
    in place      after each range of queries, by the program itself
    joined        after the last range, so that a device is waited for once
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product
from typing import Any

from .._libraries import computing, is_traced
from .._libraries.protocols import Array, Shape
from .._tiles import tuning
from .._tiles.plan import Plan, Task, takes_threads
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import LeadingSlice, Target
from . import threads
from .buffers import call_buffers
from .products import are_finite
from .program import Program, WrittenResult, in_pieces, joined


def run(program: Program, outs: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return the targets of a program, each an array of its own.

    In tasks, targets are computed in the arrays `outs` that have their names, shapes and dtypes: zeros, unless
    the program writes to all of them.
    """
    plan, grid = program.plan, program.grid
    if plan.is_loop:
        from .loops import run_in_loops  # few programs need it

        return run_in_loops(program)
    if joins(plan, grid):
        return _run_and_join(program)
    with nullcontext() if program.keeps_scores else call_buffers(grid) as buffers:
        # Each part of the heads has tiles of the same queries: a mask that answers alike is asked once.
        is_shared = program.shares_tiles and bool(plan.leading_slices)
        scores = program.scores.in_memory(buffers, shares_tiles=is_shared)
        return _run_in_tasks(replace(program, scores=scores), outs or {})


def run_guarded(program: Program) -> dict[str, Array]:
    """Return the targets of a program, all of which are computed again if one is wrong."""
    if program.grid.access.is_traced:
        return run(program.guarded(in_trace=True))
    if (known := program.known_right()) is not None:
        return run(known)
    results = run(program)
    return results if program.scores.are_right(*results.values()) else run(program.guarded(in_trace=False))


def run_repaired(
    program: Program, outs: Mapping[str, Array], *, returns_checksum: bool = False
) -> dict[str, Array]:
    """Return the targets of a program whose ranges of queries are repaired.

    In tasks, they are computed in `outs`, as in `run`. With `returns_checksum` nothing is waited for: if
    "checksum" is among the results, and not finite, the program has to be run again with inputs that are known
    not to be finite.
    """
    plan, access = program.plan, program.grid.access
    if access.is_writeable:
        for attempt in program.attempts():
            outs = results = run(attempt, outs)
        return results
    if plan.leading_slices:  # without an array to write to, each slice is a call of its own
        parts = [run_repaired(_alone(program, leading), {}) for leading in plan.leading_slices]
        concat = program.grid.xp.concat
        return {name: concat([part[name] for part in parts], axis=-3) for name in program.targets}
    if access.is_traced:
        return run(program.guarded(in_trace=True))
    return _run_and_look(program, returns_checksum=returns_checksum)


def _alone(program: Program, leading: LeadingSlice) -> Program:
    """Return the program of a slice of the leading axes, with targets of its own."""
    targets = {name: target.slice_leading(leading) for name, target in program.targets.items()}
    plan = replace(program.plan, leading_slices=())
    return replace(program.slice_leading(leading), targets=targets, plan=plan)


def _run_and_look(program: Program, *, returns_checksum: bool) -> dict[str, Array]:
    """Return the targets of a program after a look at the checksums of all ranges of queries."""
    plan, grid = program.plan, program.grid
    if grid.library.autograd is not None and program.is_recomputed:
        # All keys of some queries are in memory while their gradients are computed.
        most = tuning.DEVICE.scores * plan.queries // math.prod(grid.shape)
        plan = replace(plan, rows=min(plan.rows, max(tuning.SMALLEST_SIDE, most)))
        program = replace(program, plan=plan)
    if (known := program.known_right()) is not None:
        return run(known)
    ranges = [*plan.row_ranges()]
    checksum = Target((len(ranges), 1), ("rows", None), block=(plan.rows, 1))
    results = run(replace(program, targets={**program.targets, "checksum": checksum}))
    if is_traced(results["checksum"]):  # a function of the caller has brought it in
        return run(program.guarded(in_trace=True))
    if returns_checksum:
        return results
    are_right = are_finite([results.pop("checksum")])
    wrong = [rows for rows, is_right in zip(ranges, are_right, strict=True) if not is_right]
    return _run_and_join(program.guarded(in_trace=False), results, wrong) if wrong else results


def run_groups(
    grid: ScoreGrid, compute: Callable[..., Array | None], groups: Sequence[Any], widths: int
) -> None:
    """Compute all groups of sequences of a call, each of which has a grid and a plan.

    On a device, those with a NaN or inf are computed a second time, guarded.
    """
    if grid.access.waits:
        checks = [(group, compute(group, returns_checksum=True)) for group in groups]
        doubtful = [(group, check) for group, check in checks if check is not None]
        flags = iter(are_finite([check for _, check in doubtful]) if doubtful else ())
        for group, check in doubtful:
            if False in [*islice(flags, check.shape[0])]:  # a list, so that all flags of the group are taken
                compute(group, is_guarded=True)
        return
    small = [group for group in groups if group.plan.threads == 1]
    work = sum(math.prod(group.grid.shape) for group in small) * widths
    has_threads = len(small) > 1 and takes_threads(grid, work)
    # Once for all groups, because a BLAS takes milliseconds to change its threads.
    with threads.one_blas_thread(grid.access.uses_our_threads and (has_threads or len(small) < len(groups))):
        for group in groups:
            if group.plan.threads != 1:
                compute(group)
        threads.run_tasks(compute, small, None if has_threads else 1)


def runs_at_once(plan: Plan, grid: ScoreGrid) -> bool:
    """Return whether a call is so small that the objects of a program would take as long as its work."""
    return plan.is_small and grid.access.is_writeable and not grid.is_reproducible


def joins(plan: Plan, grid: ScoreGrid) -> bool:
    """Return whether targets are joined from pieces, and not written to."""
    return plan.is_small or not grid.access.is_writeable


def _run_and_join(
    program: Program, known: Mapping[str, Array] | None = None, wrong: Collection[range] = ()
) -> dict[str, Array]:
    """Return the targets without writing to an array; each range of queries has all heads at once.

    With `known` targets, only the `wrong` ranges are computed.
    """
    plan, grid = program.plan, program.grid
    ranges = [*plan.row_ranges()]
    columns: list[range] = []  # not list[range](), which not every compiler traces
    if any("columns" in target.axes for target in program.targets.values()):
        keys = range(plan.keys)
        columns = [*plan.column_ranges(keys)] or [keys]  # or one piece of no element
    results = in_pieces(program, ranges, columns)
    autograd = None if grid.access.is_traced or grid.access.is_writeable else grid.library.autograd
    for rows in ranges:
        if known is not None and rows not in wrong:
            for name, result in results.items():
                result.put(rows, known[name][..., rows.start : rows.stop, :])
        elif autograd is not None and program.is_recomputed:
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
