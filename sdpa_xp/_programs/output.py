"""Attention tile by tile: memory grows with L + S, never with L * S.

A plan cuts the call into ranges of queries. Each reads the keys one tile after the other, with the online
softmax. A plan with one tile computes the textbook formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

from .._libraries import astype_if_needed
from .._libraries.protocols import Array, Dtype
from .._run import NonfiniteGuard, are_finite, key_leading_slice
from .._run.executors import joins, run, run_repaired, runs_at_once
from .._run.program import Repairable, Results
from .._sources import PagedSource
from .._tiles import KeyValueSource, LeadingSlice, Target, tuning
from .._tiles.plan import Plan, plan_recomputed
from . import ResultName, Scores
from .softmax import RowResult, attend_with_fixed_shift, attend_with_running_shift, is_accurate

OfRows: TypeAlias = Callable[[Scores, KeyValueSource, Plan, range, NonfiniteGuard], RowResult]
"""Computes the attention of a range of queries."""


@dataclass(frozen=True, slots=True)
class OutputProgram(Repairable):
    """Attention, and what else follows from the sums over the keys of each query."""

    scores: Scores
    value: KeyValueSource
    guard: NonfiniteGuard
    of_rows: OfRows = attend_with_running_shift

    @property
    def is_recomputed(self) -> bool:
        return math.prod(self.grid.shape) > tuning.MOST_SCORES_KEPT

    def slice_leading(self, leading: LeadingSlice) -> Self:
        value = self.value.slice_leading(key_leading_slice(leading, self.scores.group))
        return replace(self, scores=self.scores.slice_leading(leading), value=value)

    def add_rows(self, results: Results, rows: range) -> None:
        computed = self.of_rows(self.scores, self.value, self.plan, rows, self.guard)
        for name, result in results.items():
            if name == "checksum":
                result.add(self.scores.tile(rows, range(1)), computed.named(self.scores.xp, name))
            else:
                result.put(rows, computed.named(self.scores.xp, name))

    def at_once(self) -> dict[str, Array]:
        """Return the targets of a small call: an executor would take as long again."""
        xp, rows = self.scores.xp, range(self.plan.queries)
        computed = self.of_rows(self.scores, self.value, self.plan, rows, self.guard)
        dtype = self.targets["output"].dtype
        results = {name: computed.named(xp, name) for name in self.targets}
        return results | {"output": astype_if_needed(xp, computed.output, dtype)}

    def guarded(self) -> Self:
        return replace(self, guard="columns")

    def trusted(self, *, reads_ranges: bool) -> Self | None:
        if reads_ranges:
            scores = self.scores if self.plan.is_one_tile else self.scores.for_tiles()
            if not self.grid.is_reproducible:
                return replace(self, scores=scores, of_rows=attend_readable)
            from . import reproducible  # few programs need it

            plan = reproducible.aligned(scores, self.plan)
            return replace(self, scores=scores, plan=plan, of_rows=reproducible.attend_rows)
        finite = self.scores.options.finite_inputs
        if "checksum" in self.targets:  # who asks for it looks at it
            return self
        if finite is None:
            return None if self.scores.options.may_mask else self
        return self if "value" in finite else replace(self, guard="pairs")

    def with_checksum(self) -> Self:
        ranges = [*self.plan.row_ranges()]
        checks = Target((len(ranges), 1), ("rows", None), block=(self.plan.rows, 1))
        return replace(self, targets={**self.targets, "checksum": checks})

    def repaired(self, results: dict[str, Array]) -> OutputProgram | None:
        are_right = are_finite([results.pop("checksum")])
        if are_right is None:
            return self.guarded()
        wrong = [rows for rows, right in zip(self.plan.row_ranges(), are_right, strict=True) if not right]
        if not wrong:
            return None
        return RepairedProgram(
            self.scores, self.plan, self.targets, self.value, "pairs", known=results, wrong=wrong
        )


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

    known: Mapping[str, Array] = field(default_factory=dict)
    wrong: Collection[range] = ()

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
    targets = {"output": Target((*shape, value.width), ("rows", None), dtype=dtype)}
    widths = {"lse": 1, "lse_parts": 2}
    targets |= {name: Target((*shape, widths[name]), ("rows", None)) for name in names if name in widths}
    program = OutputProgram(scores, plan_recomputed(plan, grid), targets, value, guard)
    if runs_at_once(plan, grid):
        return replace(program, of_rows=attend_readable).at_once()
    outs = {} if out is None else {"output": out}
    may_try = not (grid.is_reproducible or scores.options.has_functions or scores.options.sinks is not None)
    if plan.tries_without_maximum and may_try:
        attempt = UnshiftedProgram(scores.for_tiles(), plan, targets, value, guard)
        outs = run(attempt, outs)
        if not attempt.failed:
            return outs
    if "checksum" in names and program.trusted(reads_ranges=False) is None:
        program = program.with_checksum()
    return run_repaired(program, outs)


def attend_readable(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of one range of queries; if a NaN may be of a masked pair, computed again."""
    result = attend_with_running_shift(scores, value, plan, rows, guard)
    if is_right := scores.are_right(*result.arrays):
        return result
    return attend_with_running_shift(scores, value, plan, rows, "columns" if is_right is None else "pairs")


def _attend_in_patches(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, *names: ResultName
) -> dict[str, Array]:
    """Return what `attend` returns, of blocks of queries that each read a list of keys."""
    from .patches import in_patches  # few programs need it

    call = in_patches(scores, value, plan)
    # A call whose results are joined has all heads at once.
    slices = call.plan.leading_slices if joins(call.plan, scores.grid) else ()
    parts = map(call.slice_leading, slices) if slices else [call]
    computed = [attend(part.scores, part.value, part.plan, dtype, *names) for part in parts]
    return {name: call.in_order([results[name] for results in computed]) for name in names}
