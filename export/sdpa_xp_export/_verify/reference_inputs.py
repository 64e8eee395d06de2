"""A call on arrays in the terms of the reference: one boolean mask, what is added, and all keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import with_operands
from sdpa_xp_export._verify.pair_terms import Arrays, PairTerms, numbers


def reference_inputs(
    call: ExportCall, arrays: Mapping[str, NDArray[Any]], rows: NDArray[np.int64] | None = None
) -> Arrays:
    """Convert inputs of the graph to arguments of `reference.attention`, with heads before lengths.

    In a padded cache, tokens that are not real become 0 and are masked.

    Args:
        call: The call.
        arrays: The inputs, by name.
        rows: The queries to convert, which rise; by default all of them.
    """
    arrays = {name: x.astype(np.int64) if x.dtype.kind in "iu" else x for name, x in arrays.items()}
    query, key, value = (heads_first(call, arrays[name]) for name in ("query", "key", "value"))
    filled = None
    if call.cached:
        past = [heads_first(call, arrays[f"past_{name}"]) for name in ("key", "value")]
        if call.past_lengths is None:
            key, value = (np.concatenate(pair, axis=-2) for pair in zip(past, (key, value), strict=True))
        else:
            filled = arrays["past_lengths"] + key.shape[-2]
            key, value = (_written(old, new, filled) for old, new in zip(past, (key, value), strict=True))
    pairs = score_shape(query, key, value)
    rows = np.arange(pairs[-2]) if rows is None else rows
    terms = PairTerms(call, arrays, pairs, filled, rows)
    return {
        "query": query[..., rows, :],
        "key": key,
        "value": value,
        "attn_mask": terms.allowed(),
        "bias": terms.added(),
        "scale": _of_rows(numbers(call.scale, arrays), rows),
        "softcap": call.softcap,
        "sinks": numbers(call.sinks, arrays),
    }


def reference_shape(call: ExportCall, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, ...]:
    """Return the shape of the scores, (..., Hq, L, S), or (L, S) if the inputs have neither heads nor a batch.

    The keys of a joined cache count; a padded cache has its whole length.
    """
    query, key, value = (heads_first(call, arrays[name]) for name in ("query", "key", "value"))
    pairs = score_shape(query, key, value)
    if not call.cached:
        return pairs
    past = heads_first(call, arrays["past_key"]).shape[-2]
    return (*pairs[:-1], past + (pairs[-1] if call.past_lengths is None else 0))


def with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a mask or a bias with the arrays of a run instead of its inputs, and an operand as its array."""
    if isinstance(value, Mask | Bias):
        return with_operands(value, lambda _, operand: with_arrays(operand, arrays))
    return numbers(value, arrays)


def library_arguments(call: ExportCall, arrays: Mapping[str, Any]) -> Arrays:
    """Convert inputs of the graph to keywords of `sdpa_xp.scaled_dot_product_attention`, without the cache."""
    arguments = {name: arrays[name] for name in ("query", "key", "value")}
    operands = ("attn_mask", "bias", "scale", "sinks")
    arguments |= {name: with_arrays(getattr(call, name), arrays) for name in operands}
    options = ("is_causal", "softcap", "softmax_dtype", "layout")
    return arguments | {name: getattr(call, name) for name in options}


def expected_cache(call: ExportCall, arguments: Arrays) -> Arrays:
    """Return the cache that the graph returns, with 0 where no token is."""
    return {f"present_{name}": heads_first(call, arguments[name]) for name in ("key", "value")}


def heads_first(call: ExportCall, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the call as a view with heads before lengths; the same swap leads back."""
    return array if call.length_axis == -2 or array.ndim < 3 else array.swapaxes(-2, -3)


def score_shape(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> tuple[int, ...]:
    """Return (..., Hq, L, S), or (L, S) if the inputs have neither heads nor a batch."""
    if query.ndim == key.ndim == value.ndim == 2:
        return query.shape[-2], key.shape[-2]
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    heads = query.shape[-3] if query.ndim > 2 else 1
    return (*batch, heads, query.shape[-2], key.shape[-2])


def _written(past: NDArray[Any], new: NDArray[Any], filled: NDArray[Any]) -> NDArray[Any]:
    """Return the real tokens of `past`, the new ones behind them, and 0 beyond."""
    cache = np.zeros_like(past)
    count = new.shape[-2]
    for entry, stop in enumerate(filled):
        cache[entry, :, : stop - count] = past[entry, :, : stop - count]
        cache[entry, :, stop - count : stop] = new[entry]
    return cache


def _of_rows(scale: Any, rows: NDArray[np.int64]) -> Any:
    """Return the rows of a scale that has one for each query, (..., L, 1)."""
    per_query = isinstance(scale, np.ndarray) and scale.ndim > 1 and scale.shape[-2] > 1
    return scale[..., rows, :] if per_query else scale
