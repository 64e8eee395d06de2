"""Attention tile by tile with the online softmax: memory grows with L + S, never with L * S.

Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3;
Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1. One tile is the textbook formula.

A row is held as m, the largest score so far; l, the sum of exp(score - m); and o, the sum of
exp(score - m) * value. Each new tile rescales l and o by exp(m_old - m_new) and adds its own part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias

from sdpa_xp import threads
from sdpa_xp._libraries import astype_if_needed, exp_in_place, is_traced, quiet
from sdpa_xp._libraries.protocols import Array, Dtype, Namespace
from sdpa_xp.biases.algebra import is_masked
from sdpa_xp.bounds import LEAST_SUM, Bounds
from sdpa_xp.masks.algebra import Allowed
from sdpa_xp.pairs import Block
from sdpa_xp.scores import Scores, attended, matmul_grouped, of_keys
from sdpa_xp.sources import Source
from sdpa_xp.tiles import Plan, Task

Guard: TypeAlias = Literal["none", "columns", "pairs"]
"""How a NaN or inf in a masked value is kept out, since a weight of zero does not suffice: 0 * NaN is NaN.

"columns" blanks the values that no query of the tile attends: all that a traced graph can afford.
"pairs" tells attended from masked for every single pair, at the price of three more products.
"""


def attend(
    scores: Scores, value: Source, plan: Plan, dtype: Dtype, *, with_lse: bool = True
) -> tuple[Array, Array | None]:
    """Output (..., Hq, L, Ev) in `dtype`, and log-sum-exp (..., Hq, L) in the accumulation dtype if wanted."""
    xp, pairs, bounds = scores.xp, scores.pairs, Bounds({})

    def compute(task: Task) -> tuple[Array, Array | None]:
        own = value if task.part is None else value.of(of_keys(task.part, scores.group))
        rows = _of_rows(scores.of(task.part), own, plan, task.rows, bounds)
        return astype_if_needed(xp, rows.output, dtype), rows.lse(xp) if with_lse else None

    if plan.is_one_task:
        return compute(Task(None, range(plan.queries)))
    if plan.rolled:
        return _in_a_loop(scores, value, plan, dtype, with_lse=with_lse)
    tasks = plan.tasks()
    if not pairs.writeable:
        outputs, lses = zip(*[compute(task) for task in reversed(tasks)], strict=True)
        return xp.concat(outputs, axis=-2), xp.concat(lses, axis=-1) if with_lse else None
    shape = pairs.scores[:-1]
    output = xp.zeros((*shape, value.width), dtype=dtype, device=pairs.device)
    lse = xp.zeros(shape if with_lse else (), dtype=pairs.dtype, device=pairs.device)

    def write(task: Task) -> None:
        ranges = *(task.part or map(range, pairs.leading)), task.rows
        index = tuple(slice(each.start, each.stop) for each in ranges)
        with quiet(scores.query):  # NumPy 1 keeps it by the thread
            output[index], own = compute(task)
        if own is not None:
            lse[index] = own

    threads.run(write, tasks, plan.threads)
    return output, lse


class Rows(NamedTuple):
    """What attention makes of a range of queries."""

    output: Array
    m: Array | None
    """What was subtracted from the scores, (..., Hq, rows, 1); None is 0."""
    l: Array

    def lse(self, xp: Namespace) -> Array:
        """Log-sum-exp, (..., Hq, rows)."""
        lse = xp.log(self.l) if self.m is None else self.m + xp.log(_nonzero(self.l))
        shape = self.output.shape[:-1]  # has the batch of the values too
        return lse[..., 0] if lse.shape[:-1] == shape else xp.broadcast_to(lse[..., 0], shape) + 0.0


def weights(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """Softmax of the scores, (..., Hq, L, S), after dropout."""
    return _stack(scores, [_weights_of(scores, rows) for rows in plan.row_ranges()], dtype)


def scores_of_all(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """The scores themselves, (..., Hq, L, S), -inf where a pair may not attend."""
    parts = [_scores_of(scores, rows)[0] for rows in plan.row_ranges()]
    return _stack(scores, parts, dtype)


def merge(xp: Namespace, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Output and log-sum-exp over all keys, from those over disjoint parts of them."""
    m = reduce(xp.maximum, (lse for _, lse in parts))
    shift = _finite_shift(xp, m)
    l, o = xp.zeros_like(m), xp.expand_dims(xp.zeros_like(m), axis=-1)
    for output, lse in parts:
        weight = xp.exp(lse - shift)
        weighed = xp.astype(output, m.dtype, copy=False) * xp.expand_dims(weight, axis=-1)
        l = l + weight
        o = o + xp.where(xp.expand_dims(is_masked(lse), axis=-1), 0.0, weighed)
    total = _nonzero(l)
    return o / xp.expand_dims(total, axis=-1), m + xp.log(total)


