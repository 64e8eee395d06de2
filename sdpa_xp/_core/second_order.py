r"""The derivative of all gradients along a direction: forward mode over the backward pass, tile by tile.

The gradients of <c, O(x)> move with the inputs x by a Hessian-vector product, and with the cotangent c. A prime
is a derivative along the direction. In the words of `backward.py`, with the scores s and their tangent s',

    P' = P * (s' - lse')    dP' = dO' V^T + dO V'^T    dS' = P' * (dP - D) + P * (dP' - D')
    lse' = rowsum(P * s')    D' = rowsum(P' * dP + P * dP')
    dV' = P'^T dO + P^T dO'    dQ' = dS' K + dS K'    dK' = dS'^T Q + dS^T Q'

A soft cap multiplies dS' by its slope, and dS by the derivative of the slope. Each range of queries goes over
its tiles twice: for the sums lse' and D', and for the gradients. As in `backward.py`, dO, dO', D and D' are
divided by l. All s' of a row are taken less one number c, which falls out of s' - lse'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from .._libraries import astype_if_needed, dtype_name
from .._libraries.protocols import READ_ONLY, Access, Array
from .._tiles.tile import Allowed, Tile, is_masked
from . import score_tangents
from .backward import guarded_product, sum_on_device
from .gradient_passes import Forward, GradientGuard, guarded_if_nonfinite, sum_traced
from .gradient_sums import GradientAccumulator
from .in_place import exp_minus, minus, plus, product_aside, row_sums, times
from .products import Buffer, matmul_grouped, matmul_over_group
from .scores import Scores

MOST_KEPT = {"float32": 2**21, "float64": 2**20}
"""The scores of a range of queries that are kept for the second time: 8 MiB for each of four arrays."""
FEWEST_ROWS = 64
"""With fewer queries in a range, products take longer than to compute the scores twice."""


class RowTangents(NamedTuple):
    """What each tile of a range of queries needs of these queries; primes are derivatives."""

    query: Array
    """q times the scale, (..., Hq, rows, E)."""
    query_tangent: Array | None
    operand: Array | None
    """See `Scores.tangent_operand`."""
    cotangent: Array
    """dO / l."""
    cotangent_tangent: Array | None
    """dO' / l."""
    shift: Array
    """m; 0 in a row without a key."""


class TileTangents(NamedTuple):
    """A tile, its weights, and the products that the gradients are made of; primes are derivatives."""

    tile: Tile
    allowed: Allowed
    products: Array | None
    """Soft-capped, if a soft cap or a bias needs them."""
    products_tangent: Array | None
    p: Array
    """exp(s - m)."""
    change: Array | None
    """s' - c; None is 0."""
    dp: Array
    """dO V^T / l."""
    dp_tangent: Array | None
    """None is 0."""
    factor: Array | None
    """Of dropout."""


class QuerySums(NamedTuple):
    """The sums over the keys that all tiles of a range of queries need, (..., Hq, rows, 1)."""

    lse_tangent: Array
    delta: Array
    """D / l. Not from the output, whose roundings are others than those of the weights and products here."""
    delta_tangent: Array


