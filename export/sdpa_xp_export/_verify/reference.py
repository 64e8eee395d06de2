"""Attention by its formula: the golden reference in float64, the textbook formula in any dtype, and magnitudes.

The reference is written in the plainest way, one row after the other, and shares no code with the library. A
row uses only the keys that it may attend to, so masked keys have no effect, and a row without keys is no
special case. The textbook formula computes with whole arrays of any library, and rounds each step to the dtype
of the input.

The magnitude of an element is the size of the numbers whose rounding causes its error. If every product and
every score is off by one part in 2**n, then to first order an element is off by at most one part in 2**n of its
magnitude. So a bound relative to magnitudes is as strict for a small element as for the largest one, for scores
of any size.

The spread of an element is the standard deviation of the rounding errors of its sum over the keys, in units of
epsilon: the sum may be rounded once for each key. It grows with the number of keys where one large term is
among many small ones, since it may be the first. The terms of a statistic may be equal, if all scores are. Then
their roundings may all have one sign, and four spreads are what they come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from .._runtime.limits import check_time

Floats: TypeAlias = NDArray[np.float64]
STEP = 2.0**-20
"""The step of the finite difference that approximates the derivative of a function of the scores."""
REACH = 2.0**-8
"""The most that a score is off by, over its magnitude."""
UNIFORM = 1 / math.sqrt(12)
"""The standard deviation of a rounding error, which is uniform, over its range."""
DRIFT = 3 / 16
"""By how much each of many equal terms may move their sum, in units of epsilon times the sum, if they are added
one after the other, and all roundings have one sign. At the worst, the sum is 4/3 of a power of 2: a quarter of
the terms are rounded by up to half an epsilon of this power, the half before by a quarter of it, and so on."""
Addend: TypeAlias = NDArray[Any] | Callable[..., Any]
"""An array that is added, or score_mod(score, batch, head, query_index, key_index) -> score."""


def attention(*arguments: Any, **keywords: Any) -> tuple[Floats, Floats, Floats]:
    """Return output (..., Hq, L, Ev), log-sum-exp (..., Hq, L) and weights (..., Hq, L, S), in float64.

    The arguments are those of `attention_and_scores`.
    """
    return attention_and_scores(*arguments, **keywords)[:3]


def attention_and_scores(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    attn_mask: NDArray[Any] | None = None,
    *,
    bias: Addend | tuple[Addend, ...] | None = None,
    is_causal: bool = False,
    scale: float | NDArray[Any] | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return what `attention` returns, and the scores (..., Hq, L, S), which are -inf where a pair is masked.

    Arguments are those of `sdpa_xp.scaled_dot_product_attention`, as NumPy arrays of any floating dtype; there
    may be several biases.
    """
    flat = query.ndim == key.ndim == value.ndim == 2
    q, k, v = (np.asarray(x, np.float64).reshape((1,) * (x.ndim == 2) + x.shape) for x in (query, key, value))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads, queries, keys, group = q.shape[-3], q.shape[-2], k.shape[-2], q.shape[-3] // max(k.shape[-3], 1)
    pairs = (*batch, heads, queries, keys)
    scales = np.broadcast_to(
        1 / math.sqrt(q.shape[-1]) if scale is None else np.asarray(scale, np.float64), (*pairs[:-1], 1)
    )
    allowed = np.ones(pairs, bool)
    terms: list[Any] = []
    for term in (attn_mask, *(bias if isinstance(bias, tuple) else (bias,))):
        if callable(term):
            terms.append(term)
        elif term is not None and term.dtype == np.bool_:
            allowed = allowed & term
        elif term is not None:
            terms.append(np.broadcast_to(np.asarray(term, np.float64), pairs))
            allowed = allowed & (terms[-1] != -np.inf)
    extra = np.broadcast_to(np.asarray(-math.inf if sinks is None else sinks, np.float64), pairs[:-2])

    output, lse, weights = np.zeros((*pairs[:-1], v.shape[-1])), np.full(pairs[:-1], -np.inf), np.zeros(pairs)
    all_scores = np.full(pairs, -np.inf)
    q, k, v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
    for count, (*entry, head, i) in enumerate(np.ndindex(*pairs[:-1])):
        check_time()
        row, shared = (*entry, head, i), (*entry, head // group)
        (js,) = (allowed[row][: i + 1] if is_causal else allowed[row]).nonzero()
        scores = (k[shared][js] @ q[row]) * scales[row]
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        for term in terms:
            if callable(term):
                index = (np.asarray([number]) for number in (count // (heads * queries), head, i))
                scores = np.broadcast_to(term(scores, *index, js), scores.shape)
            else:
                # Pairs with -inf are not in js.
                scores = np.maximum(scores + term[row][js], np.finfo(float).min)
            unmasked = ~np.isneginf(scores)  # a pair that a function masked stays masked
            js, scores = js[unmasked], scores[unmasked]
        all_scores[row][js] = scores
        sink = float(extra[row[:-1]])
        largest = float(scores.max(initial=sink))
        if largest != -math.inf:  # else no key has a weight
            exponentials = np.exp(scores - largest)
            total = float(exponentials.sum()) + math.exp(sink - largest)
            lse[row] = largest + math.log(total) if total == total else math.nan
            weights[row][js] = exponentials / total
        output[row] = weights[row][js] @ v[shared][js]
    results = output, lse, weights, all_scores
    return (output[0], lse[0], weights[0], all_scores[0]) if flat else results


def statistics(xp: Any, scores: Any, weights: Any) -> dict[str, Any]:
    """Return `row_max`, `entropy` and `key_sums` of scores and weights (..., L, S); 0 log 0 is 0."""
    information = -xp.log(xp.where(weights == 0, xp.ones_like(weights), weights))
    return {
        "row_max": xp.max(scores, axis=-1),
        "entropy": xp.sum(weights * information, axis=-1),
        "key_sums": xp.sum(weights, axis=-2),
    }


def textbook(xp: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return softmax(q k^T * scale + bias) v; the arguments are the same as for `stages`."""
    return stages(xp, *arguments, **keywords)["output"]


def stages(
    xp: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    scale: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> dict[str, Any]:
    """Return `scores`, `weights`, `lse`, `output` and statistics, in the namespace `xp`; `bias` may be a tuple.

    A row without a key is set to 0, and its lse to -inf.
    """
    dtype, width = query.dtype, query.shape[-1]

    def rounded(x: Any) -> Any:
        return xp.astype(x, dtype)

    if query.ndim > 2:
        key, value = (with_heads(xp, x, query.shape[-3]) for x in (key, value))
    scale = 1 / math.sqrt(width) if scale is None else scale
    scale = scale if isinstance(scale, int | float) else rounded(scale)
    scores = rounded(rounded(product(xp, query, xp.matrix_transpose(key))) * scale)
    if softcap:
        scores = rounded(rounded(xp.tanh(rounded(scores / softcap))) * softcap)
    masked = scores != scores  # no pair yet
    for term in (attn_mask, *(bias if isinstance(bias, tuple) else (bias,))):
        if term is None:
            continue
        if callable(term):
            scores = rounded(xp.broadcast_to(term(scores, *indices(xp, scores)), scores.shape))
        elif str(term.dtype).endswith("bool"):
            scores = xp.where(term, scores, -math.inf)
        else:
            scores = rounded(scores + rounded(term))
        masked = masked | (scores == -math.inf)  # a later function cannot unmask it
    scores = xp.where(masked, -math.inf, scores)
    if is_causal:
        later = xp.triu(xp.ones_like(scores), k=1) > 0
        scores = xp.where(later, -math.inf, scores)
    scores = rounded(scores)
    largest = xp.max(scores, axis=-1, keepdims=True)
    sinks = None if sinks is None else rounded(xp.reshape(sinks, (*sinks.shape, 1, 1)))
    largest = largest if sinks is None else xp.maximum(largest, sinks)
    empty = largest == -math.inf
    shift = xp.where(empty, xp.zeros_like(largest), largest)
    exponentials = rounded(xp.exp(rounded(scores - shift)))
    total = rounded(xp.sum(exponentials, axis=-1, keepdims=True))
    total = total if sinks is None else rounded(total + rounded(xp.exp(rounded(sinks - shift))))
    weights = rounded(exponentials / xp.where(empty, xp.ones_like(total), total))
    lse = rounded(rounded(xp.log(xp.where(empty, xp.ones_like(total), total))) + shift)
    lse = xp.where(empty, largest, lse)[..., 0]
    results = {"scores": scores, "weights": weights, "lse": lse, "output": rounded(product(xp, weights, value))}
    return results | {name: rounded(x) for name, x in statistics(xp, scores, weights).items()}


def with_heads(xp: Any, x: Any, heads: int) -> Any:
    """Return keys or values with one head for each of the `heads` of the query."""
    group = heads // max(x.shape[-3], 1) if x.ndim > 2 else 1
    return xp.repeat(x, group, axis=-3) if group > 1 else x


def product(xp: Any, first: Any, second: Any) -> Any:
    """Return the matrix product. NumPy multiplies bfloat16 of CuPy, which cannot with three axes or more."""
    if not (array_api_compat.is_cupy_array(first) and first.dtype.name == "bfloat16"):
        return first @ second
    on_host = first.get().astype(np.float32) @ second.get().astype(np.float32)
    return xp.asarray(on_host, device=first.device)


def indices(xp: Any, scores: Any) -> tuple[Any, ...]:
    """Return batch entry, head, query and key of each score."""
    *batch, heads, queries, keys = scores.shape
    entries = xp.reshape(xp.arange(math.prod(batch)), (*batch, 1, 1, 1))
    return (
        entries,
        xp.reshape(xp.arange(heads), (heads, 1, 1)),
        xp.reshape(xp.arange(queries), (queries, 1)),
        xp.arange(keys),
    )


def magnitudes(
    arguments: Mapping[str, Any], exact: Mapping[str, Floats]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return the magnitude of each output, and the sizes of the terms of outputs that may be smaller.

    Args:
        arguments: The arguments of `reference.attention`, in float64.
        exact: What the reference returned, by name.
    """
    lse, weights = exact["lse"], exact["weights"]
    query, key, value = (np.asarray(arguments[name], np.float64) for name in ("query", "key", "value"))
    if query.ndim > 2:
        key, value = (with_heads(np, x, query.shape[-3]) for x in (key, value))
    scores = _of_scores(arguments, query, key)
    of_attended = np.where(weights > 0, scores, 0.0)
    mean = np.sum(weights * of_attended, axis=-1, keepdims=True)
    if arguments["sinks"] is not None:
        rest = 1 - np.sum(weights, axis=-1, keepdims=True)
        sinks = np.abs(np.where(np.isfinite(arguments["sinks"]), arguments["sinks"], 0.0))
        mean = mean + rest * (sinks[..., None, None] if query.ndim > 2 else sinks.reshape(1, 1))
    of_weights = np.where(weights > 0, weights * (1 + of_attended + mean), 0.0)
    of_lse = 1 + np.abs(np.where(np.isfinite(lse), lse, 0)) + mean[..., 0]
    sizes = np.abs(np.where(np.isfinite(value), value, 0))
    information = _information(weights)
    # A score whose error does not reach the largest one has no part in it.
    may_be_largest = exact["scores"] + REACH * scores >= exact["row_max"][..., None]
    of_statistics = {
        "row_max": np.max(np.where(may_be_largest, scores, 0.0), axis=-1, initial=0.0),
        # The derivative of -w log w is -(1 + log w), and the logarithm of the sum is off by one part.
        "entropy": 1 + np.sum(of_weights * information, axis=-1),
        "key_sums": np.sum(of_weights, axis=-2),
    }
    return (
        {"output": of_weights @ sizes, "lse": of_lse, "weights": of_weights, "scores": scores} | of_statistics,
        {"output": np.asarray(weights @ sizes), "entropy": np.sum(weights * information, axis=-1)},
    )


def spreads(value: NDArray[Any], exact: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the spreads of all outputs; a score has none.

    Args:
        value: The values, in any dtype.
        exact: What the reference returned, by name.
    """
    both = (np.asarray(x, np.float64) for x in (exact["weights"], value))
    weights, value = (np.where(np.isfinite(x), x, 0.0) for x in both)
    if value.ndim > 2:
        value = with_heads(np, value, weights.shape[-3])
    keys, queries = (np.count_nonzero(weights, axis=axis) for axis in (-1, -2))
    of_sum = UNIFORM * np.sqrt(keys)[..., None]
    of_equal, of_queries = (np.maximum(UNIFORM * np.sqrt(n), DRIFT / 4 * n) for n in (keys, queries))
    # In any order of the terms, partial sums are about as large as the largest term, or as the whole sum.
    partial = np.sqrt(np.square(exact["output"]) + np.square(weights) @ np.square(value))
    return {
        "output": of_sum * partial,
        "lse": of_sum[..., 0],
        "weights": of_sum * weights,
        "scores": np.zeros(()),
        "row_max": np.zeros(()),
        "entropy": of_equal * np.sum(weights * _information(weights), axis=-1),
        "key_sums": of_queries * np.sum(weights, axis=-2),
    }


def _information(weights: Floats) -> Floats:
    """Return 1 - log w, and 1 where w is 0: what w is multiplied with in the size of a term of an entropy."""
    return np.asarray(1 - np.log(np.where(weights > 0, weights, 1.0)))


def _of_scores(arguments: Mapping[str, Any], query: Floats, key: Floats) -> Floats:
    """Return the magnitude of the scores after each step: q k^T, scale, softcap and biases."""
    scale = np.asarray(arguments["scale"], np.float64)
    scores = (query @ np.swapaxes(key, -1, -2)) * scale
    size = (np.abs(query) @ np.swapaxes(np.abs(key), -1, -2)) * np.abs(scale)
    cap = arguments["softcap"]
    if cap:  # tanh is steep for small scores, and flat for large ones
        capped = cap * np.tanh(scores / cap)
        size = np.abs(cap * np.tanh((scores + STEP * size) / cap) - capped) / STEP + np.abs(capped)
        scores = capped
    for term in arguments["bias"]:
        if callable(term):
            positions = indices(np, scores)
            changed = np.broadcast_to(term(scores, *positions), scores.shape)
            size = np.abs(term(scores + STEP * size, *positions) - changed) / STEP + np.abs(changed)
            scores = changed
        else:
            added = np.where(np.isfinite(term), np.asarray(term, np.float64), 0.0)
            scores, size = scores + added, size + np.abs(added)
    return np.asarray(np.where(np.isfinite(size), size, 0.0))
