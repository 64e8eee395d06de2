"""The golden reference: attention in float64 NumPy, one row after the other, plainly.

It shares no code with the library. A row looks only at the keys that it may attend, so what is masked
cannot matter and a row without a key needs no rule of its own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def attention(
    query: NDArray[np.generic],
    key: NDArray[np.generic],
    value: NDArray[np.generic],
    attn_mask: NDArray[np.generic] | None = None,
    *,
    bias: NDArray[np.generic] | None = None,
    is_causal: bool = False,
    scale: float | NDArray[np.generic] | None = None,
    softcap: float | None = None,
) -> tuple[Floats, Floats, Floats]:
    """Output (..., Hq, L, Ev), log-sum-exp (..., Hq, L) and weights (..., Hq, L, S), in float64.

    Arguments are those of `sdpa_xp.scaled_dot_product_attention`, as NumPy arrays of any floating dtype.
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
    added = np.zeros(pairs)
    for term in (attn_mask, bias):
        if term is not None and term.dtype == np.bool_:
            allowed = allowed & term
        elif term is not None:
            added = added + np.asarray(term, np.float64)
    allowed = allowed & (added != -np.inf)

    output, lse, weights = np.zeros((*pairs[:-1], v.shape[-1])), np.full(pairs[:-1], -np.inf), np.zeros(pairs)
    q, k, v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
    for *entry, head, i in np.ndindex(*pairs[:-1]):
        at, shared = (*entry, head, i), (*entry, head // group)
        js = [j for j in range(keys) if allowed[(*at, j)] and not (is_causal and j > i)]
        if not js:
            continue
        scores = (k[shared][js] @ q[at]) * scales[at]
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = scores + added[at][js]
        exponentials = np.exp(scores - scores.max())
        total = exponentials.sum()
        weights[at][js] = exponentials / total
        output[at] = weights[at][js] @ v[shared][js]
        lse[at] = scores.max() + math.log(total) if total == total else math.nan
    return (output[0], lse[0], weights[0]) if flat else (output, lse, weights)
