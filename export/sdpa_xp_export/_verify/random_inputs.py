"""Random inputs for a call, with hard cases: rows without keys, NaN in masked keys, large scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import Input
from sdpa_xp_export._dtypes.dtype import numpy_dtype
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._runtime.limits import check_time
from sdpa_xp_export._verify.integer_operands import OPERANDS, OperandChoice, TokenCounts, drawn_integers
from sdpa_xp_export._verify.pair_terms import Arrays, numbers
from sdpa_xp_export._verify.reference_inputs import heads_first, reference_inputs, reference_shape
from sdpa_xp_export.spec import TensorSpec, evaluated

LARGEST_FACTOR = {"float16": 2.0**13, "bfloat16": 2.0**124, "float32": 2.0**124, "float64": 2.0**1000}
"""The largest factor with which a normal random number stays finite."""
LARGE_SIZE, HUGE_KEYS = 100.0, 16.0
"""With large scores, values, biases and sinks are multiplied by LARGE_SIZE; with huge scores, keys by
HUGE_KEYS."""
ROWS_AT_ONCE, SCORES_AT_ONCE = 256, 2**22
"""The most queries, and the most pairs, that a mask is asked about at one time."""
DRAWN_AT_ONCE = 2**20
"""The most numbers that are drawn at one time, in float64."""


def random_inputs(
    call: ExportCall,
    lengths: Mapping[str, int],
    rng: np.random.Generator,
    size: float = 1.0,
    operands: OperandChoice = "drawn",
) -> Arrays:
    """Return random inputs for a call whose symbols have `lengths`; its scores have about `size` at any scale.

    A boolean mask is True for three of four pairs. It is False for the last key and, if it has a row for each
    query, for the first query. A floating mask is -inf at these pairs; its last row is the most negative finite
    number, which does not mask, unless the bound would then be useless. Key lengths differ: the first is 0, the
    last is the whole length. With another choice of `operands`, all integers have their smallest or largest
    allowed value, or a boolean mask is False or True everywhere. Values, biases and sinks grow with `size`, up
    to hundreds.
    """
    arrays: Arrays = {}
    factors = _factors(size)
    for name, spec in call.inputs.items():
        shape = tuple(evaluated(length, lengths) for length in spec.shape)
        drawn = _drawn(call, name, spec, shape or (1,), lengths, rng, operands)
        factor = factors.get(name.removeprefix("past_").rstrip("_0123456789"), 1.0)
        arrays[name] = _multiplied(drawn, factor).reshape(shape)
    scale = 1.0 if isinstance(call.scale, Input) else numbers(call.scale, arrays)
    typical = float(np.max(np.abs(scale), initial=0.0))
    size_so_far = typical * math.sqrt(arrays["query"].shape[-1]) * factors["key"]
    factor = min(size / (size_so_far or 1.0), LARGEST_FACTOR[call.query.dtype])
    arrays["query"] = (arrays["query"] * factor).astype(numpy_dtype(call.query.dtype))
    return _with_nan_beyond(call, arrays)


def _factors(size: float) -> dict[str, float]:
    """Return the factor of each input, by name, for scores of `size`."""
    large = min(max(size, 1.0), LARGE_SIZE)
    return dict.fromkeys(("value", "bias", "attn_mask", "sinks", "table"), large) | {
        "key": HUGE_KEYS if size > LARGE_SIZE else 1.0
    }


def _multiplied(array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Return floats times `factor`; inf, the most negative finite numbers and other dtypes do not change."""
    if array.dtype.kind in "iub" or factor == 1.0:
        return array
    for part in _parts(array):
        ordinary = np.abs(part.astype(np.float64)) < 1e4
        part[ordinary] *= array.dtype.type(factor)
    return array


