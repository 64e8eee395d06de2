"""Attention tile by tile: memory grows with L + S, never with L * S.

A plan cuts the call into ranges of queries. Each reads the keys one tile after the other, with the online
softmax. A plan with one tile computes the textbook formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

from .._libraries import astype_if_needed
from .._libraries.protocols import Array, Dtype
from .._run.executors import run_repaired, runs_at_once
from .._run.products import NonfiniteGuard, key_leading_slice
from .._run.program import Program, Results
from .._sources import KeyValueSource, PagedSource
from .._tiles import tuning
from .._tiles.plan import Plan
from .._tiles.tile import LeadingSlice, Target
from .scores import ResultName, Scores
from .softmax import RowResult, attend_with_fixed_shift, attend_with_running_shift, is_accurate

OfRows: TypeAlias = Callable[..., RowResult]
"""Computes the attention of a range of queries, as `attend_with_running_shift` does."""


@dataclass(frozen=True, slots=True)
class OutputProgram(Program):
    """Attention, and what else follows from the sums over the keys of each query."""

    scores: Scores
    value: KeyValueSource
    guard: NonfiniteGuard = "none"
    of_rows: OfRows = attend_with_running_shift

    @property
    def is_recomputed(self) -> bool:
        return math.prod(self.grid.shape) > tuning.MOST_SCORES_KEPT

    def slice_leading(self, leading: LeadingSlice) -> Self:
        value = self.value.slice_leading(key_leading_slice(leading, self.scores.group))
        return replace(self, scores=self.scores.slice_leading(leading), value=value)

    def add_rows(self, results: Results, rows: range) -> None:
        computed = self.of_rows(self.scores, self.value, self.plan, rows, guard=self.guard)
        for name, result in results.items():
            if name == "checksum":
                result.add(self.scores.tile(rows, range(1)), computed.named(self.scores.xp, name))
            else:
                result.put(rows, computed.named(self.scores.xp, name))

    def guarded(self, *, in_trace: bool) -> Self:
        return replace(self, guard="columns" if in_trace else "pairs")

    def known_right(self) -> Self | None:
        finite = self.scores.options.finite_inputs
        if finite is not None and "value" not in finite:
            return self.guarded(in_trace=False)
        return None if finite is None and self.scores.options.may_mask else self

    def attempts(self) -> Iterator[Program]:
        scores = self.scores if self.plan.is_one_tile else self.scores.for_tiles()
        if self.grid.is_reproducible:
            from . import reproducible  # few programs need it

            plan = reproducible.aligned(scores, self.plan)
            yield replace(self, scores=scores, plan=plan, of_rows=reproducible.attend_rows)
            return
        options = scores.options
        if self.plan.tries_without_maximum and not options.has_functions and options.sinks is None:
            unshifted = UnshiftedProgram(scores, self.plan, self.targets, self.value)
            yield unshifted
            if not unshifted.failed:
                return
        yield replace(self, scores=scores, of_rows=attend_readable)


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
        from .patches import in_patches  # few programs need it

        call = in_patches(scores, value, plan)
        of_blocks = attend(call.scores, call.value, call.plan, dtype, *names)
        return {name: call.in_order(array) for name, array in of_blocks.items()}
    grid, shape = scores.grid, scores.grid.shape[:-1]
    # What lies behind the last token of a paged sequence may be NaN, which would cost a second pass.
    may_have_nan = grid.padding is not None and isinstance(value, PagedSource)
    guard: NonfiniteGuard = "columns" if may_have_nan else "none"
    if runs_at_once(plan, grid):
        computed = attend_readable(scores, value, plan, range(plan.queries), guard=guard)
        results: dict[str, Array] = {name: computed.named(scores.xp, name) for name in names}
        results["output"] = astype_if_needed(scores.xp, computed.output, dtype)
        return results
    targets = {"output": Target((*shape, value.width), ("rows", None), dtype=dtype)}
    widths = {"lse": 1, "lse_parts": 2}
    targets |= {name: Target((*shape, widths[name]), ("rows", None)) for name in names if name in widths}
    program = OutputProgram(scores, plan, targets, value, guard)
    return run_repaired(program, {} if out is None else {"output": out}, returns_checksum="checksum" in names)


def attend_readable(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, /, *, guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of one range of queries; if a NaN may be of a masked pair, computed again."""
    result = attend_with_running_shift(scores, value, plan, rows, guard=guard)
    are_right = scores.are_right(*result.arrays)
    if are_right:
        return result
    # A function of the caller may have brought in a traced array.
    guard = "columns" if are_right is None else "pairs"
    return attend_with_running_shift(scores, value, plan, rows, guard=guard)
