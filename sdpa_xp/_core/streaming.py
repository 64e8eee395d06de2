"""Attention tile by tile: memory grows with L + S, never with L * S.

A plan cuts the call into tasks. Each task is a range of queries, and reads the keys one tile after the other
with the online softmax. A plan with one tile computes the textbook formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

from .._libraries import astype_if_needed, computing, is_traced
from .._libraries.protocols import Array, Dtype, Namespace
from .._tiles.plan import DEVICE, MOST_SCORES_KEPT, SMALLEST_SIDE, Plan, Task
from .._tiles.tile import LeadingSlice
from . import threads
from .products import (
    KeyValueSource,
    NonfiniteGuard,
    PagedSource,
    are_finite,
    call_buffers,
    checksum,
    is_finite,
    key_leading_slice,
)
from .scores import Scores
from .softmax import RowResult, attend_with_fixed_shift, attend_with_running_shift, is_accurate

OfRows: TypeAlias = Callable[[RowResult], Array]
"""What is returned beside the output of some rows: log-sum-exp, (..., Hq, rows, 1 or 2)."""


def attend(
    scores: Scores,
    value: KeyValueSource,
    plan: Plan,
    dtype: Dtype,
    *,
    with_lse: bool = True,
    in_parts: bool = False,
    out: Array | None = None,
    checksums: list[Array] | None = None,
) -> tuple[Array, Array | None]:
    """Return output (..., Hq, L, Ev) in `dtype`, and log-sum-exp (..., Hq, L, 1) in the accumulation dtype.

    With `in_parts` the log-sum-exp is (..., Hq, L, 2), as in `RowResult.lse_parts`. With tasks, the output is
    written to `out`, which holds zeros of the output's shape and dtype. A device does not read `checksums` but
    adds to them: if one is NaN or inf, the caller passes `scores` without `finite_inputs` once more.
    """
    if plan.patches is not None:
        return _attend_in_patches(scores, value, plan, dtype, with_lse=with_lse, in_parts=in_parts)
    of_rows: OfRows | None = None
    if with_lse:
        of_rows = partial(RowResult.lse_parts if in_parts else RowResult.lse, xp=scores.xp)
    if plan.is_loop:
        return _attend_in_loops(scores, value, plan, dtype, of_rows)
    is_small = plan.is_one_tile and not (plan.tries_without_maximum or scores.grid.is_reproducible)
    if is_small or not scores.grid.is_writeable:
        return _attend_and_join(scores, value, plan, dtype, of_rows, checksums)
    xp, grid, shape = scores.xp, scores.grid, scores.grid.shape[:-1]
    if out is None:
        out = xp.zeros((*shape, value.width), dtype=dtype, device=grid.device)
    lse = xp.zeros((*shape, 1 + in_parts), dtype=grid.dtype, device=grid.device) if of_rows else None
    # A function may keep the scores that it gets: no buffer holds them.
    if scores.options.has_functions:
        _attend_in_tasks(scores, value, plan, out, lse, of_rows)
        return out, lse
    with call_buffers(grid) as buffers:
        _attend_in_tasks(scores._replace(buffers=buffers), value, plan, out, lse, of_rows)
    return out, lse


def _attend_in_patches(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, *, with_lse: bool, in_parts: bool
) -> tuple[Array, Array | None]:
    """Return what `attend` returns, of blocks of queries that each read a list of keys."""
    from .patches import in_patches  # few programs need what is imported in functions here

    call = in_patches(scores, value, plan)
    # Without an array to write to, a call has all heads at once.
    parts = [call] if scores.grid.is_writeable else map(call.slice_leading, call.plan.leading_slices)
    computed = [
        attend(part.scores, part.value, part.plan, dtype, with_lse=with_lse, in_parts=in_parts)
        for part in parts
    ]
    outputs, lses = zip(*computed, strict=True)
    return call.in_order(outputs), call.in_order(lses) if with_lse else None


def _attend_and_join(
    scores: Scores,
    value: KeyValueSource,
    plan: Plan,
    dtype: Dtype,
    of_rows: OfRows | None,
    checksums: list[Array] | None,
) -> tuple[Array, Array | None]:
    """Return what `attend` returns, without writing to an array: with autograd, on devices, in lazy libraries.

    In these cases each range of queries has all heads, so that results are joined along the rows.
    """
    xp = scores.xp
    if scores.grid.is_traced or scores.grid.is_writeable:
        results = [attend_rows(scores, value, plan, rows) for rows in plan.row_ranges()]
    else:
        results = _attend_on_device(scores, value, plan, checksums)
    outputs = [astype_if_needed(xp, result.output, dtype) for result in results]
    return _joined(xp, outputs, [of_rows(result) for result in results] if of_rows else [])


def _joined(xp: Namespace, outputs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array | None]:
    """Join the results of ranges of queries along the rows; without `lses` there is no log-sum-exp."""
    if len(outputs) == 1:
        return outputs[0], lses[0] if lses else None
    return xp.concat(outputs, axis=-2), xp.concat(lses, axis=-2) if lses else None


def _attend_on_device(
    scores: Scores, value: KeyValueSource, plan: Plan, checksums: list[Array] | None
) -> list[RowResult]:
    """Return the attention of each range of queries. The device is waited for once, after the last of them.

    It is not waited for if no pair may be masked, if the inputs have been searched for NaN and inf, or if the
    caller reads `checksums`.
    """
    recomputed = _recomputed(scores)
    if recomputed is not None:  # all keys of these queries are in memory while their gradients are computed
        most = DEVICE.scores // (math.prod(scores.leading_shape) * max(1, plan.keys))
        plan = replace(plan, rows=min(plan.rows, max(SMALLEST_SIDE, most)))
    xp, row_ranges, finite = scores.xp, [*plan.row_ranges()], scores.options.finite_inputs

    def guarded(rows: range, guard: NonfiniteGuard) -> RowResult:
        def compute() -> RowResult:
            return attend_with_running_shift(scores, scores.scaled_query(rows), value, plan, rows, guard)

        return compute() if recomputed is None else recomputed(compute)

    guard = _first_guard(scores, value) if finite is None or "value" in finite else "pairs"
    results = [guarded(rows, guard) for rows in row_ranges]
    if finite is not None or not scores.options.may_mask:
        return results
    if any(is_traced(result.output) for result in results):  # a function of the caller has brought it in
        return [guarded(rows, "columns") for rows in row_ranges]
    sums = [xp.reshape(checksum(xp, result.arrays), (1,)) for result in results]
    if checksums is not None:
        checksums += sums
        return results
    return [
        result if is_right else guarded(rows, "pairs")
        for rows, result, is_right in zip(row_ranges, results, are_finite(sums), strict=True)
    ]


def _recomputed(scores: Scores) -> Callable[[Callable[[], RowResult]], RowResult] | None:
    """Return what lets a library that records a range of queries compute it again for its gradients."""
    autograd = scores.grid.library.autograd
    if autograd is None or math.prod(scores.grid.shape) <= MOST_SCORES_KEPT:
        return None
    # The arrays of a caller's function may need gradients, too; so all that the library records is asked about.
    return autograd.recomputed


def _attend_in_tasks(
    scores: Scores, value: KeyValueSource, plan: Plan, output: Array, lse: Array | None, of_rows: OfRows | None
) -> None:
    """Write output and log-sum-exp; threads take one task after the other.

    The softmax without a maximum is tried until a task fails. Then the tasks that it has computed are computed
    again, so that the result does not depend on which task fails first.
    """
    xp, grid = scores.xp, scores.grid
    scores = scores.for_tiles()
    scores = scores._replace(known_tiles={} if scores.options.mask.is_shared else None)
    has_buffers = scores.buffers is not None and not grid.is_traced
    tries = plan.tries_without_maximum and not grid.is_reproducible
    shortcut = _Shortcut(tries and has_buffers and scores.options.sinks is None)
    attend_task, tasks = attend_rows, plan.tasks
    if grid.is_reproducible:
        from . import reproducible

        attend_task, tasks = reproducible.attend_rows, partial(reproducible.aligned_tasks, scores, plan)

    @cache  # two threads may compute equal parts at once, of which one is kept
    def part_of(leading: LeadingSlice | None) -> tuple[Scores, KeyValueSource, tuple[object, ...]]:
        """Return some batch entries and heads of a call, and where their results lie in (..., Hq)."""
        if leading is None:
            return scores, value, (...,)
        values = value.slice_leading(key_leading_slice(leading, scores.group))
        return scores.slice_leading(leading), values, tuple([slice(r.start, r.stop) for r in leading])

    def write(task: Task) -> None:
        rows = slice(task.rows.start, task.rows.stop)
        with computing(scores.query):  # here too: a library may keep this setting for each thread
            part, values, leading = part_of(task.leading)
            index = *leading, rows, slice(None)
            # A half output is rounded once, at the end, and cannot hold the sums.
            out = output[index] if shortcut.is_open and output.dtype == grid.dtype else None
            result = shortcut.attend(part, values, plan, task, out) if shortcut.is_open else None
            if result is None:
                result = attend_task(part, values, task.plan, task.rows)
            if result.output is not out:
                output[index] = astype_if_needed(xp, result.output, output.dtype)
            if lse is not None and of_rows is not None:
                lse[index] = of_rows(result)

    threads.run(write, tasks(), plan.threads)
    if not shortcut.is_open and shortcut.tasks:
        threads.run(write, shortcut.tasks, plan.threads)


class _Shortcut:
    """The softmax without a maximum, which the tasks of a call try until one has failed."""

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.tasks: list[Task] = []
        """The tasks whose results it gave."""

    def attend(
        self, scores: Scores, value: KeyValueSource, plan: Plan, task: Task, out: Array | None
    ) -> RowResult | None:
        """Return the attention of a task, or None if digits are lost. It may be in `out`, which is zeros."""
        query, rows = scores.scaled_query(task.rows), task.rows
        result = attend_with_fixed_shift(scores, query, value, plan, rows, out)
        if is_accurate(scores, value, plan, task.rows, result):
            # No lock: `append` is one step of the list, and each task is appended once.
            self.tasks.append(task)
            return result
        self.is_open = False  # never set back, so that a thread which still reads True only works in vain
        return None


def _first_guard(scores: Scores, value: KeyValueSource) -> NonfiniteGuard:
    """Return the guard before it is known whether the output is finite."""
    # What lies behind the last token of a paged sequence may be NaN, which would cost a second pass.
    return "columns" if scores.grid.padding is not None and isinstance(value, PagedSource) else "none"


def attend_rows(scores: Scores, value: KeyValueSource, plan: Plan, rows: range) -> RowResult:
    """Return the attention of one range of queries."""
    is_traced_call = scores.grid.is_traced
    guarded = partial(attend_with_running_shift, scores, scores.scaled_query(rows), value, plan, rows)
    # No value of a traced call can be read, so all rows are computed in the same way.
    result = guarded("columns" if is_traced_call else _first_guard(scores, value))
    if is_traced_call or not scores.options.may_mask:  # without a mask, each NaN and inf belongs to the output
        return result
    if is_traced(result.output):  # a function of the caller has brought in a traced array
        return guarded("columns")
    # A NaN or inf may come from a masked pair (see products.py): only then the rows are worth a second pass.
    return result if is_finite(scores.xp, result.arrays) else guarded("pairs")


def _attend_in_loops(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, of_rows: OfRows | None
) -> tuple[Array, Array | None]:
    """Return what `attend` returns, computed in loops over blocks of queries that the compiler keeps."""
    from .compiled_loops import compute_band, row_bands

    def attend_band(band: range) -> list[Array]:
        def compute(block: Scores, _: Array | None) -> tuple[tuple[()], list[Array]]:
            result = attend_with_running_shift(block, block.scaled_query(band), value, plan, band, "columns")
            output = astype_if_needed(scores.xp, result.output, dtype)
            return (), [output, *([of_rows(result)] if of_rows else [])]

        return compute_band(scores, plan, band, compute)[1]

    outputs, *lses = zip(*map(attend_band, row_bands(scores, plan)), strict=True)
    return _joined(scores.xp, outputs, lses[0] if lses else ())
