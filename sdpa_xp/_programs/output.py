"""Attention tile by tile: memory grows with L + S, never with L * S.

A plan cuts the call into ranges of queries. Each reads the keys one tile after the other, with the online
softmax. A plan with one tile computes the textbook formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from .._libraries import is_traced
from .._libraries.protocols import Array, Dtype
from .._run.executors import Sums, run
from .._run.products import NonfiniteGuard, are_finite, checksum, is_finite, key_leading_slice
from .._sources.arrays import KeyValueSource, PagedSource
from .._tiles.plan import Plan
from .._tiles.tile import LeadingSlice, Target
from .scores import Name, Scores
from .softmax import RowResult, attend_with_fixed_shift, attend_with_running_shift, is_accurate
from .tile_program import TileProgram

Results: TypeAlias = dict[str, Array]
OfRows: TypeAlias = Callable[[Scores, KeyValueSource, Plan, range, Array | None], RowResult | None]
"""Computes the attention of a range of queries. Its output may be in an array of zeros, the last argument.
None is no result: then all ranges are computed again in another way."""


@dataclass(frozen=True, slots=True)
class OutputProgram(TileProgram):
    """Attention, and what else follows from the sums over the keys of each query."""

    value: KeyValueSource
    of_rows: OfRows

    def slice_leading(self, leading: LeadingSlice) -> OutputProgram:
        value = self.value.slice_leading(key_leading_slice(leading, self.scores.group))
        scores = self.scores.slice_leading(leading)
        return OutputProgram(scores, self.plan, self.targets, value, self.of_rows)  # `replace` takes longer

    def add_rows(self, sums: Sums, rows: range, _: Array | None) -> None:
        xp, out = self.scores.xp, sums["output"].memory(rows)
        result = self.of_rows(self.scores, self.value, self.plan, rows, out)
        if result is None:
            return
        if result.output is not out:
            sums["output"].put(rows, result.output)
        if "lse" in sums:
            sums["lse"].put(rows, result.lse(xp))
        if "lse_parts" in sums:
            sums["lse_parts"].put(rows, result.lse_parts(xp))
        if "checksum" in sums:
            check = xp.reshape(checksum(xp, result.arrays), (1, 1))
            sums["checksum"].add(self.scores.tile(rows, range(1)), check)


def attend(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, *names: Name, out: Array | None = None
) -> Results:
    """Return what is named: the output in `dtype`, others in the accumulation dtype.

    Where arrays can be written to, the output may be in `out`, zeros of its shape and dtype. A device is waited
    for once, after the last range of queries; it is not if the caller asks for the checksum, and passes scores
    whose `finite_inputs` are empty if that is not finite. There is none if it would show nothing.
    """
    if plan.patches is not None:
        return _attend_in_patches(scores, value, plan, dtype, *names)
    grid, shape = scores.grid, scores.grid.shape[:-1]
    if grid.is_writeable and not plan.is_one_tile:
        scores = scores.for_tiles()
    targets: dict[str, Target] = {}
    for name in names:
        if name == "output":
            targets[name] = Target((*shape, value.width), ("rows", None), dtype=dtype)
        elif name != "checksum":
            targets[name] = Target((*shape, 2 if name == "lse_parts" else 1), ("rows", None))
    program = OutputProgram(scores, plan, targets, value, _guarded("columns"))
    if grid.is_traced:  # no value can be read, so all rows are computed in the same way
        return run(program)
    # What lies behind the last token of a paged sequence may be NaN, which would cost a second pass.
    may_have_nan = grid.padding is not None and isinstance(value, PagedSource)
    guard: NonfiniteGuard = "columns" if may_have_nan else "none"
    if not grid.is_writeable:
        return _attend_on_device(program, guard, returns_checksum="checksum" in names)
    outs = {} if out is None else {"output": out}
    if grid.is_reproducible:
        from . import reproducible  # few programs need it

        tasks = tuple(reproducible.aligned_tasks(scores, plan))
        return run(
            replace(program, plan=replace(plan, own_tasks=tasks), of_rows=reproducible.attend_rows), outs
        )
    if plan.tries_without_maximum and not scores.options.has_functions and scores.options.sinks is None:
        attempt = AttendWithoutMaximum()
        outs = run(replace(program, of_rows=attempt), outs)
        if not attempt.has_failed:
            return outs
    return run(replace(program, of_rows=partial(attend_readable, guard=guard)), outs)


def _guarded(guard: NonfiniteGuard) -> OfRows:
    return partial(attend_with_running_shift, guard=guard)


class AttendWithoutMaximum:
    """The softmax without a maximum, until it loses digits of some rows: then no others are tried.

    As all rows are computed again then, the result does not depend on which of them fail first.
    """

    def __init__(self) -> None:
        self.has_failed = False

    def __call__(
        self, scores: Scores, value: KeyValueSource, plan: Plan, rows: range, out: Array | None
    ) -> RowResult | None:
        if self.has_failed:
            return None
        result = attend_with_fixed_shift(scores, value, plan, rows, out)
        if is_accurate(scores, value, plan, rows, result):
            return result
        self.has_failed = True  # never set back, so that a thread which still reads False only works in vain
        return None


def attend_readable(
    scores: Scores,
    value: KeyValueSource,
    plan: Plan,
    rows: range,
    _: Array | None = None,
    *,
    guard: NonfiniteGuard,
) -> RowResult:
    """Return the attention of one range of queries; if a NaN may be of a masked pair, computed again."""
    guarded = partial(attend_with_running_shift, scores, value, plan, rows)
    result = guarded(guard=guard)
    if not scores.options.may_mask:  # without a mask, each NaN and inf belongs to the output
        return result
    if is_traced(result.output):  # a function of the caller has brought in a traced array
        return guarded(guard="columns")
    # See products.py: only if a value is NaN or inf, the rows are worth a second pass.
    return result if is_finite(scores.xp, result.arrays) else guarded(guard="pairs")


def _attend_on_device(program: OutputProgram, guard: NonfiniteGuard, *, returns_checksum: bool) -> Results:
    """Return the results of a device, which is asked once whether they are finite.

    It is not asked if no pair may be masked, or if the inputs have been searched for NaN and inf.
    """
    options = program.scores.options
    finite = options.finite_inputs
    if finite is not None or not options.may_mask:
        is_guarded = finite is not None and "value" not in finite
        return run(replace(program, of_rows=_guarded("pairs" if is_guarded else guard)))
    plan = program.plan
    ranges = len([*plan.row_ranges()])
    targets = {**program.targets, "checksum": Target((ranges, 1), ("rows", None), block=(plan.rows, 1))}
    results = run(replace(program, targets=targets, of_rows=_guarded(guard)))
    check = results["checksum"]
    if is_traced(check):  # a function of the caller has brought it in
        return run(program)
    if returns_checksum:
        return results
    del results["checksum"]
    return results if all(are_finite([check])) else run(replace(program, of_rows=_guarded("pairs")))


def _attend_in_patches(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, *names: Name
) -> Results:
    """Return what `attend` returns, of blocks of queries that each read a list of keys."""
    from .patches import in_patches  # few programs need it

    call = in_patches(scores, value, plan)
    # Without an array to write to, a call has all heads at once.
    parts = [call] if scores.grid.is_writeable else map(call.slice_leading, call.plan.leading_slices)
    computed = [attend(part.scores, part.value, part.plan, dtype, *names) for part in parts]
    return {name: call.in_order([results[name] for results in computed]) for name in names}
