"""Attention by the textbook formula: whole arrays, and each step rounded to the dtype of the input."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np


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
    """Return `scores`, `weights`, `lse` and `output`. `xp` is an array-API namespace; `bias` may be a tuple.

    A row without a key is set to 0, and its lse to -inf.
    """
    dtype, width = query.dtype, query.shape[-1]

    def rounded(x: Any) -> Any:
        return xp.astype(x, dtype)

    if query.ndim > 2:
        group = query.shape[-3] // (key.shape[-3] if key.ndim > 2 else 1)
        key, value = (xp.repeat(x, group, axis=-3) if x.ndim > 2 and group > 1 else x for x in (key, value))
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
    return {"scores": scores, "weights": weights, "lse": lse, "output": rounded(product(xp, weights, value))}


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
