"""How programs are run: at once, in threads, or in loops of a compiler; and their memory.

    executors  run a program: at once, in threads or in loops, and again where a masked NaN got in
    bands      of queries, each a loop of a compiler
    threads    of this process, with BLAS held to one
    program    what a program says, and where it puts what it computes
    buffers    the memory of tiles, and operations in it

An executor knows no program.

Here are the products with keys and values, whose heads a group shares, and what keeps NaN and inf out of them.

A masked key or value may be NaN, and a weight of zero does not keep it out, because 0 * NaN is NaN. A check of
each pair costs three more products. So the eager path first computes without a guard. If the output contains
NaN or inf, the affected rows are computed again with the guard "pairs".

A row without keys attends to none, because of a mask or because there are no keys. Its output is 0 and its
log-sum-exp -inf, or that of the sink; its weights and its gradients are 0. Its largest score m is -inf, and the
sum l of its exponentials is 0, so exp(m - m) and o / l would be NaN. What follows from m and l reads
`finite_shift` and `avoid_zero_sum` of them instead. A row with a NaN is not empty: its m is NaN.

A masked pair has weight 0, and its score has cotangent 0. But derivatives multiply both with the other operand
of a product, so what a library differentiates has derivatives of its own, which read 0 in place of NaN and inf.
They are linear rules, which the library transposes for reverse mode and differentiates again. A row that
attends to a NaN still shows it: its weights or its output are NaN, and each derivative has one as a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from .._libraries import JETS, is_traced, library_of, namespace_of
from .._libraries.base import TangentRules
from .._libraries.protocols import Array, Namespace, Shape
from .._tiles import Allowed, LeadingSlice, is_masked, tuning

if TYPE_CHECKING:
    from .buffers import Buffer


def product_of(xp: Any, left: Array, right: Array) -> Array:
    """Return left @ right: by a function for jets, because a compiler traces no such operator of theirs."""
    product: Array = xp.matmul(left, right) if xp.__name__[:4] == JETS else left @ right
    return product


def matmul_grouped(xp: Namespace, rows: Array, shared: Array, buffer: Buffer | None = None) -> Array:
    """Return rows (..., Hq, L, X) @ shared (..., H, X, Y), (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated. The product is
    in the memory of `buffer`, if there is one.
    """
    heads, length, _ = rows.shape[-3:]
    is_grouped = heads != shared.shape[-3]
    left = fold_groups(xp, rows, shared.shape[-3]) if is_grouped else rows
    # Leading axes that broadcast are rare, and their product is larger than either side.
    if buffer is None or left.shape[:-2] != shared.shape[:-2]:
        product = product_of(xp, left, shared)
    else:
        shape = (*left.shape[:-1], shared.shape[-1])
        # No call of `array` where the shape is known: every tile would make two.
        out = buffer.views[shape] if shape in buffer.views else buffer.array(shape)
        product = buffer.functions.matmul(left, shared, out=out)
    if not is_grouped:
        return product
    *batch, key_heads, _, columns = product.shape
    split = xp.reshape(product, (*batch, key_heads, heads // key_heads, length, columns))
    return xp.reshape(split, (*batch, heads, length, columns))


def multiply_few_rows(
    xp: Namespace, rows: Array, transposed_keys: Array, buffer: Buffer | None = None
) -> Array:
    """Return what `matmul_grouped` returns: each row alone is multiplied with the keys, which are not copied.

    OpenBLAS 0.3.31 copies the keys for a product with a few rows, but not for one row. With 1,024 keys, E = 64
    or 128, 4 rows take 0.35 times as long with AVX-512, and 0.75 to 0.9 times with AVX2; 7 rows 0.5 to 0.55 and
    0.8 times; 8 rows 0.6 and 1.1 to 1.2 times (one core, Zen 4, float32).
    """
    left, columns = fold_groups(xp, rows, transposed_keys.shape[-3]), transposed_keys.shape[-1]
    keys, vectors = xp.expand_dims(xp.matrix_transpose(transposed_keys), axis=-3), xp.expand_dims(left, axis=-1)
    if buffer is None or left.shape[:-2] != transposed_keys.shape[:-2]:
        product = keys @ vectors
    else:
        out = xp.expand_dims(buffer.array((*left.shape[:-1], columns)), axis=-1)
        product = buffer.functions.matmul(keys, vectors, out=out)
    return xp.reshape(product, (*product.shape[:-4], *rows.shape[-3:-1], columns))


def faster_product(rows: Array, key_heads: int, keys: int) -> Callable[..., Array] | None:
    """Return `multiply_few_rows` for a few rows of each head and many keys; None is `matmul_grouped`."""
    is_few = key_heads < rows.shape[-3] * rows.shape[-2] <= tuning.MOST_ROWS_ALONE * key_heads
    return multiply_few_rows if is_few and keys >= tuning.LEAST_KEYS_ALONE else None


def matmul_over_group(xp: Namespace, key_heads: int, left: Array, right: Array) -> Array:
    """Return left (..., Hq, L, X)^T @ right (..., Hq, L, Y) summed over each group, (..., H, X, Y)."""
    transposed = xp.matrix_transpose(fold_groups(xp, left, key_heads))
    return product_of(xp, transposed, fold_groups(xp, right, key_heads))


def fold_groups(xp: Namespace, rows: Array, key_heads: int) -> Array:
    """Return (..., Hq, L, X) as (..., H, G * L, X): the heads of a group one after the other."""
    *batch, heads, length, width = rows.shape
    if heads == key_heads:
        return rows
    group = heads // key_heads
    library = library_of(rows)
    if library.copies_open_views and not library.is_known(length):
        return xp.concat([rows[..., n::group, :, :] for n in range(group)], axis=-2)
    # Two steps, because not every lazy library can split and merge axes in one reshape. Both are views.
    split = xp.reshape(rows, (*batch, key_heads, group, length, width))
    return xp.reshape(split, (*batch, key_heads, group * length, width))


def multiply_columns(xp: Namespace, rows: Array, factors: Array, *, in_place: bool) -> Array:
    """Return rows (..., Hq, L, X) times factors (..., H, 1, X), which the heads of a group share."""
    *batch, heads, length, columns = rows.shape
    key_heads, split = factors.shape[-3], rows
    if heads != key_heads:
        split = xp.reshape(rows, (*batch, key_heads, heads // key_heads, length, columns))
        factors = xp.expand_dims(factors, axis=-3)
    if in_place:
        split *= factors
    else:
        split = split * factors
    return split if heads == key_heads else xp.reshape(split, (*split.shape[:-4], heads, length, columns))


def any_query_attends(xp: Namespace, allowed: Array, key_heads: int) -> Array:
    """Return whether a query attends to each key, (..., H, columns, 1), from `allowed` (..., Hq, L, S)."""
    if allowed.ndim < 2:  # the same for every query
        return xp.expand_dims(allowed, axis=-1) if allowed.ndim else allowed
    by_head = xp.any(allowed, axis=-2)
    if by_head.ndim >= 2 and by_head.shape[-2] not in (1, key_heads):
        *batch, heads, columns = by_head.shape
        by_head = xp.any(xp.reshape(by_head, (*batch, key_heads, heads // key_heads, columns)), axis=-2)
    return xp.expand_dims(by_head, axis=-1)


def key_leading_slice(leading: LeadingSlice, group: int) -> LeadingSlice:
    """Return the slice of (..., H) that a slice of (..., Hq) reads."""
    *batch, heads = leading
    return (*batch, range(heads.start // group, -(-heads.stop // group)))


NonfiniteGuard: TypeAlias = Literal["none", "columns", "pairs"]
"""What `weigh` keeps out of its product.

"none": nothing. "columns": the values that no query of the tile attends to, which is all that a traced graph
can afford. "pairs": every value that a masked pair would bring in.
"""


def weigh(
    xp: Namespace,
    p: Array,
    value: Array,
    allowed: Allowed,
    guard: NonfiniteGuard,
    buffer: Buffer | None = None,
    rules: TangentRules | None = None,
) -> Array:
    """Return p @ value over the pairs that may attend; without a guard, in the memory of `buffer`.

    With `rules` the library differentiates it.
    """
    if guard == "none" or isinstance(allowed, bool):
        return matmul_grouped(xp, p, value, buffer)
    if rules is not None:
        return rules.define(
            lambda p, value, allowed: weigh(xp, p, value, allowed, guard),
            partial(_weighed_tangent, xp),
            p,
            value,
            allowed,
        )
    if guard == "columns":
        attended = any_query_attends(xp, allowed, value.shape[-3])
        return matmul_grouped(xp, p, xp.where(attended, value, 0.0))
    weigh_pairs: Callable[[Array, Array], Array] = partial(_weigh_pairs, xp, allowed)
    return cast(Array, library_of(value).bilinear(weigh_pairs, p, value))


def _weigh_pairs(xp: Namespace, allowed: Array, p: Array, value: Array) -> Array:
    """Return p @ value over the pairs that may attend, whatever the values of others are."""
    product = matmul_grouped(xp, p, xp.where(xp.isfinite(value), value, 0.0))
    attends = xp.astype(xp.broadcast_to(allowed, p.shape), p.dtype)
    specials = {math.nan: xp.isnan(value), math.inf: value >= math.inf, -math.inf: value <= -math.inf}
    for special, is_special in specials.items():
        # The product counts the special values that a row attends: it gets them if there is one, whatever p is.
        meets = matmul_grouped(xp, attends, xp.astype(is_special, p.dtype)) > 0.0
        product = xp.where(meets, product + special, product)
    return product


def _weighed_tangent(
    xp: Namespace, arrays: Sequence[Array], output: Array, tangents: Sequence[Array | None]
) -> Array:
    """Return how the result of `weigh` moves.

    The transpose for the values keeps a NaN in the cotangent of a row out of masked values. If the row is empty
    or NaN, it reads 0 in place of the cotangent and NaN in place of weights.
    """
    (p, value, allowed), (of_p, of_value, _) = arrays, tangents
    by_p = None if of_p is None else matmul_grouped(xp, of_p, _finite(xp, value))
    if of_value is None:
        return _sum(by_p)
    is_bad = ~xp.isfinite(xp.sum(output, axis=-1, keepdims=True))
    attends = has_key(xp, allowed) if allowed.ndim else allowed
    p = xp.where(allowed, xp.where(is_bad, math.nan, p), 0.0)
    product = matmul_grouped(xp, p, of_value)
    empty = xp.where(attends, math.nan, xp.zeros_like(product))
    return _sum(by_p, xp.where(xp.logical_and(attends, ~is_bad), product, empty))


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


def _finite(xp: Namespace, array: Array) -> Array:
    return xp.where(xp.isfinite(array), array, 0.0)


def _sum(*moved: Array | None) -> Array:
    return reduce(add, [array for array in moved if array is not None])  # one of the operands moves


def is_finite(xp: Namespace, arrays: Sequence[Array]) -> bool | None:
    """Return whether no array has a NaN or inf; if Ev = 0, only the sums l of the rows show it.

    None if one is traced, which a function of the caller may have brought in.
    """
    return None if any(map(is_traced, arrays)) else bool(xp.isfinite(checksum(xp, arrays)))


def are_finite(checksums: Sequence[Array]) -> list[bool] | None:
    """Return whether each of the numbers (n, 1) of some checksums is finite; a device is waited for once.

    None if one is traced.
    """
    if any(map(is_traced, checksums)):
        return None
    xp = namespace_of(checksums[0])
    joined = xp.reshape(checksums[0] if len(checksums) == 1 else xp.concat(checksums, axis=0), (-1,))
    flags: list[bool] = library_of(joined).to_list(xp.isfinite(joined))
    return flags


def checksum(xp: Namespace, arrays: Sequence[Array]) -> Array:
    """Return a number that is NaN or inf if an array has one."""
    return reduce(add, [xp.sum(array) for array in arrays])


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