def _in_a_loop(
    scores: Scores, value: Source, plan: Plan, dtype: Dtype, *, with_lse: bool
) -> tuple[Array, Array | None]:
    """What `attend` returns, a block of queries after the other; the last begins so early that it is full."""
    xp, pairs, every = scores.xp, scores.pairs, range(plan.queries)

    def compute(start: Array) -> tuple[Array, Array | None]:
        block = scores.within(Block(start, plan.rows))
        rows = _with_maximum(block, block.scaled_query(every), value, plan, every, "columns")
        return astype_if_needed(xp, rows.output, dtype), xp.expand_dims(
            rows.lse(xp), axis=-1
        ) if with_lse else None

    passes = xp.arange(0, -(-plan.queries // plan.rows), dtype=xp.int32, device=pairs.device)
    outputs, lses = pairs.library.rolled(compute, xp.clip(passes * plan.rows, 0, plan.queries - plan.rows))
    lse = None if lses is None else _joined(xp, lses, plan.queries)[..., 0]
    return _joined(xp, outputs, plan.queries), lse


def _joined(xp: Namespace, blocks: Array, queries: int) -> Array:
    """(blocks, ..., rows, width) -> (..., L, width), without the rows of the last block that another has."""
    count, *leading, rows, width = blocks.shape
    axes = (*range(1, blocks.ndim - 2), 0, blocks.ndim - 2, blocks.ndim - 1)
    joined = xp.reshape(xp.permute_dims(blocks, axes), (*leading, count * rows, width))
    twice, last = count * rows - queries, (count - 1) * rows
    if not twice:
        return joined
    return xp.concat([joined[..., :last, :], joined[..., last + twice :, :]], axis=-2)


def _of_rows(scores: Scores, value: Source, plan: Plan, rows: range, bounds: Bounds) -> Rows:
    """Attention of one range of queries."""
    query = scores.scaled_query(rows)
    if scores.pairs.traced:
        return _with_maximum(scores, query, value, plan, rows, "columns")
    if plan.bounded and bounds.hold(scores, query, plan):
        found = _without_maximum(scores, query, value, plan, rows)
        if bounds.suffice(scores.xp, found.output, found.l):
            return found
    found = _with_maximum(scores, query, value, plan, rows, "none")
    if scores.unmasked:
        return found
    if is_traced(found.output):  # by what a function of the caller holds
        return _with_maximum(scores, query, value, plan, rows, "columns")
    return (
        _with_maximum(scores, query, value, plan, rows, "pairs") if _any_nonfinite(scores.xp, found) else found
    )


def _with_maximum(scores: Scores, query: Array, value: Source, plan: Plan, rows: range, guard: Guard) -> Rows:
    xp = scores.xp
    state = None if scores.sinks is None else _without_keys(scores, query, value.width)
    for tile, allowed in scores.tiles(rows, plan):
        s, allowed = scores.on(tile, query, allowed)
        m_new = xp.max(s, axis=-1, keepdims=True)
        if state is not None:
            m_new = xp.maximum(state[0], m_new)
        shift = _finite_shift(xp, m_new)
        p = _exp(scores, s, shift)
        l_new = xp.sum(p, axis=-1, keepdims=True)
        kept = p if scores.dropout is None else scores.dropout.apply(tile, p)
        v = astype_if_needed(xp, value.cut(tile.columns), scores.pairs.dtype)
        o_new = _weigh(xp, kept, v, allowed, guard)
        if state is not None:
            m, l, o = state
            rescale = xp.exp(m - shift)
            l_new, o_new = l * rescale + l_new, o * rescale + o_new
        state = m_new, l_new, o_new
    m, l, o = state or _without_keys(scores, query, value.width)
    return Rows(o / _nonzero(l), m, l)


def _without_maximum(scores: Scores, query: Array, value: Source, plan: Plan, rows: range) -> Rows:
    """With m = 0, which is exact where the scores are bounded."""
    xp, pairs = scores.xp, scores.pairs
    leading = pairs.scores[:-2]
    l, o = (
        xp.zeros((*leading, len(rows), n), dtype=pairs.dtype, device=pairs.device) for n in (1, value.width)
    )
    ones = xp.full((plan.columns, 1), 1.0, dtype=pairs.dtype, device=pairs.device)
    for tile, allowed in scores.trimmed(rows, plan):
        own = (..., slice(tile.rows.start - rows.start, tile.rows.stop - rows.start), slice(None))
        s, _ = scores.on(tile, query[own], True)
        p = exp_in_place(xp, s)
        if not isinstance(allowed, bool):
            attends = xp.astype(allowed, p.dtype)
            if p.shape[:-2] == leading:
                p *= attends
            else:  # the values and the mask have a batch that queries and keys do not have
                p = p * attends
        l[own] += p @ ones[: len(tile.columns), :]
        kept = p if scores.dropout is None else scores.dropout.apply(tile, p)
        o[own] += matmul_grouped(xp, kept, astype_if_needed(xp, value.cut(tile.columns), pairs.dtype))
    return Rows(o / _nonzero(l, LEAST_SUM), None, l)


def _weights_of(scores: Scores, rows: range) -> Array:
    xp = scores.xp
    s, allowed = _scores_of(scores, rows)
    if 0 in s.shape:
        return s
    m = xp.max(s, axis=-1, keepdims=True)
    if scores.sinks is not None:
        m = xp.maximum(m, scores.sinks)
    shift = _finite_shift(xp, m)
    p = xp.exp(s - shift)
    l = xp.sum(p, axis=-1, keepdims=True)
    if scores.sinks is not None:
        l = l + xp.exp(scores.sinks - shift)
    w = p / _nonzero(l)
    w = w if isinstance(allowed, bool) else xp.where(allowed, w, 0.0)
    if scores.dropout is None:
        return w
    return scores.dropout.apply(scores.tile(rows, range(scores.pairs.keys)), w)


def _scores_of(scores: Scores, rows: range) -> tuple[Array, Allowed]:
    """All scores of one range of queries, (..., Hq, rows, S), and the pairs that may attend."""
    xp = scores.xp
    query = scores.scaled_query(rows)
    tile = scores.tile(rows, range(scores.pairs.keys))
    allowed = False if 0 in tile.shape else scores.mask.on(tile)
    if allowed is False:
        return xp.broadcast_to(xp.zeros_like(query[..., :1]) - math.inf, tile.shape), False
    s, allowed = scores.on(tile, query, allowed)
    return xp.broadcast_to(s, tile.shape), allowed


def _stack(scores: Scores, parts: Sequence[Array], dtype: Dtype) -> Array:
    return scores.xp.concat([scores.xp.astype(part, dtype, copy=False) for part in parts], axis=-2)


def _exp(scores: Scores, s: Array, shift: Array) -> Array:
    """exp(s - shift), in the memory of s where that can be written to, and no one else holds it."""
    if scores.biases or not scores.pairs.writeable or s.shape[:-1] != shift.shape[:-1]:
        return scores.xp.exp(s - shift)
    s -= shift
    return exp_in_place(scores.xp, s)


def _without_keys(scores: Scores, query: Array, width: int) -> tuple[Array, Array, Array]:
    """m, l and o of rows that have met no key: -inf, 0 and 0, or the sink, 1 and 0."""
    xp, sinks = scores.xp, scores.sinks
    zero = xp.zeros_like(query[..., :1])  # so on the device of the query
    l, o = (xp.broadcast_to(zero, (*scores.pairs.scores[:-2], query.shape[-2], n)) for n in (1, width))
    if sinks is None:
        return zero - math.inf, l, o
    return zero + sinks, xp.where(is_masked(sinks), l, l + 1.0), o


def _finite_shift(xp: Namespace, m: Array) -> Array:
    """m, or 0 where a row has no score above -inf: exp(-inf - -inf) would be NaN.

    Only -inf is replaced: a NaN must stay one, or a row that attends it would pass for an empty row.
    """
    return xp.where(is_masked(m), 0.0, m)


def _nonzero(l: Array, least: float = 1.0) -> Array:
    """l, or a tiny number in a row without a key, whose output is then 0 and whose log-sum-exp is -inf.

    Other rows have `least` at least, with a maximum 1, and stay as they are: what is added is less than half
    of its last bit in float64. Its square is no zero in float32, so that gradients are none of 0 / 0.
    """
    return l + least * 2.0**-55


def _weigh(xp: Namespace, p: Array, value: Array, allowed: Allowed, guard: Guard) -> Array:
    """p @ value over the pairs that may attend."""
    if guard == "none" or isinstance(allowed, bool):
        return matmul_grouped(xp, p, value)
    if guard == "columns":
        return matmul_grouped(xp, p, xp.where(attended(xp, allowed, value.shape[-3]), value, 0.0))
    product = matmul_grouped(xp, p, xp.where(xp.isfinite(value), value, 0.0))
    attends = xp.astype(xp.broadcast_to(allowed, p.shape), p.dtype)
    specials = {math.nan: xp.isnan(value), math.inf: value >= math.inf, -math.inf: value <= -math.inf}
    for special, where in specials.items():
        met = matmul_grouped(xp, attends, xp.astype(where, p.dtype)) > 0.0
        product = xp.where(met, product + special, product)
    return product


def _any_nonfinite(xp: Namespace, found: Rows) -> bool:
    """Whether a NaN or inf got in; where Ev = 0, l tells."""
    return not bool(xp.isfinite(xp.sum(found.output) + xp.sum(found.l)))
