"""The tangents of the scores of a tile, and what else their derivatives are made of."""

from __future__ import annotations

from functools import partial
from typing import cast

from .._libraries.protocols import Array
from .._tiles.tile import Allowed, Tile
from ..biases.algebra import Added
from .differentiable import differentiable_product
from .products import Buffer, matmul_grouped
from .scores import Scores, Tangents


def scaled_query_tangent(scores: Scores, rows: range, tangents: Tangents) -> Array | None:
    """Return the tangent of `scaled_query`, (scale q)' = scale q' + scale' q; None if it is 0."""
    changed: Array | None = None
    if tangents.query is not None:
        changed = scores._replace(query=tangents.query).scaled_query(rows)
    if tangents.scale is None:
        return changed
    of_scale = scores._replace(options=tangents.options).scaled_query(rows)
    return of_scale if changed is None else changed + of_scale


def tangent_operand(
    scores: Scores, tangents: Tangents, query: Array, query_tangent: Array | None
) -> Array | None:
    """Return what `products_tangent` multiplies with keys: q', q, or both side by side; None is 0."""
    if tangents.key is None or query_tangent is None:
        return query_tangent if tangents.key is None else query
    return scores.xp.concat([query_tangent, query], axis=-1)


def products_tangent(
    scores: Scores, tile: Tile, tangents: Tangents, operand: Array | None, allowed: Allowed
) -> Array | None:
    """Return the tangent of the products that are not yet capped, q' k + q k', in one product; None is 0."""
    xp, keys = scores.xp, scores.key.slices(scores.grid)
    if operand is None:
        return None
    if tangents.key is None:
        key = keys(tile.columns)
    else:
        key = tangents.key.slices(scores.grid)(tile.columns)
        if operand.shape[-1] > key.shape[-1]:
            key = xp.concat([keys(tile.columns), key], axis=-1)
    buffer = None if scores.buffers is None else scores.buffers.tangent
    return derived_product(scores, operand, xp.matrix_transpose(key), allowed, buffer)


def derived_product(
    scores: Scores, left: Array, right: Array, allowed: Allowed, buffer: Buffer | None = None
) -> Array:
    """Return the product of rows and keys in a derivative, which is 0 later where a pair may not attend.

    If the library differentiates again, a NaN of a masked pair has no effect.
    """
    xp, rules = scores.xp, scores.tangent_rules
    if rules is None or not scores.options.may_mask:
        return matmul_grouped(xp, left, right, buffer)
    return differentiable_product(rules, xp, partial(matmul_grouped, xp), left, right, allowed)


def capped_tangent(
    scores: Scores, tile: Tile, tangents: Tangents, operand: Array | None, products: Array, allowed: Allowed
) -> Array | None:
    """Return the tangent of the soft-capped products; None is 0.

    The `products` are soft-capped; only a call that caps needs them.
    """
    changed = products_tangent(scores, tile, tangents, operand, allowed)
    slope = None if changed is None else scores.slope(products, allowed)
    return changed if changed is None or slope is None else changed * slope


def tangent(
    scores: Scores, tile: Tile, tangents: Tangents, of_products: Array | None, allowed: Allowed
) -> Array | None:
    """Return the tangent of the scores, 0 where a pair may not attend; None if it is 0 everywhere."""
    changed = of_products
    for bias in tangents.options.biases:
        added = cast(Added, bias).added(tile)
        changed = added if changed is None else changed + added
    return None if changed is None else scores.without_masked(changed, allowed)


def try_functions(scores: Scores, tile: Tile, products: Array, allowed: Allowed) -> None:
    """Refuse a bias whose function does more than add to the soft-capped products of a tile."""
    for bias in scores.options.biases:
        if bias.is_of_caller:
            finite = scores.without_masked(products, allowed)
            bias.gradient(tile, finite, finite)
