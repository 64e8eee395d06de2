"""The trials of a model: inputs for its call, and the expected values of some output rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._runtime.limits import check_time
from sdpa_xp_export._verify.expected import (
    Arrays,
    expected_cache,
    expected_rows,
    heads_first,
    reference_inputs,
    reference_shape,
    row_axis,
    stated_dtype,
)
from sdpa_xp_export._verify.inputs import poison, random_inputs, with_extremes, with_nan
from sdpa_xp_export._verify.judging import Compared, ExpectedRows, judge_copies, judge_rows
from sdpa_xp_export._verify.lengths import scores_shape, shown_shapes
from sdpa_xp_export._verify.settings import Setting
from sdpa_xp_export.report import Agreement

DEFAULT_ROWS, THOROUGH_ROWS = 512, 8192
"""The most rows, of all heads and batch entries together; the reference computes them one by one."""
MOST_SCORES = 2**22
"""The most scores of all compared rows together."""
SCORES_AT_ONCE = 2**20
"""The most scores that the reference computes at one time; it holds some 15 arrays of that size."""
FEWEST = 6
"""The fewest queries that are compared, for any number of heads."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs of one run, and the expected outputs."""

    setting: Setting
    inputs: Arrays
    rows: NDArray[np.int64]
    """The queries that are compared, of each head and batch entry."""
    pairs: tuple[int, ...]
    """The shape of the scores."""
    expected: Mapping[str, ExpectedRows]
    copies: Arrays
    """The cache that is returned, by name: the old and the new tokens, bit for bit."""

    @property
    def shown(self) -> str:
        """The setting as a report shows it, with shapes instead of lengths if all are fixed."""
        shown = self.setting.shown
        if self.setting.lengths:
            return shown
        return shown.replace("fixed", shown_shapes({name: self.inputs[name] for name in ("query", "key")}), 1)


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
        expected: list[dict[str, ExpectedRows]] = []
        copies: Arrays = {}
        for piece in _pieces(call, setting.lengths, sample):
            check_time()
            arguments = reference_inputs(call, arrays, piece)
            expected.append(expected_rows(call, arguments, dtype, leaks=bool(setting.nan_in)))
            # Each piece has the whole cache.
            copies = copies or (expected_cache(call, arguments) if call.cached else {})
        joined = {
            name: ExpectedRows.joined([rows[name] for rows in expected], row_axis(name))
            for name in call.outputs
        }
        # What is expected was computed without NaN: the reference never reads a key that is hidden.
        yield Trial(setting, poison(call, arrays), sample, reference_shape(call, arrays), joined, copies)


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The compared rows of the outputs of one run. The inputs and the whole outputs are not kept."""

    shown: str
    counts: tuple[int, int, int]
    """The longest length, the rows that are compared, and all rows."""
    outputs: Mapping[str, Compared]
    copies: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
    rows: NDArray[np.int64]
    """The queries that are compared."""

    def where(self, name: str, agreement: Agreement) -> str:
        """Return the batch entry, the head and the query of the element that is closest to its bound."""
        index = agreement.index if name == "lse" else agreement.index[:-1]
        if name not in self.outputs or not index:
            return ""
        *leading, row = index
        heads = [f"head {number}" for number in leading[-1:]]
        return ", ".join([*(f"batch {number}" for number in leading[:-1]), *heads, f"query {self.rows[row]}"])


def outcome(call: ExportCall, trial: Trial, results: Mapping[str, NDArray[Any]]) -> TrialOutcome:
    """Take the rows that are compared from the outputs of a run.

    If an output has another dtype or shape than the call requires, all its rows count as NaN. This is also so
    if any row is NaN although no query attends to a NaN.
    """
    outputs = {}
    for name, expected in trial.expected.items():
        sampled = _rows_of(call, trial, name, results[name])
        if expected.leaks is not None:
            sampled = np.where(np.isnan(sampled) & expected.leaks, expected.reference, sampled)
        outputs[name] = Compared(sampled, expected, trial.setting.size, trial.setting.extreme)
    copies = {
        name: (_real_tokens(call, trial, results[name], array), array) for name, array in trial.copies.items()
    }
    *leading, queries, keys = trial.pairs
    heads = math.prod(leading)  # of all batch entries
    return TrialOutcome(
        trial.shown, (max(queries, keys), heads * len(trial.rows), heads * queries), outputs, copies, trial.rows
    )


def judge_outputs(
    call: ExportCall, outcomes: list[TrialOutcome], computed_in: str
) -> dict[str, list[Agreement]]:
    """Compare each output of all runs; an output has one agreement a run, in the order of the runs."""
    if not outcomes:
        return {}
    agreements = {}
    for name in outcomes[0].outputs:
        dtype = stated_dtype(call, name)
        agreements[name] = judge_rows([outcome.outputs[name] for outcome in outcomes], dtype, computed_in)
    for name in outcomes[0].copies:
        agreements[name] = judge_copies([outcome.copies[name] for outcome in outcomes])
    return agreements


def _rows_of(call: ExportCall, trial: Trial, name: str, result: NDArray[Any]) -> NDArray[Any]:
    """Return the compared rows, with heads before lengths; NaN if the output cannot be right."""
    axis = row_axis(name)
    if result.ndim >= -axis and name == "output":
        result = heads_first(call, result)
    expected = trial.expected[name]
    shape = list(expected.reference.shape)
    shape[axis] = trial.pairs[-2]
    is_stated = list(result.shape) == shape and result.dtype.name == stated_dtype(call, name)
    if not is_stated or (expected.leaks is None and np.isnan(result).any()):
        return np.full(expected.reference.shape, np.nan)
    return result.take(trial.rows, axis=axis)


def _real_tokens(call: ExportCall, trial: Trial, result: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any]:
    """Return a cache with 0 where no real token is; NaN if its dtype or shape is wrong."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return np.full(expected.shape, np.nan)
    if call.past_lengths is None:  # a joined cache has no room
        return result
    result = result.copy()
    rows = heads_first(call, result)
    new = trial.inputs["key"].shape[call.length_axis]
    for entry, past in enumerate(trial.inputs["past_lengths"].tolist()):
        rows[entry, :, past + new :] = 0
    return result


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
    key.
    """
    heads, queries, keys = _sizes(call, lengths)
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


def _pieces(call: ExportCall, lengths: Mapping[str, int], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut the compared rows into pieces that the reference computes one after the other."""
    heads, _, keys = _sizes(call, lengths)
    most = max(SCORES_AT_ONCE // max(heads * keys, 1), 1)
    return np.array_split(rows, range(most, len(rows), most))


def _sizes(call: ExportCall, lengths: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the heads of all batch entries, the queries and the keys."""
    *leading, queries, keys = scores_shape(call, lengths)
    return max(math.prod(leading), 1), queries, keys
