"""The trials of a model: inputs for its call, and the expected values of some output rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.arguments import OUTPUTS
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._dtypes.dtype import numpy_dtype
from sdpa_xp_export._runtime.limits import check_time
from sdpa_xp_export._verify import reference
from sdpa_xp_export._verify.bounds import Compared, ExpectedRows, judge_copies, judge_rows
from sdpa_xp_export._verify.extreme_inputs import with_extremes
from sdpa_xp_export._verify.magnitudes import magnitudes, sizes_of_terms
from sdpa_xp_export._verify.pair_terms import Arrays
from sdpa_xp_export._verify.random_inputs import poison, random_inputs, with_nan
from sdpa_xp_export._verify.reference import Floats
from sdpa_xp_export._verify.reference_inputs import (
    expected_cache,
    heads_first,
    reference_inputs,
    reference_shape,
)
from sdpa_xp_export._verify.row_sample import DEFAULT_ROWS, pieces, sampled_rows
from sdpa_xp_export._verify.textbook import stages
from sdpa_xp_export._verify.trial_lengths import shown_shapes
from sdpa_xp_export._verify.trial_settings import Setting
from sdpa_xp_export.report import Agreement


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
    leaks: Mapping[str, NDArray[np.bool_]]
    """Where a masked NaN may make the output NaN: in the rows of the same head and batch entry."""

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
        leaks: list[dict[str, NDArray[np.bool_]]] = []
        copies: Arrays = {}
        for piece in pieces(call, setting.lengths, sample):
            check_time()
            arguments = reference_inputs(call, arrays, piece)
            expected.append(expected_rows(call, arguments, dtype))
            leaks.append(_leaks(arguments) if setting.nan_in else {})
            copies = copies or (expected_cache(call, arguments) if call.cached else {})
        joined = {
            name: ExpectedRows.joined([rows[name] for rows in expected], row_axis(name))
            for name in call.outputs
        }
        yield Trial(
            setting,
            poison(call, arrays),
            sample,
            reference_shape(call, arrays),
            joined,
            copies,
            {name: np.concatenate([rows[name] for rows in leaks], row_axis(name)) for name in leaks[0]},
        )


def row_axis(name: str) -> int:
    """Return the axis of the queries in an output of that name."""
    return -1 if name == "lse" else -2


def _leaks(arguments: Arrays) -> dict[str, NDArray[np.bool_]]:
    """Return where each output is NaN if no pair is masked.

    A product of matrices adds 0 times NaN for a masked pair. So only keys and values that no query attends are
    without effect in every graph; that is what `poison` tries.
    """
    with np.errstate(all="ignore"):
        unmasked = _reference(arguments | {"attn_mask": None, "bias": ()})
    return {name: np.isnan(array) for name, array in unmasked.items()}


def expected_rows(call: ExportCall, arguments: Arrays, computed_in: str) -> dict[str, ExpectedRows]:
    """Return the expected values of each output of the call, for the rows in `arguments`."""
    with np.errstate(all="ignore"):
        exact = _reference(arguments)
        textbook = _textbook(arguments, computed_in)
        if computed_in == "float64":
            textbook = _double_precision(arguments, exact, textbook)
    sizes = magnitudes(arguments, exact["lse"], exact["weights"])
    terms = exact | {"output": sizes_of_terms(arguments, exact["weights"])}
    # The weights have the batch of the values too, and so have what is computed without them.
    return {
        name: ExpectedRows(
            exact[name], *(np.broadcast_to(x[name], exact[name].shape) for x in (textbook, sizes, terms))
        )
        for name in call.outputs
    }


def _reference(arguments: Arrays) -> dict[str, Floats]:
    return dict(zip(OUTPUTS, reference.attention_and_scores(**arguments), strict=True))


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
        scaled = (off[name] - right[name]) * 2.0**-29
        shown = exact[name] + np.where(np.isfinite(scaled), scaled, 0.0)
        with_error[name] = np.where(np.abs(scaled) > np.abs(plain - exact[name]), shown, plain)
    return with_error


def _in_range_of_float32(value: Any) -> Any:
    """Return finite numbers of float64 as finite ones of float32: the smallest bias must not become -inf."""
    if isinstance(value, tuple):
        return tuple(_in_range_of_float32(item) for item in value)
    if not isinstance(value, np.ndarray) or value.dtype != np.float64:
        return value
    largest = np.finfo(np.float32).max
    return np.where(np.isinf(value), value, np.clip(value, -largest, largest))


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
        if sampled is None:
            sampled = np.full(expected.reference.shape, np.nan)
        elif name in trial.leaks:
            sampled = np.where(np.isnan(sampled) & trial.leaks[name], expected.reference, sampled)
        outputs[name] = Compared(sampled, expected, trial.setting.size, trial.setting.extreme)
    copies = {
        name: (_real_tokens(call, trial, results[name], array), array) for name, array in trial.copies.items()
    }
    *leading, queries, keys = trial.pairs
    heads = math.prod(leading)
    return TrialOutcome(
        trial.shown, (max(queries, keys), heads * len(trial.rows), heads * queries), outputs, copies, trial.rows
    )


def judge(call: ExportCall, outcomes: list[TrialOutcome], computed_in: str) -> dict[str, list[Agreement]]:
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


def stated_dtype(call: ExportCall, name: str) -> str:
    """Return the dtype that an output of the call has."""
    return call.accumulation_dtype if name == "lse" else call.query.dtype


def _rows_of(call: ExportCall, trial: Trial, name: str, result: NDArray[Any]) -> NDArray[Any] | None:
    """Return the compared rows, with heads before lengths; None if the output cannot be right."""
    axis = row_axis(name)
    if result.ndim >= -axis and name == "output":
        result = heads_first(call, result)
    shape = list(trial.expected[name].reference.shape)
    shape[axis] = trial.pairs[-2]
    if list(result.shape) != shape or result.dtype.name != stated_dtype(call, name):
        return None
    if not trial.leaks and np.isnan(result).any():
        return None
    return result.take(trial.rows, axis=axis)


def _real_tokens(call: ExportCall, trial: Trial, result: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any]:
    """Return a cache with 0 where no real token is; NaN if its dtype or shape is wrong."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return np.full(expected.shape, np.nan)
    if call.past_lengths is None:
        return result
    result = result.copy()
    rows = heads_first(call, result)
    new = trial.inputs["key"].shape[call.length_axis]
    for entry, past in enumerate(trial.inputs["past_lengths"].tolist()):
        rows[entry, :, past + new :] = 0
    return result
