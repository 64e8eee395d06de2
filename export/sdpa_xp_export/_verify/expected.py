"""What a run of a call should return: its arrays in the terms of the reference, and the expected rows.

The reference takes one boolean mask, what is added, and all keys and values, also those of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

from sdpa_xp import biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from .._call.call import OPTIONS, ExportCall
from .._call.operands import AXES, IN_DTYPE_OF_QUERY, Initializer, Input, kind_of, with_operands
from .._dtypes.dtype import numpy_dtype
from .._runtime.limits import check_time
from .judging import ExpectedRows, with_error_of_float64
from .reference import Floats, attention_and_scores, magnitudes, spreads, stages, statistics

Arrays: TypeAlias = dict[str, Any]
"""NumPy arrays by the name of the argument, or of the input of a graph."""
ScoreMod: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
"""score_mod(score, batch, head, query_index, key_index) -> score."""
ROWS_AT_ONCE, PAIRS_AT_ONCE = 256, 2**22
"""The most queries, and the most pairs, that a mask is asked about at one time."""
NEAR = 4
"""Rows up to this far from each other are one question to a mask: it takes the time of many rows."""


def stated_dtype(call: ExportCall, name: str) -> str:
    """Return the dtype that an output of the call has."""
    of_scores = name in AXES and name not in IN_DTYPE_OF_QUERY
    return call.accumulation_dtype if of_scores else call.query.dtype


def expected_rows(
    outputs: Sequence[str], arguments: Arrays, computed_in: str, *, leaks: bool = False
) -> dict[str, ExpectedRows]:
    """Return the expected values of each of the outputs, for the rows in `arguments`.

    Args:
        outputs: Their names.
        arguments: The arguments of `reference.attention`; see `reference_inputs`.
        computed_in: The dtype of the textbook formula.
        leaks: Whether a NaN of a key or value may also show where a mask hides it from some queries only.
    """
    with np.errstate(all="ignore"):  # masked keys and values may be NaN or inf
        exact = _reference(arguments)
        textbook = _textbook(arguments, computed_in)
        if computed_in == "float64":
            textbook = _double_precision(arguments, exact, textbook)
        sizes, sums = magnitudes(arguments, exact)
        errors = spreads(arguments["value"], exact)
        # A product of matrices adds 0 times NaN for a masked pair. So only keys and values that no query
        # attends are without effect in every graph; that is what `poison` tries.
        unmasked = _reference(arguments | {"attn_mask": None, "bias": ()}) if leaks else {}
    terms = exact | sums

    def rows(name: str) -> ExpectedRows:
        # The weights have the batch of the values too, and so has what is computed without them.
        one, size, term, spread = (
            np.broadcast_to(x[name], exact[name].shape) for x in (textbook, sizes, terms, errors)
        )
        return ExpectedRows(exact[name], one, size, term, spread, np.isnan(unmasked[name]) if leaks else None)

    return {name: rows(name) for name in outputs}


def _reference(arguments: Arrays) -> dict[str, Floats]:
    output, lse, weights, scores = attention_and_scores(**arguments)
    results = {"output": output, "lse": lse, "weights": weights, "scores": scores}
    return results | statistics(np, scores, weights)


def _textbook(arguments: Arrays, dtype: str) -> dict[str, NDArray[Any]]:
    tokens = {name: arguments[name].astype(numpy_dtype(dtype)) for name in ("query", "key", "value")}
    return stages(numpy_namespace, **arguments | tokens)


def _double_precision(
    arguments: Arrays, exact: Mapping[str, Floats], textbook: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the result of the textbook formula in float64, plus an estimate of its error.

    The reference is float64 too, and rounds large scores in the same way, so the difference of the two says
    little. The error of float32, divided by 2**29, is used where it is larger.
    """
    narrow = {name: _in_range_of_float32(value) for name, value in arguments.items()}
    narrow |= {name: arguments[name].astype(np.float32) for name in ("query", "key", "value")}
    right, off = _reference(narrow), _textbook(narrow, "float32")
    with_error = {}
    for name, plain in textbook.items():
        shown = with_error_of_float64(exact[name], right[name], off[name])
        with_error[name] = np.where(np.abs(shown - exact[name]) > np.abs(plain - exact[name]), shown, plain)
    return with_error


