"""The trials of a call: inputs for each setting, the expected rows, and what is compared of the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._call.arguments import AXES
from .._call.call import ExportCall
from .._runtime.limits import check_time
from .expected import (
    Arrays,
    expected_rows,
    heads_first,
    reference_inputs,
    reference_shape,
    row_axis,
    stated_dtype,
)
from .inputs import poison, random_inputs, with_extremes, with_nan
from .judging import Compared, ExpectedRows
from .lengths import SCORES_AT_ONCE, scores_shape, shown_shapes
from .settings import Setting

DEFAULT_ROWS, THOROUGH_ROWS = 512, 8192
"""The most rows, of all heads and batch entries together; the reference computes them one by one."""
MOST_SCORES = 2**22
"""The most scores of all compared rows together."""
FEWEST = 6
"""The fewest queries that are compared, for any number of heads."""
MANY_SCORES = 2**22
"""Runs with more scores than that give their memory back."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs of one run of a call, and the expected outputs."""

    call: ExportCall
    setting: Setting
    inputs: Arrays
    rows: NDArray[np.int64]
    """The queries that are compared, of each head and batch entry."""
    pairs: tuple[int, ...]
    """The shape of the scores."""
    expected: Mapping[str, ExpectedRows]
    copies: Arrays
    """The cache that is returned, by name: the old and the new tokens, bit for bit, and 0 elsewhere."""

    @property
    def shown(self) -> str:
        """The setting as a report shows it, with shapes instead of lengths if all are fixed."""
        shown = self.setting.shown
        if self.setting.lengths:
            return shown
        return shown.replace("fixed", shown_shapes({name: self.inputs[name] for name in ("query", "key")}), 1)

    @property
    def has_many_scores(self) -> bool:
        return math.prod(self.pairs) > MANY_SCORES

    def compared(self, results: Arrays) -> dict[str, Compared]:
        """Take the rows that are compared from the outputs of a run, so that the whole need not be kept.

        If an output has another dtype or shape than the call requires, all its rows count as NaN. This is also
        so if any row is NaN although no query attends to a NaN.
        """
        *leading, queries, keys = self.pairs
        heads = math.prod(leading)  # of all batch entries
        counts = max(queries, keys), heads * len(self.rows), heads * queries
        outputs = {}
        for name, expected in self.expected.items():
            rows = self._rows_of(name, results[name])
            if expected.leaks is not None:
                rows = np.where(np.isnan(rows) & expected.leaks, expected.reference, rows)
            kind, place = self.setting, partial(_place, row_axis(name), self.rows)
            dtype = stated_dtype(self.call, name)
            outputs[name] = Compared(rows, expected, kind.size, kind.extreme, dtype, counts, place)
        for name, array in self.copies.items():
            copy = self._real_tokens(results[name], array)
            outputs[name] = Compared(copy, ExpectedRows(array, array), counts=counts, where=lambda _: "")
        return outputs

    def _rows_of(self, name: str, result: NDArray[Any]) -> NDArray[Any]:
        """Return the compared rows, with heads before lengths; NaN if the output cannot be right."""
        axis, expected = row_axis(name), self.expected[name]
        if name == "output" and result.ndim >= len(AXES[name]):
            result = heads_first(self.call, result)
        shape = list(expected.reference.shape)
        if axis is not None:
            shape[axis] = self.pairs[-2]
        is_stated = list(result.shape) == shape and result.dtype.name == stated_dtype(self.call, name)
        if not is_stated or (expected.leaks is None and np.isnan(result).any()):
            return np.full(expected.reference.shape, np.nan)
        return result if axis is None else result.take(self.rows, axis=axis)

    def _real_tokens(self, result: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any]:
        """Return a cache with 0 where no real token is; NaN if its dtype or shape is wrong."""
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return np.full(expected.shape, np.nan)
        if self.call.past_lengths is None:  # a joined cache has no room
            return result
        result = result.copy()
        rows = heads_first(self.call, result)
        new = self.inputs["key"].shape[self.call.length_axis]
        for entry, past in enumerate(self.inputs["past_lengths"].tolist()):
            rows[entry, :, past + new :] = 0
        return result