def _parts(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Return views of a contiguous array, one behind the other, that are small enough to compute with."""
    flat = array.reshape(-1)
    return np.array_split(flat, range(DRAWN_AT_ONCE, flat.size, DRAWN_AT_ONCE))


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], draw: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
    """Return an array of what `draw(count)` returns; in parts, so that a large one takes little more memory."""
    array = np.empty(shape, dtype)
    for part in _parts(array):
        check_time()
        part[:] = draw(part.size)
    return array


def with_nan(call: ExportCall, arrays: Arrays, name: str) -> Arrays:
    """Return the inputs with a NaN in the middle of the query, key or value."""
    array = arrays[name].copy()
    view = heads_first(call, array)
    view[(*[-1] * (view.ndim - 2), view.shape[-2] // 2, view.shape[-1] // 2)] = np.nan
    return arrays | {name: array}


def poison(call: ExportCall, arrays: Arrays) -> Arrays:
    """Return the inputs with NaN in every key and value that no query attends; a cache stays unchanged."""
    if call.cached:
        return arrays
    *leading, queries, keys = reference_shape(call, arrays)
    heads = call.sizes.heads
    attended = np.zeros((*leading[:-1], heads, keys) if leading else (1, keys), bool)
    at_once = max(min(ROWS_AT_ONCE, SCORES_AT_ONCE // max(math.prod(leading) * keys, 1)), 1)
    for stop in range(queries, 0, -at_once):
        if attended.all():  # often the last queries attend to all keys
            break
        rows = np.arange(max(stop - at_once, 0), stop)
        allowed = _allowed(reference_inputs(call, arrays, rows), (*leading, len(rows), keys))
        # The queries of the heads that share keys are one row after the other.
        attended |= allowed.reshape(*attended.shape[:-1], -1, keys).any(axis=-2)
    hidden = ~attended
    poisoned = {}
    for name in ("key", "value"):
        poisoned[name] = arrays[name].copy()
        view = heads_first(call, poisoned[name])
        view[_hidden_everywhere(hidden, view.shape[:-1])] = np.nan
    return arrays | poisoned


def _allowed(arguments: Arrays, pairs: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return the pairs that neither the mask nor a bias hides."""
    allowed = np.ones(pairs, bool)
    if arguments["attn_mask"] is not None:
        allowed &= arguments["attn_mask"]
    for term in arguments["bias"]:
        if not callable(term):
            allowed &= ~np.isneginf(term)
    return allowed


def _drawn(
    call: ExportCall,
    name: str,
    spec: TensorSpec,
    shape: tuple[int, ...],
    lengths: Mapping[str, int],
    rng: np.random.Generator,
    operands: OperandChoice,
) -> NDArray[Any]:
    dtype, stem = numpy_dtype(spec.dtype), name.rstrip("_0123456789")
    if stem in OPERANDS:
        return drawn_integers(stem, shape, dtype, _token_counts(call, lengths), rng, operands)
    if stem in ("attn_mask", "bias"):
        if spec.dtype == "bool" and "mask" in operands:
            return np.full(shape, operands == "mask of True")
        return _of_pairs(spec, shape, rng, least=_may_be_least(call, spec))
    if stem == "slopes":
        return np.asarray(rng.random(shape), dtype)
    if spec.dtype == "bool":  # of a mask of the caller, as are integers here
        return rng.random(shape) < 0.6
    if spec.dtype in INTEGERS:
        return rng.integers(0, evaluated(call.sizes.keys, lengths) + 1, shape).astype(dtype)
    return _filled(shape, dtype, rng.standard_normal)


def _may_be_least(call: ExportCall, bias: TensorSpec) -> bool:
    """Return whether a bias may hold the most negative finite number of its dtype.

    A sum of two would be -inf. Beside one of a half dtype the textbook formula in that dtype loses the scores,
    and array libraries are compared with it; a wider formula keeps some of their digits.
    """
    return len(call.biases) == 1 and not {call.query.dtype, bias.dtype} & {"float16", "bfloat16"}


def _of_pairs(
    spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator, *, least: bool
) -> NDArray[Any]:
    allowed = _filled(shape, np.dtype(bool), lambda count: rng.random(count) < 0.75)
    if shape and shape[-1] > 1:
        allowed[..., -1] = False
    if len(shape) > 1 and shape[-2] > 1:
        allowed[..., 0, :] = False
    if spec.dtype == "bool":
        return allowed
    added = _filled(shape, numpy_dtype(spec.dtype), rng.standard_normal)
    added[~allowed] = -np.inf
    rows = added.reshape(-1, shape[-1]) if shape else added.reshape(1, 1)
    if least and len(rows) > 2:
        rows[-1] = np.where(np.isneginf(rows[-1]), -np.inf, np.finfo(spec.dtype).min)
    return added


def _token_counts(call: ExportCall, lengths: Mapping[str, int]) -> TokenCounts:
    new = call.key.shape[call.length_axis] if call.cached else 0
    queries, keys, appended = (evaluated(n, lengths) for n in (call.sizes.queries, call.sizes.keys, new))
    return TokenCounts(queries, keys, keys - appended)


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