def _in_range_of_float32(value: Any) -> Any:
    """Return finite numbers of float64 as finite ones of float32: the smallest bias must not become -inf."""
    if isinstance(value, tuple):
        return tuple(_in_range_of_float32(item) for item in value)
    if not isinstance(value, np.ndarray) or value.dtype != np.float64:
        return value
    largest = np.finfo(np.float32).max
    return np.where(np.isinf(value), value, np.clip(value, -largest, largest))


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
    # Lengths and offsets are added and subtracted below, where an unsigned or a narrow dtype would wrap.
    arrays = {name: x.astype(np.int64) if x.dtype.kind in "iu" else x for name, x in arrays.items()}
    query, key, value = (heads_first(call, arrays[name]) for name in ("query", "key", "value"))
    filled = None  # the tokens of each batch entry in a padded cache, the new ones among them
    if call.cached:
        past = [heads_first(call, arrays[f"past_{name}"]) for name in ("key", "value")]
        if call.past_lengths is None:
            key, value = (np.concatenate(pair, axis=-2) for pair in zip(past, (key, value), strict=True))
        else:
            filled = arrays["past_lengths"] + key.shape[-2]
            key, value = (_written(old, new, filled) for old, new in zip(past, (key, value), strict=True))
    pairs = _score_shape(query, key, value)
    rows = np.arange(pairs[-2]) if rows is None else rows
    terms = PairTerms(call, arrays, pairs, filled, rows)
    kinds = ("number", "number or array", "array")  # the reference takes these options as they are
    scale = numbers(call.scale, arrays)
    per_query = isinstance(scale, np.ndarray) and scale.ndim > 1 and scale.shape[-2] > 1
    options = {name: numbers(getattr(call, name), arrays) for name, o in OPTIONS.items() if o.kind in kinds}
    return {
        "query": query[..., rows, :],
        "key": key,
        "value": value,
        "attn_mask": terms.allowed(),
        "bias": terms.added(),
        **options,
        "scale": scale[..., rows, :] if per_query else scale,
    }


def reference_shape(call: ExportCall, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, ...]:
    """Return the shape of the scores, (..., Hq, L, S), or (L, S) if the inputs have neither heads nor a batch.

    The keys of a joined cache count; a padded cache has its whole length.
    """
    query, key, value = (heads_first(call, arrays[name]) for name in ("query", "key", "value"))
    pairs = _score_shape(query, key, value)
    if not call.cached:
        return pairs
    past = heads_first(call, arrays["past_key"]).shape[-2]
    return (*pairs[:-1], past + (pairs[-1] if call.past_lengths is None else 0))


