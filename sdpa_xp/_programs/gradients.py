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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, cast

from .._libraries import astype_if_needed, joint_access, library_of
from .._libraries.protocols import Array, Namespace
from .._run import differentiable_product, is_finite, key_leading_slice, matmul_grouped, matmul_over_group
from .._run.buffers import exp_minus, minus, times
from .._run.executors import run_repaired
from .._run.program import Repairable, Results
from .._tiles import Allowed, KeyValueSource, LeadingSlice, Target, is_masked, slice_leading
from .._tiles.grid import ScoreGrid
from .._tiles.on_device import Questions
from .._tiles.plan import plan_tiles
from ..biases.custom import check_answers
from . import ComputedTile, Scores

INPUTS = frozenset({"query", "key", "value"})
GradientGuard: TypeAlias = Literal["none", "cotangent", "all"]
"""Whose NaN and inf are kept out of the products where a pair may not attend: those of no array, of the
cotangent, or of the inputs too."""


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


@dataclass(frozen=True, slots=True)
class GradientProgram(Repairable):
    """The gradients of a call, from its output and, once it is known, the cotangent of this."""

    scores: Scores
    value: KeyValueSource
    output: Array
    """(..., Hq, L, Ev), in the accumulation dtype."""
    lse: Array
    """Two numbers that add up to the log-sum-exp, (..., Hq, L, 2): m and log l, or others."""
    bias_names: tuple[str | None, ...]
    """The name in `targets` of the array of each bias, or None."""
    cotangent: Array | None = None
    """(..., Hq, L, Ev), once it is known."""
    guard: GradientGuard = "none"
    shares_tiles = False

    @property
    def keeps_scores(self) -> bool:
        return self.scores.options.needs_products

    def slice_leading(self, leading: LeadingSlice) -> GradientProgram:
        return replace(
            self,
            scores=self.scores.slice_leading(leading),
            value=self.value.slice_leading(key_leading_slice(leading, self.scores.group)),
            output=slice_leading(self.output, leading),
            lse=slice_leading(self.lse, leading),
            cotangent=slice_leading(cast(Array, self.cotangent), leading),
        )

    def only(self, names: Collection[str]) -> GradientProgram:
        """Return the same call for the gradients of some of its arrays."""
        targets = {name: target for name, target in self.targets.items() if name in names}
        bias_names = tuple([name if name in targets else None for name in self.bias_names])
        return replace(self, targets=targets, bias_names=bias_names)

    def with_grid(self, grid: ScoreGrid) -> GradientProgram:
        """Return the same call on a grid that has other tiles, or notes questions."""
        plan = plan_tiles(grid, self.scores.group, self.scores.key.width + self.value.width)
        return replace(self, scores=self.scores._replace(grid=grid), plan=plan.with_common_borders())

    def guarded(self) -> GradientProgram:
        return replace(self, guard="all")

    def trusted(self, *, reads_ranges: bool) -> GradientProgram | None:
        del reads_ranges  # no range has a result of its own
        if (finite := self.scores.options.finite_inputs) is None:
            return None if self.scores.options.may_mask else self
        return replace(self, guard="cotangent" if finite >= INPUTS else "all")

    def repaired(self, results: dict[str, Array]) -> GradientProgram | None:
        return None if is_finite(self.scores.xp, [*results.values()]) else self.guarded()

    def add_rows(self, results: Results, rows: range) -> None:
        scores = self.scores
        xp, dtype = scores.xp, scores.grid.dtype
        row_tile = scores.tile(rows, range(1))
        m, log_l = (row_tile.slice_queries(self.lse)[..., part : part + 1] for part in range(2))
        is_empty = is_masked(m)
        cotangent = astype_if_needed(xp, row_tile.slice_queries(cast(Array, self.cotangent)), dtype)
        if scores.block is not None:  # gradients are linear in the cotangent
            cotangent = scores.block.only_new(cotangent)
        cotangent = cotangent * xp.exp(xp.where(is_empty, 0.0, -log_l))
        delta = xp.sum(cotangent * row_tile.slice_queries(self.output), axis=-1, keepdims=True)
        inputs = RowInputs(scores.scaled_query(rows), cotangent, delta, xp.where(is_empty, 0.0, m))
        of_scaled_query: Array | None = None
        needs_products = scores.options.needs_products
        for computed in scores.computed_tiles(rows, self.plan, inputs.query, keeps_products=needs_products):
            contribution = self._add_tile(results, inputs, computed)
            if contribution is not None:
                of_scaled_query = contribution if of_scaled_query is None else of_scaled_query + contribution
        sinks = scores.options.sinks
        if sinks is not None and "sinks" in results:
            results["sinks"].add(row_tile, -xp.exp(sinks - inputs.shift) * delta)
        if of_scaled_query is None:  # these queries attend to no key, or their gradient is not needed
            return
        query, scale = astype_if_needed(xp, row_tile.slice_queries(scores.query), dtype), scores.options.scale
        if not isinstance(scale, float):
            scale = astype_if_needed(xp, row_tile.slice(scale), dtype)
            if self.guard == "all":
                scale, query = (xp.where(xp.isfinite(x), x, 0.0) for x in (scale, query))
        if "query" in results:
            results["query"].add(row_tile, of_scaled_query * scale)
        if "scale" in results:
            results["scale"].add(row_tile, xp.sum(of_scaled_query * query, axis=-1, keepdims=True))

    def _add_tile(self, results: Results, inputs: RowInputs, computed: ComputedTile) -> Array | None:
        """Add the contribution of a tile; returns its contribution to the gradient of the scaled queries.

        None if no gradient that is computed needs it.
        """
        scores, xp, grid = self.scores, self.scores.xp, self.scores.grid
        tile, s, allowed, capped = computed
        key, value = (source.slices(grid)(tile.columns) for source in (scores.key, self.value))
        for_cotangent: Allowed = True if self.guard == "none" else allowed
        for_inputs: Allowed = allowed if self.guard == "all" else True
        over_group, grouped = partial(matmul_over_group, xp, key.shape[-3]), partial(matmul_grouped, xp)
        buffers = scores.buffers
        p = exp_minus(buffers, xp, s, inputs.shift)
        factor: Array | None = None
        if scores.options.dropout is not None:
            ones = xp.full((1, 1), 1.0, dtype=grid.dtype, device=grid.device)
            factor = scores.options.dropout.apply(tile, ones)
        if "value" in results:
            kept = scores.without_masked(p if factor is None else p * factor, for_cotangent)
            results["value"].add(tile, guarded_product(xp, over_group, kept, inputs.cotangent, for_cotangent))
            if len(results) == 1:
                return None
        rules, transposed = scores.tangent_rules, xp.matrix_transpose(value)
        if rules is None or not scores.options.may_mask:
            dp = grouped(inputs.cotangent, transposed, None if buffers is None else buffers.tangent)
        else:  # if the library differentiates again, a NaN of a masked pair has no effect
            dp = differentiable_product(rules, xp, grouped, inputs.cotangent, transposed, for_inputs)
        dp = dp if factor is None else times(buffers, dp, factor)
        ds = scores.without_masked(times(buffers, minus(buffers, dp, inputs.delta), p), for_cotangent)
        finite = scores.without_masked(capped, for_inputs) if scores.options.needs_products else capped
        for bias, name in zip(scores.options.biases, self.bias_names, strict=True):
            # The function of a bias that has no gradient is tried too: it may do more than add.
            of_bias = bias.gradient(tile, finite, ds)
            if name is not None and of_bias is not None:
                results[name].add(tile, of_bias)
        slope = scores.slope(capped, for_cotangent)
        ds = ds if slope is None else ds * slope
        if "key" in results:
            results["key"].add(tile, guarded_product(xp, over_group, ds, inputs.query, for_inputs))
        if not ("query" in results or "scale" in results):
            return None
        return guarded_product(xp, grouped, ds, key, for_inputs)


