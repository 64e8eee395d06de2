"""The sums of gradients over the tiles of a call: in threads, in loops of a compiler, or at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Literal, NamedTuple, TypeAlias

from .._libraries import computing, is_traced
from .._libraries.protocols import TRACED, Access, Array, Namespace, Shape
from .._tiles.plan import Plan, plan_tiles
from .._tiles.tile import GradientTarget, LeadingSlice, slice_leading
from . import threads
from .compiled_loops import compute_band, row_bands
from .gradient_sums import GradientAccumulator, between_zeros
from .products import KeyValueSource, call_buffers, is_finite, key_leading_slice
from .scores import Scores

GradientGuard: TypeAlias = Literal["none", "cotangent", "all"]
"""Whose NaN and inf are kept out of the products where a pair may not attend: those of no array, of the
cotangent, or of the inputs too."""


Accumulators: TypeAlias = Mapping[str, GradientAccumulator]


class Forward(NamedTuple):
    """A call and its output: all that the gradients are computed from."""

    scores: Scores
    value: KeyValueSource
    output: Array
    """(..., Hq, L, Ev), in the accumulation dtype."""
    lse: Array
    """Two numbers that add up to the log-sum-exp, (..., Hq, L, 2): m and log l, or others."""
    targets: Mapping[str, GradientTarget]
    """The arrays whose gradients are computed, by name."""
    bias_names: tuple[str | None, ...]
    """The name in `targets` of the array of each bias, or None."""
    plan: Plan

    def slice_leading(self, leading: LeadingSlice | None) -> Forward:
        """Return the part of some batch entries and heads."""
        if leading is None:
            return self
        return self._replace(
            scores=self.scores.slice_leading(leading),
            value=self.value.slice_leading(key_leading_slice(leading, self.scores.group)),
            output=slice_leading(self.output, leading),
            lse=slice_leading(self.lse, leading),
            targets={name: target.slice_leading(leading) for name, target in self.targets.items()},
        )

    def only(self, names: Collection[str]) -> Forward:
        """Return the same call for the gradients of some of its arrays."""
        targets = {name: target for name, target in self.targets.items() if name in names}
        bias_names = tuple([name if name in targets else None for name in self.bias_names])
        return self._replace(targets=targets, bias_names=bias_names)

    def with_access(self, access: Access) -> Forward:
        """Return the same call, cut as a call of arrays that allow this."""
        grid, source = replace(self.scores.grid, access=access), self.scores.key
        plan = plan_tiles(grid, self.scores.group, source.width + self.value.width)
        return self._replace(scores=self.scores._replace(grid=grid), plan=plan)


AddRows: TypeAlias = Callable[[Accumulators, Forward, Sequence[Array], range, GradientGuard], None]
"""What adds the contributions of a range of queries: to which sums, of which call, from their cotangents."""


def guarded_if_nonfinite(forward: Forward, cotangents: Sequence[Array], add_rows: AddRows) -> dict[str, Array]:
    """Return the sums over the tiles, computed a second time with the guard "all" if they are not finite."""
    computed = sum_over_tiles(forward, cotangents, "none", add_rows)
    arrays = [*computed.values()]
    is_known = not any(map(is_traced, arrays))
    if not forward.scores.options.may_mask or (is_known and is_finite(forward.scores.xp, arrays)):
        return computed
    return sum_over_tiles(forward, cotangents, "all", add_rows)


def sum_over_tiles(
    forward: Forward, cotangents: Sequence[Array], guard: GradientGuard, add_rows: AddRows
) -> dict[str, Array]:
    """Return for each target the sum of what `add_rows` adds.

    If arrays can be written to, compute the leading slices of the plan one by one, in threads.
    """
    # The sums over queries need common borders.
    forward = forward._replace(plan=forward.plan.with_common_borders())
    scores = forward.scores
    if not scores.grid.is_writeable:
        columns = forward.plan.column_ranges(range(forward.plan.keys))
        accumulators = _accumulators(forward, forward.plan.row_ranges(), columns)
        _add_ranges(accumulators, forward, cotangents, forward.plan.row_ranges(), guard, add_rows)
        return {name: accumulator.array() for name, accumulator in accumulators.items()}
    if scores.options.needs_products:
        return _sum_in_tasks(forward, cotangents, guard, add_rows)
    with call_buffers(scores.grid) as buffers:
        forward = forward._replace(scores=scores._replace(buffers=buffers))
        return _sum_in_tasks(forward, cotangents, guard, add_rows)


def _sum_in_tasks(
    forward: Forward, cotangents: Sequence[Array], guard: GradientGuard, add_rows: AddRows
) -> dict[str, Array]:
    """Return the sums; threads take one share of the queries of some leading slices after the other."""
    plan, grid, targets = forward.plan, forward.scores.grid, forward.targets

    def zeros(target: GradientTarget) -> Array:
        return grid.xp.zeros(target.shape, dtype=grid.dtype, device=grid.device)

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
        with computing(cotangents[0]):  # here too: a library may keep this setting for each thread
            for leading in slices:
                part = forward.slice_leading(leading)
                parts = [x if leading is None else slice_leading(x, leading) for x in cotangents]
                aside = kept[leading, share] = {
                    name: zeros(target)
                    for name, target in part.targets.items()
                    if name in small or (share > 0 and target.axes[0] != "rows")
                }
                outs = {name: sums[name][target.slices(leading)] for name, target in targets.items()} | aside
                accumulators = _accumulators(part, (), (), outs)
                _add_ranges(accumulators, part, parts, shares[share], guard, add_rows)

    threads.run(compute, [(x, n) for x in groups for n in range(len(shares))], plan.threads)
    for leading in plan.leading_slices or (None,):
        for share in range(len(shares)):
            for name, gradient in kept[leading, share].items():
                sums[name][targets[name].slices(leading)] += gradient
    return sums


def sum_traced(forward: Forward, cotangents: Sequence[Array], add_rows: AddRows) -> dict[str, Array]:
    """Return the sums of a call whose values cannot be read: guarded, and in loops if it is long."""
    forward = forward.with_access(TRACED)
    if not forward.plan.is_loop:
        return sum_over_tiles(forward, cotangents, "all", add_rows)
    bands = [_sum_of_band(forward, cotangents, add_rows, x) for x in row_bands(forward.scores, forward.plan)]
    join = partial(forward.scores.xp.concat, axis=-2)
    return {
        name: (join if target.axes[0] == "rows" else partial(reduce, add))([band[name] for band in bands])
        for name, target in forward.targets.items()
    }


def _sum_of_band(
    forward: Forward, cotangents: Sequence[Array], add_rows: AddRows, band: range
) -> dict[str, Array]:
    """Return the sums over a band of queries, or its rows of what has a row for each query."""
    scores, targets, xp = forward.scores, forward.targets, forward.scores.xp
    columns = scores.key_range(band) or range(0)  # one that is empty may begin anywhere
    plan = replace(forward.plan, columns=max(1, len(columns)))
    of_rows = [name for name, target in targets.items() if target.axes[0] == "rows"]

    def compute(block: Scores, is_new: Array | None) -> tuple[dict[str, Array], list[Array]]:
        tile = block.tile(band, range(1))
        parts = [*map(tile.slice_queries, cotangents)]
        if is_new is not None:  # gradients are linear in the cotangents
            parts = [xp.where(is_new, part, 0.0) for part in parts]
        rows = range(band.start, band.start + tile.shape[-2])
        accumulators = _accumulators(forward, [rows], [columns])
        add_rows(accumulators, forward._replace(scores=block, plan=plan), parts, band, "all")
        sums = {name: accumulator.array() for name, accumulator in accumulators.items()}
        return sums, [sums.pop(name) for name in of_rows]

    sums, others = compute_band(scores, plan, band, compute, has_sums=True)
    sums |= zip(of_rows, others, strict=True)
    return {name: _in_all_columns(xp, x, targets[name], columns, plan.keys) for name, x in sums.items()}


def _in_all_columns(xp: Namespace, array: Array, target: GradientTarget, columns: range, keys: int) -> Array:
    """Return the gradient of a target from its part of some keys: 0 for the others."""
    if "columns" not in target.axes or len(columns) == keys:
        return array
    return between_zeros(xp, array, target.axes.index("columns") - 2, columns.start, keys - columns.stop)


def _independent_groups(
    slices: Sequence[LeadingSlice], targets: Iterable[GradientTarget], leading_shape: Shape
) -> list[list[LeadingSlice | None]]:
    """Group slices that add into the same gradient, so that the order of summation is fixed."""
    if not slices:
        return [[None]]
    is_shared = [any(axis) for axis in zip(*(x.broadcast_axes(leading_shape) for x in targets), strict=True)]
    groups: dict[tuple[range, ...], list[LeadingSlice | None]] = {}
    for leading in slices:
        unshared = tuple(r for r, shared in zip(leading, is_shared, strict=True) if not shared)
        groups.setdefault(unshared, []).append(leading)
    return [*groups.values()]


def _add_ranges(
    accumulators: Accumulators,
    forward: Forward,
    cotangents: Sequence[Array],
    ranges: Iterable[range],
    guard: GradientGuard,
    add_rows: AddRows,
) -> None:
    for rows in ranges:
        tile = forward.scores.tile(rows, range(1))
        add_rows(accumulators, forward, [*map(tile.slice_queries, cotangents)], rows, guard)


def _accumulators(
    forward: Forward, rows: Iterable[range], columns: Iterable[range], outs: Mapping[str, Array] | None = None
) -> dict[str, GradientAccumulator]:
    rows, columns, grid = [*rows], [*columns], forward.scores.grid
    return {
        name: GradientAccumulator(target, rows, columns, grid, None if outs is None else outs[name])
        for name, target in forward.targets.items()
    }
