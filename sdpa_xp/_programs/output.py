"""Attention tile by tile: memory grows with L + S, never with L * S.

A plan cuts the call into ranges of queries. Each reads the keys one tile after the other, with the online
softmax. A plan with one tile computes the textbook formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeAlias

from .._libraries import astype_if_needed, is_traced
from .._libraries.protocols import Array, Dtype
from .._run.executors import Program, run
from .._run.products import NonfiniteGuard, are_finite, key_leading_slice
from .._run.results import Results
from .._sources import KeyValueSource, PagedSource
from .._tiles import tuning
from .._tiles.plan import Plan
from .._tiles.tile import LeadingSlice, Target
from .scores import ResultName, Scores
from .softmax import RowResult, attend_with_fixed_shift, attend_with_running_shift, is_accurate

OfRows: TypeAlias = Callable[[Scores, KeyValueSource, Plan, range], RowResult]
"""Computes the attention of a range of queries."""


@dataclass(frozen=True, slots=True)
class OutputProgram(Program):
    """Attention, and what else follows from the sums over the keys of each query."""

    scores: Scores
    value: KeyValueSource
    of_rows: OfRows

    @property
    def is_recomputed(self) -> bool:
        return math.prod(self.grid.shape) > tuning.MOST_SCORES_KEPT

    def slice_leading(self, leading: LeadingSlice) -> Self:
        value = self.value.slice_leading(key_leading_slice(leading, self.scores.group))
        return replace(self, scores=self.scores.slice_leading(leading), value=value)

    def add_rows(self, results: Results, rows: range) -> None:
        computed = self.of_rows(self.scores, self.value, self.plan, rows)
        for name, result in results.items():
            if name == "checksum":
                result.add(self.scores.tile(rows, range(1)), computed.named(self.scores.xp, name))
            else:
                result.put(rows, computed.named(self.scores.xp, name))


@dataclass(frozen=True, slots=True)
class UnshiftedProgram(OutputProgram):
    """The same without the largest scores, until digits of some rows are lost: then no others are tried.

    As all rows are computed again then, the results do not depend on which of them fail first.
    """

    failed: list[range] = field(default_factory=list)
    """Rows whose digits are lost."""

    def add_rows(self, results: Results, rows: range) -> None:
        if self.failed:
            return
        out = results["output"].memory(rows)
        computed = attend_with_fixed_shift(self.scores, self.value, self.plan, rows, out)
        if not is_accurate(self.scores, self.value, self.plan, rows, computed):
            self.failed.append(rows)  # a thread that sees it too late only works in vain
            return
        for name, result in results.items():
            if name != "output" or computed.output is not out:
                result.put(rows, computed.named(self.scores.xp, name))


@dataclass(frozen=True, slots=True)
class RepairedProgram(OutputProgram):
    """Results that are there already, but for some ranges of queries."""

    known: Mapping[str, Array]
    wrong: Collection[range]

    def add_rows(self, results: Results, rows: range) -> None:
        if rows in self.wrong:
            OutputProgram.add_rows(self, results, rows)
            return
        for name, result in results.items():
            result.put(rows, self.known[name][..., rows.start : rows.stop, :])


def attend(
    scores: Scores,
    value: KeyValueSource,
    plan: Plan,
    dtype: Dtype,
    *names: ResultName,
    out: Array | None = None,
) -> dict[str, Array]:
    """Return what is named: the output in `dtype`, others in the accumulation dtype.

    Large calls on the CPU compute the output in `out`, if there is one: zeros of its shape and dtype. A device
    is waited for once, after the last range of queries. A caller that asks for the checksum waits instead: if
    it is returned and not finite, the call is made again with scores whose `finite_inputs` are empty.
    """
    if plan.patches is not None:
        return _attend_in_patches(scores, value, plan, dtype, *names)
    grid, shape = scores.grid, scores.grid.shape[:-1]
    # What lies behind the last token of a paged sequence may be NaN, which would cost a second pass.
    may_have_nan = grid.padding is not None and isinstance(value, PagedSource)
    guard: NonfiniteGuard = "columns" if may_have_nan else "none"
    readable = partial(attend_readable, guard=guard)
    if plan.is_small and grid.access.is_writeable and not grid.is_reproducible:
        computed = readable(scores, value, plan, range(plan.queries))  # a program would take as long again
        results: dict[str, Array] = {name: computed.named(scores.xp, name) for name in names}
        results["output"] = astype_if_needed(scores.xp, computed.output, dtype)
        return results
    targets = {"output": Target((*shape, value.width), ("rows", None), dtype=dtype)}
    widths = {"lse": 1, "lse_parts": 2}
    targets |= {name: Target((*shape, widths[name]), ("rows", None)) for name in names if name in widths}
    program = OutputProgram(scores, plan, targets, value, _guarded("columns"))
    if grid.access.is_traced:  # no value can be read, so all rows are computed in the same way
        return run(program)
    if not grid.access.is_writeable:
        return _attend_on_device(program, guard, returns_checksum="checksum" in names)
    if not plan.is_one_tile:
        scores = scores.for_tiles()
    program = replace(program, scores=scores, of_rows=readable)
    outs = {} if out is None else {"output": out}
    if grid.is_reproducible:
        from . import reproducible  # few programs need it

        plan = reproducible.aligned(scores, plan)
        return run(replace(program, plan=plan, of_rows=reproducible.attend_rows), outs)
    if plan.tries_without_maximum and not scores.options.has_functions and scores.options.sinks is None:
        attempt = UnshiftedProgram(scores, plan, targets, value, readable)
        outs = run(attempt, outs)
        if not attempt.failed:
            return outs
    return run(program, outs)


def _guarded(guard: NonfiniteGuard) -> OfRows:
    return partial(attend_with_running_shift, guard=guard)


def attend_readable(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, *, guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of one range of queries; if a NaN may be of a masked pair, computed again."""
    result = attend_with_running_shift(scores, value, plan, rows, guard=guard)
    if scores.are_right(*result.arrays):
        return result
    # A function of the caller may have brought in a traced array.
    guard = "columns" if is_traced(result.output) else "pairs"
    return attend_with_running_shift(scores, value, plan, rows, guard=guard)


