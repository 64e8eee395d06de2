"""Gradients of attention tile by tile: memory grows with L + S, never with L * S.

Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2. The scores s of a tile are computed again, by the code
of the forward pass. With P = exp(s - lse), O the output and dO its cotangent, and * elementwise,

    dV = P^T dO    dP = dO V^T    dS = P * (dP - D) with D = rowsum(dO * O)    dQ = dS K    dK = dS^T Q

A soft cap multiplies dS by its derivative on the way to dQ and dK; a sink has the gradient -exp(sink - lse) D.
The forward pass returns lse as two numbers, m + log l. P is computed as exp(s - m), and dO and D are divided by
l: each gradient has one of them as a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from sdpa_xp._core import threads
from sdpa_xp._core.gradient_sums import GradientAccumulator
from sdpa_xp._core.products import KeyValueSource, key_leading_slice, matmul_grouped, matmul_over_group
from sdpa_xp._core.scores import Scores
from sdpa_xp._libraries import astype_if_needed, computing, is_traced
from sdpa_xp._libraries.protocols import TRACED, Array, Namespace, Shape
from sdpa_xp._tiles.on_device import Questions
from sdpa_xp._tiles.plan import Plan
from sdpa_xp._tiles.tile import Allowed, GradientTarget, LeadingSlice, Tile, is_masked, slice_leading
from sdpa_xp.biases.custom import refuse_unknown_derivative

GradientGuard: TypeAlias = Literal["none", "cotangent", "all"]
"""Whose NaN and inf are kept out of the products where a pair may not attend: those of no array, of the
cotangent, or of the inputs too."""
INPUTS = frozenset({"query", "key", "value"})


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

    def in_one_tile(self) -> Forward:
        """Return the same call with one tile: values cannot be read, and a compiled loop cannot accumulate."""
        grid = replace(self.scores.grid, access=TRACED)
        rows, columns = max(1, self.plan.queries), max(1, self.plan.keys)
        plan = replace(self.plan, rows=rows, columns=columns, leading_slices=(), is_loop=False)
        return self._replace(scores=self.scores._replace(grid=grid), plan=plan)


AddRows: TypeAlias = Callable[
    [Mapping[str, GradientAccumulator], Forward, Sequence[Array], range, GradientGuard], None
]
"""What adds the contributions of a range of queries: to which sums, of which call, from which cotangents."""


class RowInputs(NamedTuple):
    """What each tile of a range of queries needs of these queries."""

    query: Array
    """Times the scale, (..., Hq, rows, E)."""
    cotangent: Array
    """Divided by l, (..., Hq, rows, Ev)."""
    delta: Array
    """D = rowsum(dO * O), divided by l, (..., Hq, rows, 1)."""
    shift: Array
    """m; 0 in a row without a key."""


def gradients(forward: Forward, cotangent: Array) -> dict[str, Array]:
    """Return the gradient of each target, in the accumulation dtype.

    A masked pair has weight 0, but 0 * NaN is NaN. So if a gradient is NaN or inf, all gradients are computed a
    second time, guarded: pairs that may not attend are then left out of the products one by one. A device that
    has to be waited for has searched the inputs before the output was computed; there the cotangent is always
    guarded, which takes one product more, so that it is not waited for again.
    """
    scores = forward.scores._replace(known_tiles=None)  # those of the output begin where its rows attend
    forward = forward._replace(scores=scores)
    if scores.grid.is_traced or is_traced(cotangent):  # whether a gradient is NaN cannot be read
        return sum_over_tiles(forward.in_one_tile(), (cotangent,), "all", _add_rows)
    if (finite := scores.options.finite_inputs) is not None:
        questions = Questions()
        forward = forward._replace(scores=scores._replace(grid=replace(scores.grid, questions=questions)))
        guard: GradientGuard = "cotangent" if finite >= INPUTS else "all"
        computed = sum_over_tiles(forward, (cotangent,), guard, _add_rows)
        if questions.arrays and not all(map(all, questions.read(scores.grid.library, scores.xp))):
            refuse_unknown_derivative(scores.grid.function, traced=False)
        return computed
    return guarded_if_nonfinite(forward, (cotangent,), _add_rows)


def guarded_if_nonfinite(forward: Forward, cotangents: Sequence[Array], add_rows: AddRows) -> dict[str, Array]:
    """Return the sums over the tiles, computed a second time with the guard "all" if they are not finite."""
    computed = sum_over_tiles(forward, cotangents, "none", add_rows)
    if not forward.scores.options.may_mask or _is_finite(forward.scores.xp, computed):
        return computed
    return sum_over_tiles(forward, cotangents, "all", add_rows)


def sum_over_tiles(
    forward: Forward, cotangents: Sequence[Array], guard: GradientGuard, add_rows: AddRows
) -> dict[str, Array]:
    """Return for each target the sum of what `add_rows` adds.

    Compute the leading slices of the plan one by one; if arrays can be written to, in threads.
    """
    # The pieces of an accumulator need common borders.
    forward = forward._replace(plan=forward.plan.with_common_borders())
    plan, grid, targets = forward.plan, forward.scores.grid, forward.targets
    if not grid.is_writeable:
        return _sum_of_slice(forward, cotangents, guard, add_rows)
    sums = {
        name: grid.xp.zeros(target.shape, dtype=grid.dtype, device=grid.device)
        for name, target in targets.items()
    }
    # Sinks, slopes and tables have few elements, and every slice adds to all of them. They are kept aside and
    # added in the order of the slices, so that the result does not depend on which thread ends first.
    small = {name for name, target in targets.items() if target.axes == (None, None)}
    kept: dict[LeadingSlice | None, dict[str, Array]] = {}

    def compute(slices: list[LeadingSlice | None]) -> None:
        with computing(cotangents[0]):  # here too: a library may keep this setting for each thread
            for leading in slices:
                parts = [x if leading is None else slice_leading(x, leading) for x in cotangents]
                computed = _sum_of_slice(forward.slice_leading(leading), parts, guard, add_rows)
                kept[leading] = {name: computed.pop(name) for name in small}
                for name, gradient in computed.items():
                    sums[name][targets[name].slices(leading)] += gradient

    large = [target for name, target in targets.items() if name not in small]
    threads.run(compute, _independent_groups(plan.leading_slices, large, grid.leading_shape), plan.threads)
    for leading in plan.leading_slices or (None,):
        for name, gradient in kept[leading].items():
            sums[name][targets[name].slices(leading)] += gradient
    return sums


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


def _sum_of_slice(
    forward: Forward, cotangents: Sequence[Array], guard: GradientGuard, add_rows: AddRows
) -> dict[str, Array]:
    accumulators = {
        name: GradientAccumulator(target, forward.plan, forward.scores.grid)
        for name, target in forward.targets.items()
    }
    for rows in forward.plan.row_ranges():
        add_rows(accumulators, forward, cotangents, rows, guard)
    return {name: accumulator.array() for name, accumulator in accumulators.items()}


def _add_rows(
    accumulators: Mapping[str, GradientAccumulator],
    forward: Forward,
    cotangents: Sequence[Array],
    rows: range,
    guard: GradientGuard,
) -> None:
    (cotangent,) = cotangents
    scores = forward.scores
    xp, dtype = scores.xp, scores.grid.dtype
    row_tile = scores.tile(rows, range(1))
    m, log_l = (row_tile.slice_queries(forward.lse)[..., part : part + 1] for part in range(2))
    is_empty = is_masked(m)
    cotangent = astype_if_needed(xp, row_tile.slice_queries(cotangent), dtype)
    cotangent = cotangent * xp.exp(xp.where(is_empty, 0.0, -log_l))
    delta = xp.sum(cotangent * row_tile.slice_queries(forward.output), axis=-1, keepdims=True)
    inputs = RowInputs(scores.scaled_query(rows), cotangent, delta, xp.where(is_empty, 0.0, m))
    of_scaled_query: Array | None = None
    for computed in scores.computed_tiles(rows, forward.plan, inputs.query, keeps_products=True):
        contribution = _add_tile(accumulators, forward, inputs, guard, *computed)
        if contribution is not None:
            of_scaled_query = contribution if of_scaled_query is None else of_scaled_query + contribution
    sinks = scores.options.sinks
    if sinks is not None and "sinks" in accumulators:
        accumulators["sinks"].add(row_tile, -xp.exp(sinks - inputs.shift) * delta)
    if of_scaled_query is None:  # these queries attend to no key, or their gradient is not needed
        return
    query, scale = astype_if_needed(xp, row_tile.slice_queries(scores.query), dtype), scores.options.scale
    if not isinstance(scale, float):
        scale = astype_if_needed(xp, row_tile.slice(scale), dtype)
        if guard == "all":
            scale, query = (xp.where(xp.isfinite(x), x, 0.0) for x in (scale, query))
    if "query" in accumulators:
        accumulators["query"].add(row_tile, of_scaled_query * scale)
    if "scale" in accumulators:
        accumulators["scale"].add(row_tile, xp.sum(of_scaled_query * query, axis=-1, keepdims=True))


def _add_tile(
    accumulators: Mapping[str, GradientAccumulator],
    forward: Forward,
    inputs: RowInputs,
    guard: GradientGuard,
    tile: Tile,
    s: Array,
    allowed: Allowed,
    capped: Array,
) -> Array | None:
    """Add the contribution of a tile; returns its contribution to the gradient of the scaled queries.

    None if no gradient that is computed needs it.
    """
    scores, xp, grid = forward.scores, forward.scores.xp, forward.scores.grid
    key, value = (source.slices(grid)(tile.columns) for source in (scores.key, forward.value))
    for_cotangent: Allowed = True if guard == "none" else allowed
    for_inputs: Allowed = allowed if guard == "all" else True
    over_group, grouped = partial(matmul_over_group, xp, key.shape[-3]), partial(matmul_grouped, xp)
    p = xp.exp(s - inputs.shift)
    factor: Array | None = None
    if scores.options.dropout is not None:
        ones = xp.full((1, 1), 1.0, dtype=grid.dtype, device=grid.device)
        factor = scores.options.dropout.apply(tile, ones)
    if "value" in accumulators:
        kept = scores.without_masked(p if factor is None else p * factor, for_cotangent)
        accumulators["value"].add(tile, guarded_product(xp, over_group, kept, inputs.cotangent, for_cotangent))
        if len(accumulators) == 1:
            return None
    dp = matmul_grouped(xp, inputs.cotangent, xp.matrix_transpose(value))
    dp = dp if factor is None else dp * factor
    ds = scores.without_masked(p * (dp - inputs.delta), for_cotangent)
    finite = scores.without_masked(capped, for_inputs) if scores.options.biases else capped
    for bias, name in zip(scores.options.biases, forward.bias_names, strict=True):
        # The function of a bias that has no gradient is tried too: it may do more than add.
        of_bias = bias.gradient(tile, finite, ds)
        if name is not None and of_bias is not None:
            accumulators[name].add(tile, of_bias)
    slope = scores.slope(capped, for_cotangent)
    ds = ds if slope is None else ds * slope
    if "key" in accumulators:
        accumulators["key"].add(tile, guarded_product(xp, over_group, ds, inputs.query, for_inputs))
    if accumulators.keys().isdisjoint(("query", "scale")):
        return None
    return guarded_product(xp, grouped, ds, key, for_inputs)


def guarded_product(
    xp: Namespace, product: Callable[[Array, Array], Array], weights: Array, operand: Array, allowed: Allowed
) -> Array:
    """Return `product` of both, where only pairs that may attend bring in a NaN or inf of the operand."""
    if isinstance(allowed, bool):
        return product(weights, operand)
    # An attended NaN or inf makes the sum NaN, whatever the others are; so it is enough to count them.
    is_special = ~xp.isfinite(operand)
    attends = xp.astype(xp.broadcast_to(allowed, weights.shape), weights.dtype)
    meets = product(attends, xp.astype(is_special, weights.dtype)) > 0.0
    return xp.where(meets, math.nan, product(weights, xp.where(is_special, 0.0, operand)))


def _is_finite(xp: Namespace, computed: Mapping[str, Array]) -> bool:
    """Return whether the gradients are known to be finite; of traced ones it is not known."""
    return not any(is_traced(x) or not bool(xp.isfinite(xp.sum(x))) for x in computed.values())
