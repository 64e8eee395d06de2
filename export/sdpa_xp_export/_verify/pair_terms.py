"""What masks and biases say about the pairs of some rows, as arrays and as functions of the scores.

The library says what masks and biases mean: an exported graph has to agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from sdpa_xp import biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import Initializer, Input, kind_of, with_operands
from sdpa_xp_export._runtime.limits import check_time

Arrays: TypeAlias = dict[str, Any]
"""NumPy arrays by the name of the argument, or of the input of a graph."""
ScoreMod: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
"""score_mod(score, batch, head, query_index, key_index) -> score."""


class PairTerms:
    """Masks and biases of a call over its pairs, (..., Hq, L, S).

    The library's masks do not depend on a cache. So they are asked about all tokens of a cache as queries, and
    the last rows belong to the call. Only `rows` of the queries are asked about, so that a long call needs no
    array of all pairs.
    """

    def __init__(
        self,
        call: ExportCall,
        arrays: Mapping[str, NDArray[Any]],
        pairs: tuple[int, ...],
        filled: NDArray[Any] | None,
        rows: NDArray[np.int64],
    ) -> None:
        self.call, self.arrays, self.pairs, self.filled, self.rows = call, arrays, pairs, filled, rows
        self.shape = (*pairs[:-2], len(rows), pairs[-1])

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
        if kind == "padding":
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
    parts = [to_array(value, pairs, rows=run) for run in _runs(rows)]
    return np.concatenate(parts or [to_array(value, pairs, rows=range(0))], axis=-2)


def _runs(rows: NDArray[np.int64]) -> Iterator[range]:
    """Yield the ranges of numbers that follow each other."""
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        check_time()
        if len(run):
            yield range(int(run[0]), int(run[-1]) + 1)


def _limited_lengths(arguments: Arrays, first: int, queries: int, keys: int) -> Arrays:
    """Limit the lengths of a padding mask to the lengths of this run, and add `first` queries."""
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