def gradients(program: GradientProgram, cotangent: Array) -> dict[str, Array]:
    """Return the gradient of each target, in the accumulation dtype.

    A masked pair has weight 0, but 0 * NaN is NaN. So if a gradient is NaN or inf, all gradients are computed a
    second time, guarded: pairs that may not attend are then left out of the products one by one. A device that
    has to be waited for has searched the inputs before the output was computed; there the cotangent is always
    guarded, which takes one product more, so that it is not waited for again.
    """
    scores = program.scores._replace(known_tiles=None)  # those of the output begin where its rows attend
    # Sums over queries need common borders.
    program = replace(program, scores=scores, cotangent=cotangent, plan=program.plan.with_common_borders())
    access = joint_access(scores.grid.access, cotangent)
    if access != scores.grid.access:
        program = program.with_grid(replace(scores.grid, access=access))
    elif scores.options.finite_inputs is not None:
        # A device is waited for again only for functions of biases, which the output may have asked about, too.
        grid = replace(scores.grid, questions=scores.grid.questions or Questions())
        program = replace(program, scores=scores._replace(grid=grid))
    computed = run_repaired(program)
    check_answers(program.grid)
    return computed


def guarded_product(
    xp: Namespace, product: Callable[[Array, Array], Array], weights: Array, operand: Array, allowed: Allowed
) -> Array:
    """Return `product` of both, where only pairs that may attend bring in a NaN or inf of the operand."""
    if isinstance(allowed, bool):
        return product(weights, operand)
    guarded = partial(_guarded_by_count, xp, product, allowed)
    return cast(Array, library_of(operand).bilinear(guarded, weights, operand))


