"""A call on arrays in the terms of the reference: one boolean mask, what is added, and all keys and values.

What masks and biases mean is asked of the library: an exported graph has to agree with it.
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
from sdpa_xp.checks import HLE
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import Initializer, Input, with_operands

Arrays: TypeAlias = dict[str, Any]
"""NumPy arrays by the name of the argument, or of the input of a graph."""
ScoreMod: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
"""score_mod(score, batch, head, query_index, key_index) -> score."""


def reference_inputs(call: ExportCall, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Inputs of the graph -> arguments of `reference.attention`, heads before lengths.

    In a padded cache, what is not real is 0 and masked.
    """
    arrays = {name: x.astype(np.int64) if x.dtype.kind in "iu" else x for name, x in arrays.items()}
    query, key, value = (_in_layout(call, arrays[name]) for name in ("query", "key", "value"))
    filled = None
    if call.cached:
        past = [_in_layout(call, arrays[f"past_{name}"]) for name in ("key", "value")]
        if call.past_lengths is None:
            key, value = (np.concatenate(pair, axis=-2) for pair in zip(past, (key, value), strict=True))
        else:
            filled = arrays["past_lengths"] + key.shape[-2]
            key, value = (_written(old, new, filled) for old, new in zip(past, (key, value), strict=True))
    terms = _PairTerms(call, arrays, _pairs(query, key, value), filled)
    scale, sinks = (_held(getattr(call, name), arrays) for name in ("scale", "sinks"))
    made: Arrays = {"query": query, "key": key, "value": value, "attn_mask": terms.allowed()}
    made |= {"bias": terms.added(), "scale": scale, "softcap": call.softcap, "sinks": sinks}
    return made


def with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    """A mask or a bias with the arrays of this run instead of the inputs; an operand as its array."""
    if isinstance(value, Mask | Bias):
        return with_operands(value, lambda _, each: with_arrays(each, arrays))
    return _held(value, arrays)


def library_arguments(call: ExportCall, arrays: Mapping[str, Any]) -> Arrays:
    """Inputs of the graph -> keywords of `sdpa_xp.scaled_dot_product_attention`, of the new tokens alone."""
    made = {name: arrays[name] for name in ("query", "key", "value")}
    made |= {name: with_arrays(getattr(call, name), arrays) for name in ("attn_mask", "bias", "scale", "sinks")}
    return made | {name: getattr(call, name) for name in ("is_causal", "softcap", "softmax_dtype", "layout")}


def expected_cache(call: ExportCall, plain: Arrays) -> Arrays:
    """What the graph returns of the cache, as far as it is real; 0 elsewhere."""
    return {f"present_{name}": _in_layout(call, plain[name]) for name in ("key", "value")}


def _in_layout(call: ExportCall, array: NDArray[Any]) -> NDArray[Any]:
    return array if call.layout == HLE or array.ndim < 3 else array.swapaxes(-2, -3)


def _written(past: NDArray[Any], new: NDArray[Any], filled: NDArray[Any]) -> NDArray[Any]:
    """The tokens of `past` that are real, the new ones behind them, and 0."""
    whole = np.zeros_like(past)
    count = new.shape[-2]
    for entry, stop in enumerate(filled):
        whole[entry, :, : stop - count] = past[entry, :, : stop - count]
        whole[entry, :, stop - count : stop] = new[entry]
    return whole


