"""Rows without keys: queries that may attend to no key, because of a mask or because there are no keys.

Their output is 0 and their log-sum-exp -inf, or that of the sink; their weights and their gradients are 0. The
largest score m of such a row is -inf, and the sum l of its exponentials is 0, so exp(m - m) and o / l would be
NaN. What follows from m and l reads `finite_shift` and `avoid_zero_sum` of them instead. A row with a NaN is
not empty: its m is NaN.
"""

from __future__ import annotations

import math

from .._libraries.protocols import Array, Namespace, Shape
from .._tiles.tile import is_masked


def has_key(xp: Namespace, allowed: Array) -> Array:
    """Return which rows may attend to some key, (..., rows, 1)."""
    return xp.any(allowed, axis=-1, keepdims=True)


def finite_shift(xp: Namespace, m: Array) -> Array:
    """Return m, or 0 in a row without a score above -inf, because exp(-inf - -inf) is NaN.

    Only -inf is replaced: a NaN must stay one, or a row that attends it would pass for an empty row.
    """
    return xp.where(is_masked(m), 0.0, m)


def avoid_zero_sum(l: Array, least: float = 1.0) -> Array:
    """Return l, or a tiny number in a row without a key, whose output is then 0 and whose log-sum-exp is -inf.

    The sums of other rows are `least` or more (1 with a maximum), and do not change: the tiny number is less
    than half of their last bit in float64. With a maximum its square is not 0 in float32, so that autograd does
    not compute 0 / 0; without one nothing is differentiated.
    """
    return l + least * 2.0**-55


def sums_without_keys(
    xp: Namespace, query: Array, sinks: Array | None, leading_shape: Shape
) -> tuple[Array, Array]:
    """Return m and l, (..., Hq, rows, 1), of queries that have met no key: -inf and 0, or the sink and 1."""
    zero = xp.zeros_like(query[..., :1])  # on the device of the query
    l = xp.broadcast_to(zero, (*leading_shape, query.shape[-2], 1))
    if sinks is None:
        return zero - math.inf, l
    return zero + sinks, xp.where(is_masked(sinks), l, l + 1.0)
