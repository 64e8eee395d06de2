"""Random inputs for a call, with what is hard to compute: empty rows, NaN behind a mask, large scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._dtypes.conversion import numpy_dtype
from sdpa_xp_export._verify.reference_inputs import Arrays, heads_first, reference_inputs, score_shape
from sdpa_xp_export.spec import TensorSpec, evaluated

LARGE = 40.0
"""The size of large scores: the largest of them have no exponential in float32."""


def random_inputs(
    call: ExportCall, lengths: Mapping[str, int], rng: np.random.Generator, size: float = 1.0
) -> Arrays:
    """Return random inputs for a call whose symbols have `lengths`; its scores are of `size` at any scale.

    A boolean mask is True for three pairs of four. It is False for the whole last key and, if it has a row for
    each query, for the whole first query. A floating mask is -inf at these pairs; its last row is the smallest
    finite number, which does not mask, unless that would make a bound void. Lengths of keys are ragged: the
    first is 0, the last is the whole length.
    """
    arrays: Arrays = {}
    for name, spec in call.inputs.items():
        shape = tuple(evaluated(length, lengths) for length in spec.shape)
        arrays[name] = _drawn(call, name, spec, shape or (1,), lengths, rng).reshape(shape)
    scale = arrays.get("scale", call.scale)
    typical = abs(scale) if isinstance(scale, float) else 1.0
    size_so_far = typical * math.sqrt(arrays["query"].shape[-1])
    arrays["query"] = (arrays["query"] * (size / (size_so_far or 1.0))).astype(numpy_dtype(call.query.dtype))
    return _with_nan_beyond(call, arrays)


def poison(call: ExportCall, arrays: Arrays) -> Arrays:
    """Return the inputs with NaN in every key and value that no query attends; a cache stays unchanged."""
    if call.cached:
        return arrays
    arguments = reference_inputs(call, arrays)
    key, query = arguments["key"], arguments["query"]
    heads = key.shape[-3] if key.ndim > 2 else 1
    pairs = score_shape(query, key, arguments["value"])
    allowed = np.ones(pairs, bool)
    if arguments["attn_mask"] is not None:
        allowed &= arguments["attn_mask"]
    for term in arguments["bias"]:
        if not callable(term):
            allowed &= ~np.isneginf(term)
    by_group = allowed.reshape(
        *pairs[:-3], heads, -1, pairs[-1]
    )  # the heads of a group and their queries as rows
    hidden = np.asarray(~by_group.any(axis=-2))
    poisoned = {}
    for name in ("key", "value"):
        poisoned[name] = arrays[name].copy()
        view = heads_first(call, poisoned[name])
        view[_hidden_everywhere(hidden, view.shape[:-1])] = np.nan
    return arrays | poisoned


def _drawn(
    call: ExportCall,
    name: str,
    spec: TensorSpec,
    shape: tuple[int, ...],
    lengths: Mapping[str, int],
    rng: np.random.Generator,
) -> NDArray[Any]:
    dtype, stem = numpy_dtype(spec.dtype), name.rstrip("_0123456789")
    queries, keys = (evaluated(length, lengths) for length in (call.sizes.queries, call.sizes.keys))
    most = {
        "key_lengths": keys,
        "query_lengths": queries,
        "length": keys,
        "past_lengths": keys - (_new(call, lengths) if call.cached else 0),
    }
    if stem in most:
        drawn = rng.integers(0, most[stem] + 1, shape)
        if drawn.size > 1:
            drawn.flat[0], drawn.flat[-1] = 0, most[stem]
        return _clipped(drawn, dtype)
    if stem in ("query_ids", "key_ids"):
        return np.sort(rng.integers(0, 3, shape), axis=-1).astype(dtype)
    if stem == "offset":
        return _clipped(rng.integers(-2, max(keys - queries, 0) + 3, shape), dtype)
    if stem in ("attn_mask", "bias"):
        return _of_pairs(spec, shape, rng, least=_may_be_least(call))
    if stem == "slopes":
        return np.asarray(rng.random(shape), dtype)
    return rng.standard_normal(shape).astype(dtype)


def _clipped(drawn: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert small integers to `dtype`; those beyond its range go to its ends."""
    ends = np.iinfo(dtype)
    return np.clip(drawn, ends.min, min(ends.max, 2**31)).astype(dtype)


def _may_be_least(call: ExportCall) -> bool:
    """Return whether a bias may hold the smallest finite number without making the bound of an output void.

    The textbook formula loses the scores beside the smallest number of a half dtype, and beside two of them in
    any dtype.
    """
    alone = len(call.biases) == 1 and call.query.dtype not in ("float16", "bfloat16")
    return alone and not {"lse", "scores"} & set(call.outputs)


def _of_pairs(
    spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator, *, least: bool
) -> NDArray[Any]:
    allowed = rng.random(shape) < 0.75
    if shape and shape[-1] > 1:
        allowed[..., -1] = False
    if len(shape) > 1 and shape[-2] > 1:
        allowed[..., 0, :] = False
    if spec.dtype == "bool":
        return allowed
    added = np.where(allowed, rng.standard_normal(shape), -np.inf).astype(numpy_dtype(spec.dtype))
    rows = added.reshape(-1, shape[-1]) if shape else added.reshape(1, 1)
    if least and len(rows) > 2:
        rows[-1] = np.where(np.isneginf(rows[-1]), -np.inf, np.finfo(spec.dtype).min)
    return added


def _new(call: ExportCall, lengths: Mapping[str, int]) -> int:
    return evaluated(call.key.shape[call.length_axis], lengths)


def _with_nan_beyond(call: ExportCall, arrays: Arrays) -> Arrays:
    """Put NaN into a padded cache where no token is yet."""
    if call.past_lengths is None:
        return arrays
    for name in ("past_key", "past_value"):
        view = heads_first(call, arrays[name])
        for entry, filled in enumerate(arrays["past_lengths"].tolist()):
            view[entry, :, filled:] = np.nan
    return arrays


def _hidden_everywhere(hidden: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return, for an array of `shape`, what is hidden from all entries of the broadcast batch that read it."""
    extra = tuple(range(hidden.ndim - len(shape)))
    broadcast = tuple(i for i, n in enumerate(shape) if n == 1)
    everywhere = np.all(np.all(hidden, axis=extra), axis=broadcast, keepdims=True)
    return np.broadcast_to(everywhere, shape)