def _place(axis: int | None, rows: NDArray[np.int64], index: tuple[int, ...]) -> str:
    """Return the batch entry, the head and the query of an element, or the key if it is a sum of queries."""
    if not index:
        return ""
    *leading, last = index if axis is None else index[: len(index) + 1 + axis]
    place = f"key {last}" if axis is None else f"query {rows[last]}"
    heads = [f"head {number}" for number in leading[-1:]]
    return ", ".join([*(f"batch {number}" for number in leading[:-1]), *heads, place])


def trials(
    call: ExportCall,
    settings: Iterable[Setting],
    rng: np.random.Generator,
    *,
    computed_in: str,
    borders: Iterable[int] = (),
    rows: int = DEFAULT_ROWS,
) -> Iterator[Trial]:
    """Yield a trial for each setting.

    Args:
        call: The call.
        settings: Lengths, sizes of scores, and values of integers.
        rng: Draws the inputs, and which rows are compared.
        computed_in: The dtype of the textbook formula.
        borders: The rows next to these numbers are always compared.
        rows: How many rows of a run are compared, all heads and batch entries together.
    """
    borders = list(borders)
    for setting in settings:
        check_time()
        arrays = random_inputs(call, setting.lengths, rng, setting.size, setting.operands)
        if setting.nan_in:
            arrays = with_nan(call, arrays, setting.nan_in)
        dtype = computed_in
        if setting.extreme:
            arrays = with_extremes(call, arrays, setting.extreme, rng)
            # In a half dtype the textbook formula would overflow, but sums and scores are never in one.
            dtype = call.accumulation_dtype
        sample = sampled_rows(call, setting.lengths, borders, rng, min(rows, setting.rows or rows))
        yield trial_of(call, setting, arrays, sample, dtype)


def trial_of(
    call: ExportCall, setting: Setting, arrays: Arrays, rows: NDArray[np.int64], computed_in: str
) -> Trial:
    """Return a trial with these inputs, and NaN in the keys and values that no query attends."""
    pairs = reference_shape(call, arrays)
    parts: list[dict[str, ExpectedRows]] = []
    copies: Arrays = {}
    at_once = max(SCORES_AT_ONCE // max(math.prod(pairs[:-2]) * pairs[-1], 1), 1)
    for piece in np.array_split(rows, range(at_once, len(rows), at_once)):
        check_time()
        arguments = reference_inputs(call, arrays, piece)
        parts.append(expected_rows(call, arguments, computed_in, leaks=bool(setting.nan_in)))
        # Each piece has the whole cache.
        if call.cached and not copies:
            copies = {f"present_{name}": heads_first(call, arguments[name]) for name in ("key", "value")}
    joined = {n: ExpectedRows.joined([part[n] for part in parts], row_axis(n)) for n in call.outputs}
    # What is expected was computed without NaN: the reference never reads a key that is hidden.
    return Trial(call, setting, poison(call, arrays), rows, pairs, joined, copies)


def sampled_rows(
    call: ExportCall,
    lengths: Mapping[str, int],
    borders: Iterable[int],
    rng: np.random.Generator,
    most: int = DEFAULT_ROWS,
) -> NDArray[np.int64]:
    """Return the indices of the queries to compare, in ascending order, for every head and batch entry.

    If there are too many queries, they are the first two and the last two, the queries next to each of
    `borders`, and some random ones. A border is counted from the first query, from the last, and from the first
    key. A sum over queries needs all of them.
    """
    *leading, queries, keys = scores_shape(call, lengths)
    heads = max(math.prod(leading), 1)
    if call.sums_queries:
        return np.arange(queries)
    count = max(min(most // heads, MOST_SCORES // max(heads * keys, 1)), FEWEST)
    if queries <= count:
        return np.arange(queries)
    rows = [0, queries - 1, 1, queries - 2]  # the ends first: the first four are kept in any case
    for border in borders:
        for start in (border, queries - border, border - max(keys - queries, 0)):
            rows += [row for row in (start - 1, start, start + 1) if 0 <= row < queries]
    first = list(dict.fromkeys(rows))
    if len(first) > count - 2:  # the ends, and some of the others
        first = [*first[:4], *rng.choice(first[4:], max(count - 6, 0), replace=False).tolist()]
    rest = np.setdiff1d(np.arange(queries), first)
    drawn = rng.choice(rest, min(max(count - len(first), 0), len(rest)), replace=False)
    return np.sort(np.concatenate([np.asarray(first, np.int64), drawn]))