def hidden_keys(call: ExportCall, arrays: Arrays) -> NDArray[np.bool_]:
    """Return which keys no query attends, (..., H, S); (1, S) if the inputs have neither heads nor a batch."""
    *leading, queries, keys = reference_shape(call, arrays)
    attended = np.zeros((*leading[:-1], call.sizes.heads, keys) if leading else (1, keys), bool)
    at_once = max(min(ROWS_AT_ONCE, PAIRS_AT_ONCE // max(math.prod(leading) * keys, 1)), 1)
    for stop in range(queries, 0, -at_once):
        if attended.all():  # often the last queries attend to all keys
            break
        rows = np.arange(max(stop - at_once, 0), stop)
        arguments, allowed = reference_inputs(call, arrays, rows), np.ones((*leading, len(rows), keys), bool)
        allowed &= True if arguments["attn_mask"] is None else arguments["attn_mask"]
        for term in arguments["bias"]:
            allowed &= True if callable(term) else ~np.isneginf(term)
        # The queries of the heads that share keys are one row after the other.
        attended |= allowed.reshape(*attended.shape[:-1], -1, keys).any(axis=-2)
    return ~attended


def heads_first(call: ExportCall, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the call as a view with heads before lengths; the same swap leads back."""
    return array if call.length_axis == -2 or array.ndim < 3 else array.swapaxes(-2, -3)


def _score_shape(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> tuple[int, ...]:
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


@dataclass(frozen=True, slots=True, eq=False)
class PairTerms:
    """Masks and biases of a call over its pairs, (..., Hq, L, S).

    The library's masks do not depend on a cache. So they are asked about all tokens of a cache as queries, and
    the last rows belong to the call. Only `rows` of the queries are asked about, so that a long call needs no
    array of all pairs.
    """

    call: ExportCall
    arrays: Mapping[str, NDArray[Any]]
    pairs: tuple[int, ...]
    filled: NDArray[Any] | None
    rows: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.pairs[:-2], len(self.rows), self.pairs[-1])

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which pairs may attend; None if all may."""
        if not self.call.masks and self.filled is None:
            return None
        allowed = np.ones(self.shape, bool)
        for mask in self.call.masks:
            allowed &= self._over_pairs(mask, masks.to_array, False)
        if self.filled is not None:
            allowed &= np.arange(self.pairs[-1]) < np.reshape(self.filled, (-1, 1, 1, 1))
        return allowed

    def added(self) -> tuple[Any, ...]:
        """Return what is added, in order: arrays, and functions of the scores."""
        return tuple(
            self._from_position(cast(ScoreMod, bias.arguments["score_mod"]))
            if kind_of(bias) == "from_function"
            else self._over_pairs(bias, biases.to_array, 0.0)
            for bias in self.call.biases
        )

    def _from_position(self, score_mod: ScoreMod) -> ScoreMod:
        """Return `score_mod` for the rows, counted from where the first query stands in the cache."""
        rows = self.rows
        if not self.call.cached:
            if len(rows) == self.pairs[-2]:  # the rows are their own numbers, which arrays of a GPU can be too
                return score_mod
            return lambda score, b, h, i, j: score_mod(score, b, h, rows[i], j)
        tokens = np.asarray(self.pairs[-1] if self.filled is None else self.filled)
        first = np.broadcast_to(tokens - self.pairs[-2], (math.prod(self.pairs[:-3]),))
        return lambda score, b, h, i, j: score_mod(score, b, h, rows[i] + first[b], j)

    def _over_pairs(self, value: Mask | Bias, to_array: Callable[..., Any], empty: Any) -> NDArray[Any]:
        if not self.call.cached:
            return _array_of_rows(to_array, self._with_arrays(value), self.pairs, self.rows)
        *batch, heads, queries, keys = self.pairs
        result = np.full(self.shape, empty, np.result_type(type(empty)))
        lengths = [keys] if self.filled is None else self.filled
        for entry, tokens in enumerate(lengths):
            first = tokens - queries
            as_queries = self._with_arrays(value, first, tokens)
            positions = self.rows + first
            positions = positions[positions >= 0]
            array = _array_of_rows(to_array, as_queries, (*batch, heads, tokens, tokens), positions)
            index = (...,) if self.filled is None else (entry,)
            known = slice(len(self.rows) - len(positions), None)  # rows rise: the last ones
            result[(*index, slice(None), known, slice(0, tokens))] = array[index]
        return result

    def _with_arrays(self, value: Any, first: int = 0, tokens: int | None = None) -> Any:
        """Return a mask or a bias with the arrays of this run; for `tokens`, with `first` queries before."""
        if not isinstance(value, Mask | Bias):
            return numbers(value, self.arrays)
        if value.parts:
            return with_operands(value, lambda _, part: self._with_arrays(part, first, tokens))
        arguments = {name: numbers(argument, self.arrays) for name, argument in value.arguments.items()}
        kind = kind_of(value)
        if kind == "padding":  # lengths of the call may be beyond this run, which the library refuses
            keys = self.pairs[-1] if tokens is None else tokens
            arguments = _limited_lengths(arguments, first, self.pairs[-2], keys)
        if tokens is None:
            return replace(value, **arguments)
        if kind == "from_array":
            arguments = {name: _over_tokens(array, first, tokens) for name, array in arguments.items()}
        elif kind == "document":
            ids = np.asarray(arguments["query_ids"])
            key_ids = arguments["key_ids"]
            arguments["key_ids"] = ids if key_ids is None else np.asarray(key_ids)[..., :tokens]
            arguments["query_ids"] = _with_zeros_in_front(ids, -1, first)
        return replace(value, **arguments)


def numbers(value: object, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return an operand of the call as numbers, and any other value unchanged."""
    if isinstance(value, Input):
        return arrays[value.name]
    return value.numbers if isinstance(value, Initializer) else value


def _array_of_rows(
    to_array: Callable[..., Any], value: Mask | Bias, pairs: tuple[int, ...], rows: NDArray[np.int64]
) -> NDArray[Any]:
    """Return `rows`, which rise, of a mask or a bias over all pairs."""
    parts = []
    for near in np.split(rows, np.flatnonzero(np.diff(rows) > NEAR) + 1):
        check_time()
        first, stop = (int(near[0]), int(near[-1]) + 1) if len(near) else (0, 0)
        parts.append(to_array(value, pairs, rows=range(first, stop))[..., near - first, :])
    return np.concatenate(parts, axis=-2)


def _limited_lengths(arguments: Arrays, first: int, queries: int, keys: int) -> Arrays:
    """Limit the lengths of a padding mask to the lengths of this run, and add `first` queries."""
    key_lengths, query_lengths = arguments["key_lengths"], arguments["query_lengths"]
    return {
        "key_lengths": None if key_lengths is None else np.minimum(key_lengths, keys),
        "query_lengths": None if query_lengths is None else np.minimum(query_lengths, queries) + first,
    }


def _over_tokens(array: NDArray[Any], first: int, tokens: int) -> NDArray[Any]:
    """Return an array over (..., L, S) with rows for the queries before, and the real columns alone."""
    if array.shape[-1:] not in ((), (1,)):  # an axis of 1 broadcasts
        array = array[..., :tokens]
    return array if array.ndim < 2 or array.shape[-2] == 1 else _with_zeros_in_front(array, -2, first)


def _with_zeros_in_front(array: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """Return the array with `count` more entries before the first along `axis`."""
    shape = list(array.shape)
    shape[axis] = max(count, 0)
    return np.concatenate([np.zeros(shape, array.dtype), array], axis=axis)