def gradient_tangents(
    forward: Forward, cotangent: Array, cotangent_tangent: Array | None, access: Access
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the gradient of each target and its derivative, in the accumulation dtype.

    The direction is the only one of `forward.scores.tangents`, for the inputs, and `cotangent_tangent`.
    `access` is what the direction and the cotangents allow.
    """
    targets = forward.targets
    both = {**targets, **{_of_tangent(name): target for name, target in targets.items()}}
    forward = forward._replace(scores=forward.scores._replace(known_tiles=None), targets=both)
    cotangents = [cotangent] if cotangent_tangent is None else [cotangent, cotangent_tangent]
    if access.is_traced or forward.scores.grid.is_traced:
        computed = sum_traced(forward, cotangents, _add_rows)
    elif forward.scores.options.finite_inputs is not None:  # a device, which was waited for: see `backward.py`
        computed = sum_on_device(_with_rows_to_keep(forward), cotangents, "all", _add_rows)
    else:
        if forward.scores.grid.is_writeable and not access.is_writeable:  # the library records operations
            forward = forward.with_access(READ_ONLY)
        computed = guarded_if_nonfinite(_with_rows_to_keep(forward), cotangents, _add_rows)
    return {n: computed[n] for n in targets}, {n: computed[_of_tangent(n)] for n in targets}


def _of_tangent(name: str) -> str:
    return f"{name}'"


def _with_rows_to_keep(forward: Forward) -> Forward:
    """Return the call with ranges of so few queries that their tiles can be kept, if that is worth it."""
    plan, heads = forward.plan, 1
    for length in forward.scores.leading_shape if not plan.leading_slices else map(len, plan.leading_slices[0]):
        heads *= length
    rows = min(plan.rows, MOST_KEPT[dtype_name(forward.scores.grid.dtype)] // (heads * max(1, plan.keys)))
    if rows < min(FEWEST_ROWS, plan.rows):
        return forward
    # Wider tiles keep their number of scores: each costs as many operations.
    return forward._replace(plan=replace(plan, rows=rows, columns=plan.rows * plan.columns // max(1, rows)))


def _add_rows(
    accumulators: Mapping[str, GradientAccumulator],
    forward: Forward,
    cotangents: Sequence[Array],
    rows: range,
    guard: GradientGuard,
) -> None:
    scores, plan, buffers = forward.scores, forward.plan, forward.scores.buffers
    xp, dtype, (tangents,) = scores.xp, scores.grid.dtype, scores.tangents
    row_tile = scores.tile(rows, range(1))
    m, log_l = (row_tile.slice_queries(forward.lse)[..., part : part + 1] for part in range(2))
    is_empty = is_masked(m)
    shift, over_l = xp.where(is_empty, 0.0, m), xp.exp(xp.where(is_empty, 0.0, -log_l))
    cotangent, *changes = [astype_if_needed(xp, array, dtype) * over_l for array in cotangents]
    query = scores.scaled_query(rows)
    query_tangent = score_tangents.scaled_query_tangent(scores, rows, tangents)
    operand = score_tangents.tangent_operand(scores, tangents, query, query_tangent)
    inputs = RowTangents(query, query_tangent, operand, cotangent, changes[0] if changes else None, shift)
    is_kept = scores.grid.is_traced or len(rows) * plan.keys <= MOST_KEPT[dtype_name(dtype)]
    sum_of = partial(_sum_of_rows, scores)
    centre: Array | None = None

    def tiles() -> Iterator[TileTangents]:
        nonlocal centre
        needs_products = scores.options.needs_products
        if buffers is not None:
            buffers.use_own(0)
        computed = scores.computed_tiles(rows, plan, query, keeps_products=needs_products)
        for number, (tile, s, allowed, products) in enumerate(computed, 1):
            p = exp_minus(buffers, xp, s, shift)
            part = _tangents_of_tile(forward, inputs, guard, tile, p, allowed, products)
            if part.change is not None:
                if centre is None:
                    centre = sum_of(p * part.change) * over_l
                # Without products that move, the change is a slice of the caller's tangent of a bias.
                is_own = operand is not None
                part = part._replace(change=minus(buffers if is_own else None, part.change, centre))
            yield part if needs_products else part._replace(products=None)
            if buffers is not None and is_kept:
                buffers.use_own(number)

    kept = [*tiles()] if is_kept else None
    l_tangent, delta, delta_tangent = [xp.zeros_like(shift)] * 3
    for part in tiles() if kept is None else kept:
        weighted = product_aside(buffers, part.p, part.dp)
        delta = delta + sum_of(weighted)
        if part.change is not None:
            delta_tangent = delta_tangent + sum_of(times(buffers, weighted, part.change))
            l_tangent = l_tangent + sum_of(product_aside(buffers, part.p, part.change))
        if part.dp_tangent is not None:
            delta_tangent = delta_tangent + sum_of(product_aside(buffers, part.p, part.dp_tangent))
    sinks, sink, of_sink = scores.options.sinks, xp.zeros_like(shift), xp.zeros_like(shift)
    if sinks is not None:
        sink = xp.exp(sinks - shift)
        moved = of_sink if tangents.options.sinks is None else tangents.options.sinks
        of_sink = xp.where(is_masked(sinks), 0.0, sink * (moved if centre is None else moved - centre))
        l_tangent = l_tangent + of_sink
    lse_tangent, delta = l_tangent * over_l, delta * over_l
    sums = QuerySums(lse_tangent, delta, delta_tangent * over_l - lse_tangent * delta)
    if "sinks" in accumulators:
        accumulators["sinks"].add(row_tile, -sink * delta)
        of_sink = (of_sink - sink * lse_tangent) * delta + sink * sums.delta_tangent
        accumulators["sinks'"].add(row_tile, -of_sink)
    of_query: tuple[Array, Array] | None = None
    for part in tiles() if kept is None else kept:
        new = _add_tile(accumulators, forward, inputs, guard, part, sums)
        if new is not None:
            of_query = new if of_query is None else (of_query[0] + new[0], of_query[1] + new[1])
    if of_query is not None:
        _add_query(accumulators, forward, row_tile, guard, *of_query)


def _sum_of_rows(scores: Scores, array: Array) -> Array:
    """Return the sum of each row, by a product with ones, which is faster than a sum."""
    if scores.buffers is not None:
        return row_sums(scores.buffers, scores.xp, array)
    ones = scores.xp.full((array.shape[-1], 1), 1.0, dtype=scores.grid.dtype, device=scores.grid.device)
    sums: Array = array @ ones
    return sums


def _tangents_of_tile(
    forward: Forward,
    inputs: RowTangents,
    guard: GradientGuard,
    tile: Tile,
    p: Array,
    allowed: Allowed,
    products: Array,
) -> TileTangents:
    """Return what a tile is computed from; its `change` is s'."""
    scores, xp, grid, buffers = forward.scores, forward.scores.xp, forward.scores.grid, forward.scores.buffers
    (tangents,) = scores.tangents
    guarded: Allowed = allowed if guard == "all" else True
    value = xp.matrix_transpose(forward.value.slices(grid)(tile.columns))

    def product(left: Array, right: Array, memory: Buffer | None) -> Array:
        return score_tangents.derived_product(scores, left, right, guarded, memory)

    memory = (None,) * 3 if buffers is None else (buffers.cotangent, buffers.cotangent_tangent, buffers.product)
    dp, dp_tangent = product(inputs.cotangent, value, memory[0]), None
    if inputs.cotangent_tangent is not None:
        dp_tangent = product(inputs.cotangent_tangent, value, memory[1])
    if tangents.value is not None:
        value = xp.matrix_transpose(tangents.value.slices(grid)(tile.columns))
        if dp_tangent is None:
            dp_tangent = product(inputs.cotangent, value, memory[1])
        else:
            dp_tangent = plus(buffers, dp_tangent, product(inputs.cotangent, value, memory[2]))
    factor = None
    if scores.options.dropout is not None:
        ones = xp.full((1, 1), 1.0, dtype=grid.dtype, device=grid.device)
        factor = scores.options.dropout.apply(tile, ones)
        dp = times(buffers, dp, factor)
        dp_tangent = None if dp_tangent is None else times(buffers, dp_tangent, factor)
    dp = scores.without_masked(dp, guarded)
    dp_tangent = None if dp_tangent is None else scores.without_masked(dp_tangent, guarded)
    products_tangent = score_tangents.capped_tangent(scores, tile, tangents, inputs.operand, products, guarded)
    change = score_tangents.tangent(scores, tile, tangents, products_tangent, guarded)
    if products_tangent is not None:  # only the slope needs it later
        has_slope = scores.options.has_slope
        products_tangent = scores.without_masked(products_tangent, guarded) if has_slope else None
    return TileTangents(tile, allowed, products, products_tangent, p, change, dp, dp_tangent, factor)


def _add_tile(
    accumulators: Mapping[str, GradientAccumulator],
    forward: Forward,
    inputs: RowTangents,
    guard: GradientGuard,
    part: TileTangents,
    sums: QuerySums,
) -> tuple[Array, Array] | None:
    """Add the contributions of a tile; returns those to the gradient of the scaled queries, and its tangent.

    None if no gradient that is computed needs them.
    """
    scores, xp, tile, p, buffers = forward.scores, forward.scores.xp, part.tile, part.p, forward.scores.buffers
    (tangents,) = scores.tangents
    guarded: Allowed = part.allowed if guard == "all" else True
    change = -sums.lse_tangent if part.change is None else minus(buffers, part.change, sums.lse_tangent)
    p_tangent, centred = times(buffers, change, p), minus(buffers, part.dp, sums.delta)
    moved, mean = part.dp_tangent, sums.delta_tangent
    moved = times(buffers, -mean if moved is None else minus(buffers, moved, mean), p)
    ds_tangent = plus(buffers, moved, product_aside(buffers, p_tangent, centred))
    ds = times(buffers, centred, p)
    kept, kept_tangent = (x if part.factor is None else x * part.factor for x in (p, p_tangent))
    kept, kept_tangent, ds, ds_tangent = (
        scores.without_masked(x, guarded) for x in (kept, kept_tangent, ds, ds_tangent)
    )
    key = scores.key.slices(scores.grid)(tile.columns)
    over_group, grouped = partial(matmul_over_group, xp, key.shape[-3]), partial(matmul_grouped, xp)
    product = partial(guarded_product, xp, allowed=guarded)

    def add_to(name: str, array: Array) -> None:
        accumulators[name].add(tile, array)

    if "value" in accumulators:
        add_to("value", product(over_group, kept, inputs.cotangent))
        add_to("value'", product(over_group, kept_tangent, inputs.cotangent))
        if inputs.cotangent_tangent is not None:
            add_to("value'", product(over_group, kept, inputs.cotangent_tangent))
    # Only a soft cap and biases read the products, and then they are there.
    finite = p if part.products is None else scores.without_masked(part.products, guarded)
    for bias, name in zip(scores.options.biases, forward.bias_names, strict=True):
        of_bias = bias.gradient(tile, finite, ds)
        if name is not None and of_bias is not None:
            add_to(name, of_bias)
            add_to(_of_tangent(name), cast(Array, bias.gradient(tile, finite, ds_tangent)))
    slope = scores.slope(finite, guarded)
    if slope is not None:
        ds_tangent = ds_tangent * slope
        if part.products_tangent is not None:
            ds_tangent = ds_tangent + ds * scores.slope_tangent(finite, part.products_tangent)
        ds = ds * slope
    if "key" in accumulators:
        add_to("key", product(over_group, ds, inputs.query))
        add_to("key'", product(over_group, ds_tangent, inputs.query))
        if inputs.query_tangent is not None:
            add_to("key'", product(over_group, ds, inputs.query_tangent))
    if not ("query" in accumulators or "scale" in accumulators):
        return None
    of_query, of_query_tangent = product(grouped, ds, key), product(grouped, ds_tangent, key)
    if tangents.key is not None:
        moved_key = tangents.key.slices(scores.grid)(tile.columns)
        of_query_tangent = of_query_tangent + product(grouped, ds, moved_key)
    return of_query, of_query_tangent


def _add_query(
    accumulators: Mapping[str, GradientAccumulator],
    forward: Forward,
    tile: Tile,
    guard: GradientGuard,
    of_scaled: Array,
    of_scaled_tangent: Array,
) -> None:
    """Add the gradients of the queries and of the scale, from that of the scaled queries and its tangent."""
    scores, (tangents,) = forward.scores, forward.scores.tangents
    xp, dtype = scores.xp, scores.grid.dtype

    def finite(array: Array) -> Array:
        return xp.where(xp.isfinite(array), array, 0.0) if guard == "all" else array

    def queries(array: Array) -> Array:
        return finite(astype_if_needed(xp, tile.slice_queries(array), dtype))

    def scales(array: Array) -> Array:
        return finite(astype_if_needed(xp, tile.slice(array), dtype))

    scale = scores.options.scale if isinstance(scores.options.scale, float) else scales(scores.options.scale)
    if "query" in accumulators:
        accumulators["query"].add(tile, of_scaled * scale)
        accumulators["query'"].add(tile, of_scaled_tangent * scale)
        if tangents.scale is not None:
            accumulators["query'"].add(tile, of_scaled * scales(tangents.scale))
    if "scale" in accumulators:
        query = queries(scores.query)
        accumulators["scale"].add(tile, xp.sum(of_scaled * query, axis=-1, keepdims=True))
        accumulators["scale'"].add(tile, xp.sum(of_scaled_tangent * query, axis=-1, keepdims=True))
        if tangents.query is not None:
            of_scale = of_scaled * queries(tangents.query)
            accumulators["scale'"].add(tile, xp.sum(of_scale, axis=-1, keepdims=True))
