"""Products that a library differentiates, without the NaN and inf of masked pairs.

A masked pair has weight 0, and its score has cotangent 0. But derivatives multiply both with the other operand
of a product, and 0 * NaN is NaN. So these products have derivatives of their own, which read 0 in place of NaN
and inf. They are linear rules, and the library transposes them for reverse mode and differentiates them again.
A row that attends to a NaN still shows it: its weights or its output are NaN, and each derivative has one as a
factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from .._libraries.base import TangentRules
from .._libraries.protocols import Array, Namespace
from .._run import NonfiniteGuard, has_key, matmul_grouped, weigh
from .._tiles import Allowed


def differentiable_product(
    rules: TangentRules,
    xp: Namespace,
    product: Callable[[Array, Array], Array],
    left: Array,
    right: Array,
    allowed: Allowed = True,
    *,
    drops_nonfinite: bool = False,
) -> Array:
    """Return `product(left, right)`, which is linear in both.

    Its derivative is 0 where a pair may not attend, because what follows may have a slope of NaN there. With
    `drops_nonfinite` it is 0 where the product is NaN or inf, for pairs that are masked by what follows.
    """

    def compute(left: Array, right: Array, *_: Array) -> Array:
        return product(left, right)

    def tangent(arrays: Sequence[Array], output: Array, tangents: Sequence[Array | None]) -> Array:
        (left, right, *masks), (of_left, of_right, *_) = arrays, tangents
        changed = _sum(
            None if of_left is None else product(of_left, _finite(xp, right)),
            None if of_right is None else product(_finite(xp, left), of_right),
        )
        for mask in (*masks, *([xp.isfinite(output)] if drops_nonfinite else [])):
            changed = xp.where(mask, changed, 0.0)
        return changed

    masks = () if isinstance(allowed, bool) else (allowed,)
    return rules.define(compute, tangent, left, right, *masks, of_pairs=True)


def weigh_differentiably(
    rules: TangentRules, xp: Namespace, p: Array, value: Array, allowed: Array, guard: NonfiniteGuard
) -> Array:
    """Return what `weigh` returns."""

    def compute(p: Array, value: Array, allowed: Array) -> Array:
        return weigh(xp, p, value, allowed, guard)

    def tangent(arrays: Sequence[Array], output: Array, tangents: Sequence[Array | None]) -> Array:
        (p, value, allowed), (of_p, of_value, _) = arrays, tangents
        of_value = None if of_value is None else _weigh_tangent(xp, p, of_value, allowed, output)
        return _sum(None if of_p is None else matmul_grouped(xp, of_p, _finite(xp, value)), of_value)

    return rules.define(compute, tangent, p, value, allowed)


def _weigh_tangent(xp: Namespace, p: Array, value_tangent: Array, allowed: Array, output: Array) -> Array:
    """Return p @ value_tangent, whose transpose keeps a NaN in the cotangent of a row out of masked values.

    If the row is empty or NaN, its transpose reads 0 in place of the cotangent and NaN in place of weights.
    """
    is_bad = ~xp.isfinite(xp.sum(output, axis=-1, keepdims=True))
    attends = has_key(xp, allowed) if allowed.ndim else allowed
    p = xp.where(allowed, xp.where(is_bad, math.nan, p), 0.0)
    product = matmul_grouped(xp, p, value_tangent)
    empty = xp.where(attends, math.nan, xp.zeros_like(product))
    return xp.where(xp.logical_and(attends, ~is_bad), product, empty)


def _finite(xp: Namespace, array: Array) -> Array:
    return xp.where(xp.isfinite(array), array, 0.0)


def _sum(*moved: Array | None) -> Array:
    return reduce(add, [array for array in moved if array is not None])  # one of the operands moves