def _guarded_by_count(
    xp: Namespace, product: Callable[[Array, Array], Array], allowed: Array, weights: Array, operand: Array
) -> Array:
    # An attended NaN or inf makes the sum NaN, whatever the others are; so it is enough to count them.
    is_special = ~xp.isfinite(operand)
    attends = library_of(weights).spread(xp, allowed, weights)
    meets = product(attends, xp.astype(is_special, weights.dtype)) > 0.0
    return xp.where(meets, math.nan, product(weights, xp.where(is_special, 0.0, operand)))


PROBE_SIDE = 8
"""Queries and keys of the tile on which a function of the caller is tried before a call is computed."""


def gradient_targets(
    scores: Scores, key: Array, value: Array, names: Iterable[str]
) -> tuple[dict[str, Target], tuple[str | None, ...]]:
    """Return the arrays whose gradients are computed, by name, and the name of the array of each bias.

    `names` are those of the floating arrays, in the order of the biases that hold them.
    """
    targets = {
        "query": Target(scores.query.shape, ("rows", None)),
        "key": Target(key.shape, ("columns", None), scores.group),
        "value": Target(value.shape, ("columns", None), scores.group),
    }
    of_biases = [name for name in names if name not in (*targets, "scale", "sinks")]
    bias_names = tuple(
        # Only a floating array is a target, and the names have the order of the biases.
        None if bias.gradient_target is None else of_biases.pop(0)
        for bias in scores.options.biases
    )
    for name, bias in zip(bias_names, scores.options.biases, strict=True):
        if name and bias.gradient_target:
            targets[name] = bias.gradient_target
    if not isinstance(scores.options.scale, float):
        shape = (*[1] * (3 - scores.options.scale.ndim), *scores.options.scale.shape)
        targets["scale"] = Target(shape, ("rows" if shape[-2] != 1 else None, None))
    if scores.options.sinks is not None:
        targets["sinks"] = Target((*[1] * (3 - scores.options.sinks.ndim), *scores.options.sinks.shape))
    return targets, bias_names


def try_functions(scores: Scores) -> None:
    """Refuse a bias whose function does more than add: it is tried on some scores before the call."""
    if not scores.options.has_functions:
        return
    grid = scores.grid
    rows, columns = (range(min(PROBE_SIDE, len(side))) for side in grid.sides)
    tile = scores.tile(rows, columns)
    distance = grid.xp.astype(tile.key_index - tile.query_index, grid.dtype)
    # None of these scores is 0, of which a multiple is no other number.
    probe = grid.xp.broadcast_to(distance * 0.75 + 0.5, tile.shape)
    for bias in scores.options.biases:
        if bias.is_of_caller:
            bias.gradient(tile, probe, probe)