def _pairs(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> tuple[int, ...]:
    if query.ndim == key.ndim == value.ndim == 2:
        return query.shape[-2], key.shape[-2]
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    heads = query.shape[-3] if query.ndim > 2 else 1
    return (*batch, heads, query.shape[-2], key.shape[-2])


def _held(value: object, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """An operand of the call as numbers; what is no operand as it is."""
    if isinstance(value, Input):
        return arrays[value.name]
    return value.numbers if isinstance(value, Initializer) else value


class _PairTerms:
    """Masks and biases of a call over its pairs, (..., Hq, L, S).

    In a cache they are asked about all its tokens as queries, of which those of the call are the last.
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
        """Which pairs may attend; None where all may."""
        if not self.call.masks and self.filled is None:
            return None
        found = np.ones(self.pairs, bool)
        for mask in self.call.masks:
            found &= self._over(mask, masks.to_array, False)
        if self.filled is not None:
            found &= np.arange(self.pairs[-1]) < np.reshape(self.filled, (-1, 1, 1, 1))
        return found

    def added(self) -> tuple[Any, ...]:
        """What is added, one after the other: arrays, and functions of the scores."""
        return tuple(
            self._from_position(cast(ScoreMod, bias.arguments["score_mod"]))
            if bias.name == "from_function"
            else self._over(bias, biases.to_array, 0.0)
            for bias in self.call.biases
        )

    def _from_position(self, score_mod: ScoreMod) -> ScoreMod:
        """`score_mod`, whose queries are counted from where the first of them stands."""
        if not self.call.cached:
            return score_mod
        tokens = np.asarray(self.pairs[-1] if self.filled is None else self.filled)
        first = np.broadcast_to(tokens - self.pairs[-2], (math.prod(self.pairs[:-3]),))
        return lambda score, b, h, i, j: score_mod(score, b, h, i + first[b], j)

    def _over(self, value: Mask | Bias, to_array: Callable[..., Any], empty: Any) -> NDArray[Any]:
        if not self.call.cached:
            whole: NDArray[Any] = to_array(self._with_arrays(value), self.pairs)
            return whole
        *batch, heads, queries, keys = self.pairs
        found = np.full(self.pairs, empty, np.result_type(type(empty)))
        lengths = [keys] if self.filled is None else self.filled
        for entry, tokens in enumerate(lengths):
            first = tokens - queries
            asked = self._with_arrays(value, first, tokens)
            whole = to_array(asked, (*batch, heads, tokens, tokens))[..., max(first, 0) :, :]
            at = (...,) if self.filled is None else (entry,)
            found[(*at, slice(None), slice(queries - whole.shape[-2], None), slice(0, tokens))] = whole[at]
        return found

    def _with_arrays(self, value: Any, first: int = 0, tokens: int | None = None) -> Any:
        """A mask or a bias with the arrays of this run; with `tokens`, as if `first` queries came before."""
        if not isinstance(value, Mask | Bias):
            return _held(value, self.arrays)
        if value.parts:
            return with_operands(value, lambda _, each: self._with_arrays(each, first, tokens))
        held = {name: _held(each, self.arrays) for name, each in value.arguments.items()}
        if value.name == "padding":
            held = _within(held, first, self.pairs[-2], self.pairs[-1] if tokens is None else tokens)
        if tokens is None:
            return replace(value, **held)
        if value.name == "from_array":
            held = {name: _among_all(array, first, tokens) for name, array in held.items()}
        elif value.name == "document":
            ids = np.asarray(held["query_ids"])
            held["key_ids"] = ids if held["key_ids"] is None else np.asarray(held["key_ids"])[..., :tokens]
            held["query_ids"] = _in_front(ids, -1, first)
        return replace(value, **held)


def _within(lengths: Arrays, first: int, queries: int, keys: int) -> Arrays:
    """Lengths of a padding mask, at most those of this run, with `first` queries more."""
    real, rows = lengths["key_lengths"], lengths["query_lengths"]
    return {
        "key_lengths": None if real is None else np.minimum(real, keys),
        "query_lengths": None if rows is None else np.minimum(rows, queries) + first,
    }


def _among_all(array: NDArray[Any], first: int, tokens: int) -> NDArray[Any]:
    """What broadcasts to (..., L, S), with rows for the queries before, and the columns that are real."""
    if array.shape[-1:] not in ((), (1,)):
        array = array[..., :tokens]
    return array if array.ndim < 2 or array.shape[-2] == 1 else _in_front(array, -2, first)


def _in_front(array: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """`count` more entries before the first along `axis`."""
    shape = list(array.shape)
    shape[axis] = max(count, 0)
    return np.concatenate([np.zeros(shape, array.dtype), array], axis=axis)