def _attend_on_device(
    program: OutputProgram, guard: NonfiniteGuard, *, returns_checksum: bool
) -> dict[str, Array]:
    """Return the results of a device, which is asked once whether they are finite.

    It is not asked if no pair may be masked, or if the inputs have been searched for NaN and inf.
    """
    plan, options, finite = program.plan, program.scores.options, program.scores.options.finite_inputs
    if (
        program.grid.library.autograd is not None and program.is_recomputed
    ):  # all keys of some queries are in memory while their gradients are computed
        most = tuning.DEVICE.scores * plan.queries // math.prod(program.grid.shape)
        plan = replace(plan, rows=min(plan.rows, max(tuning.SMALLEST_SIDE, most)))
        program = replace(program, plan=plan)
    if finite is not None or not options.may_mask:
        is_guarded = finite is not None and "value" not in finite
        return run(replace(program, of_rows=_guarded("pairs" if is_guarded else guard)))
    ranges = [*plan.row_ranges()]
    checks = Target((len(ranges), 1), ("rows", None), block=(plan.rows, 1))
    results = run(replace(program, targets={**program.targets, "checksum": checks}, of_rows=_guarded(guard)))
    if is_traced(results["checksum"]):  # a function of the caller has brought it in
        return run(program)
    if returns_checksum:
        return results
    are_right = are_finite([results.pop("checksum")])
    wrong = [rows for rows, is_right in zip(ranges, are_right, strict=True) if not is_right]
    fields = program.scores, plan, program.targets, program.value, _guarded("pairs")
    return run(RepairedProgram(*fields, results, wrong)) if wrong else results


def _attend_in_patches(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, *names: ResultName
) -> dict[str, Array]:
    """Return what `attend` returns, of blocks of queries that each read a list of keys."""
    from .patches import in_patches  # few programs need it

    call = in_patches(scores, value, plan)
    # Without an array to write to, a call has all heads at once.
    parts = [call] if scores.grid.access.is_writeable else map(call.slice_leading, call.plan.leading_slices)
    computed = [attend(part.scores, part.value, part.plan, dtype, *names) for part in parts]
    return {name: call.in_order([results[name] for results in computed]) for name in names}
