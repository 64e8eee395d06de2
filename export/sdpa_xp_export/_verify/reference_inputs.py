"""A call on arrays in the terms of the reference: one boolean mask, what is added, and all keys and values.

The library says what masks and biases mean: an exported graph has to agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from sdpa_xp import biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import Initializer, Input, with_operands

Arrays: TypeAlias = dict[str, Any]
"""NumPy arrays by the name of the argument, or of the input of a graph."""
ScoreMod: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
"""score_mod(score, batch, head, query_index, key_index) -> score."""


def reference_inputs(call: ExportCall, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Convert inputs of the graph to arguments of `reference.attention`, with heads before lengths.

    In a padded cache, tokens that are not real become 0 and are masked.
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
    terms = _PairTerms(call, arrays, score_shape(query, key, value), filled)
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": terms.allowed(),
        "bias": terms.added(),
        "scale": _numbers(call.scale, arrays),
        "softcap": call.softcap,
        "sinks": _numbers(call.sinks, arrays),
    }


def with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a mask or a bias with the arrays of a run in place of its inputs, and an operand as its array."""
    if isinstance(value, Mask | Bias):
        return with_operands(value, lambda _, operand: with_arrays(operand, arrays))
    return _numbers(value, arrays)


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


def _numbers(value: object, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return an operand of the call as numbers, and any other value unchanged."""
    if isinstance(value, Input):
        return arrays[value.name]
    return value.numbers if isinstance(value, Initializer) else value


class _PairTerms:
    """Masks and biases of a call over its pairs, (..., Hq, L, S).

    The library's masks know no cache. So they are asked about all tokens of a cache as queries, and the last
    rows are those of the call.
    """

    def __init__(
        self,
        call: ExportCall,
        arrays: Mapping[str, NDArray[Any]],
        pairs: tuple[int, ...],
        filled: NDArray[Any] | None,
    ) -> None:
        self.call, self.arrays, self.pairs, self.filled = call, arrays, pairs, filled

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which pairs may attend; None if all may."""
        if not self.call.masks and self.filled is None:
            return None
        allowed = np.ones(self.pairs, bool)
        for mask in self.call.masks:
            allowed &= self._over_pairs(mask, masks.to_array, False)
        if self.filled is not None:
            allowed &= np.arange(self.pairs[-1]) < np.reshape(self.filled, (-1, 1, 1, 1))
        return allowed

    def added(self) -> tuple[Any, ...]:
        """Return what is added, in order: arrays, and functions of the scores."""
        return tuple(
            self._from_position(cast(ScoreMod, bias.arguments["score_mod"]))
            if bias.name == "from_function"
            else self._over_pairs(bias, biases.to_array, 0.0)
            for bias in self.call.biases
        )

    def _from_position(self, score_mod: ScoreMod) -> ScoreMod:
        """Return `score_mod` with queries counted from where the first of them stands in the cache."""
        if not self.call.cached:
            return score_mod
        tokens = np.asarray(self.pairs[-1] if self.filled is None else self.filled)
        first = np.broadcast_to(tokens - self.pairs[-2], (math.prod(self.pairs[:-3]),))
        return lambda score, b, h, i, j: score_mod(score, b, h, i + first[b], j)

    def _over_pairs(self, value: Mask | Bias, to_array: Callable[..., Any], empty: Any) -> NDArray[Any]:
        if not self.call.cached:
            array: NDArray[Any] = to_array(self._with_arrays(value), self.pairs)
            return array
        *batch, heads, queries, keys = self.pairs
        result = np.full(self.pairs, empty, np.result_type(type(empty)))
        lengths = [keys] if self.filled is None else self.filled
        for entry, tokens in enumerate(lengths):
            first = tokens - queries
            as_queries = self._with_arrays(value, first, tokens)
            array = to_array(as_queries, (*batch, heads, tokens, tokens))[..., max(first, 0) :, :]
            index = (...,) if self.filled is None else (entry,)
            result[(*index, slice(None), slice(queries - array.shape[-2], None), slice(0, tokens))] = array[
                index
            ]
        return result

    def _with_arrays(self, value: Any, first: int = 0, tokens: int | None = None) -> Any:
        """Return a mask or a bias with the arrays of this run; for `tokens`, with `first` queries before."""
        if not isinstance(value, Mask | Bias):
            return _numbers(value, self.arrays)
        if value.parts:
            return with_operands(value, lambda _, part: self._with_arrays(part, first, tokens))
        arguments = {name: _numbers(argument, self.arrays) for name, argument in value.arguments.items()}
        if value.name == "padding":
            keys = self.pairs[-1] if tokens is None else tokens
            arguments = _limited_lengths(arguments, first, self.pairs[-2], keys)
        if tokens is None:
            return replace(value, **arguments)
        if value.name == "from_array":
            arguments = {name: _over_tokens(array, first, tokens) for name, array in arguments.items()}
        elif value.name == "document":
            ids = np.asarray(arguments["query_ids"])
            key_ids = arguments["key_ids"]
            arguments["key_ids"] = ids if key_ids is None else np.asarray(key_ids)[..., :tokens]
            arguments["query_ids"] = _with_zeros_in_front(ids, -1, first)
        return replace(value, **arguments)


def _limited_lengths(arguments: Arrays, first: int, queries: int, keys: int) -> Arrays:
    """Limit the lengths of a padding mask to those of this run, with `first` queries more."""
    key_lengths, query_lengths = arguments["key_lengths"], arguments["query_lengths"]
    return {
        "key_lengths": None if key_lengths is None else np.minimum(key_lengths, keys),
        "query_lengths": None if query_lengths is None else np.minimum(query_lengths, queries) + first,
    }


def _over_tokens(array: NDArray[Any], first: int, tokens: int) -> NDArray[Any]:
    """Return an array over (..., L, S) with rows for the queries before, and the real columns alone."""
    if array.shape[-1:] not in ((), (1,)):
        array = array[..., :tokens]
    return array if array.ndim < 2 or array.shape[-2] == 1 else _with_zeros_in_front(array, -2, first)


def _with_zeros_in_front(array: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """Return the array with `count` more entries before the first along `axis`."""
    shape = list(array.shape)
    shape[axis] = max(count, 0)
    return np.concatenate([np.zeros(shape, array.dtype), array], axis=axis)
