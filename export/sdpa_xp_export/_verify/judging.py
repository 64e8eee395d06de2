"""When results agree: the rule of flash-attention's tests, relative to the textbook formula.

A result in dtype d may be off by twice the error of the textbook formula computed in d by the same library,
plus a few rounding errors. So no tolerance is tuned by hand: the dtype and the library set the bound. The mean
of many values may be much smaller than the values, but its rounding errors are not. So bounds are relative to
the largest sum of the sizes of the terms of an element, if these are known.

In the runs of a model each element has a second bound, relative to its magnitude: twice the largest ratio of
the textbook formula, plus a few rounding errors. Without it, a large element would hide an error in a small
one, in the same run or in another run. The textbook formula is computed there in the dtype of scores and sums.
If the output has a narrower dtype, each element may have one more rounding error.

There the first bound is relative to the largest sum of sizes plus the spread of the element, since the textbook
formula may add the terms of its worst row in a lucky order.

A layer has no known terms. Each kind of CPU adds them in an order of its own: one after the other, or in
short blocks. Where terms differ, their roundings do too, and all orders are off by much the same. But a layer
of few kinds of tokens, as of a boolean input, adds equal terms, whose roundings may all have one sign. Then one
CPU is off by many times as much as another, and the error of the layer on one of them is no bound. So its bound
has one more part, which no CPU decides: what equal terms may be off by, as many as the run has tokens. Short
runs, where this is little, are judged as sharply as without it.

Terms that are not known may add up to 0, as in the gradient of a single weight, or of a softmax that gives one
key all the weight: products of up to 1e28 may leave nothing. The values are then rounding errors, in float64
too, and no measure of the terms. Only the layer shows how large these are, if its inputs and weights are moved
by rounding errors. So the error of such a run is a bound of that run alone, and no measure for other runs; and
the errors of other runs bound it if its own are 0 by luck.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..report import Agreement
from .reference import DRIFT, Floats

# By luck the textbook formula may be exact in a run, and the model need not be.
ROUNDINGS = 4
UNMEASURED = 16.0
"""How many times as many rounding errors are allowed if no run has shown any."""
OF_ANOTHER_SHAPE = Agreement(math.inf, math.inf, 0.0)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def with_error_of_float64(exact: NDArray[Any], right: NDArray[Any], off: NDArray[Any]) -> NDArray[Any]:
    """Return `exact` with the error of float64: there is no wider dtype to measure it with.

    It is the error of `off`, computed in float32, beside `right` in float64, divided by 2**29.
    """
    error = (off - right) * 2.0**-29  # epsilon of float64 over epsilon of float32
    return exact + np.where(np.isfinite(error), error, 0.0)


def textbook_error(
    reference: NDArray[np.float64], textbook: NDArray[Any], sizes: Floats | float | None = None
) -> float:
    """Return the largest error of the textbook formula over `sizes`; 0 if it overflows.

    `sizes` is a number for all elements or one for each, by default the largest value.
    """
    sizes = largest_of(reference) if sizes is None else sizes
    errors = _errors(np.where(np.isfinite(reference), textbook, reference), reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = float(np.max(np.where(np.equal(sizes, 0), 0.0, errors / sizes), initial=0.0))
    return error if math.isfinite(error) else 0.0


def largest_of(reference: NDArray[np.float64]) -> float:
    """Return the largest size of a finite value; 0 if there is none."""
    return float(np.max(np.abs(reference[np.isfinite(reference)]), initial=0.0))


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The expected values of some rows of an output, and what bounds their errors."""

    reference: NDArray[Any]
    textbook: NDArray[Any]
    """The textbook formula, in the dtype of the computation; for a layer, the layer itself in that dtype."""
    magnitude: Floats | None = None
    """The size of the numbers whose rounding causes the error of each element; None if they are not known."""
    terms: Floats | None = None
    """The sum of the sizes of the terms of each element; None for the size of the element itself."""
    spread: Floats | float = 0.0
    """The standard deviation of the error of the sum over the keys, in units of epsilon; 0 if there is none."""
    leaks: NDArray[np.bool_] | None = None
    """Where a masked NaN may make the output NaN; None if it must not do so anywhere."""
    longest_sum: int = 0
    """The number of terms of the longest sum, if its terms may be alike; half dtypes are summed in float32."""
    is_measured: bool = True
    """Whether the textbook formula shows rounding errors; a layer without floats to move shows none."""

    @staticmethod
    def joined(parts: Sequence[ExpectedRows], axis: int | None) -> ExpectedRows:
        """Return the rows of all parts, which follow each other along `axis`.

        Without an axis, each part is a sum over some of the queries: return the sum over all of them.
        """
        combine: Any = partial(reduce, np.add) if axis is None else partial(np.concatenate, axis=axis)
        arrays = {
            name: x for name in ExpectedRows.__slots__ if isinstance(x := getattr(parts[0], name), np.ndarray)
        }
        joined = {name: combine([getattr(part, name) for part in parts]) for name in arrays}
        rows = replace(parts[0], **joined)
        # The error of n numbers grows with the root of n, and each part has its share of them.
        return replace(rows, spread=math.sqrt(len(parts)) * rows.spread) if axis is None else rows

    @property
    def largest(self) -> float:
        """The largest sum of sizes, which no value exceeds."""
        return largest_of(self.reference if self.terms is None else self.terms)

    @property
    def size_of_errors(self) -> Floats | float:
        """What the error of each element is relative to: the largest sum of sizes, and its spread."""
        return self.largest + np.where(np.isfinite(self.spread), self.spread, 0.0)

    @property
    def textbook_error(self) -> float:
        """The largest error of the textbook formula over `size_of_errors`; 0 if it overflows."""
        return textbook_error(self.reference, self.textbook, self.size_of_errors)

    @property
    def textbook_ratio(self) -> float:
        """The largest error of the textbook formula over the magnitude of its element; 0 if it overflows."""
        if self.magnitude is None:
            return 0.0
        known = np.isfinite(self.reference) & (self.magnitude > 0)
        with np.errstate(invalid="ignore"):
            errors = np.abs(np.asarray(self.textbook, np.float64)[known] - self.reference[known])
            ratios = errors / self.magnitude[known]
        return float(np.max(ratios[np.isfinite(ratios)], initial=0.0))


@dataclass(frozen=True, slots=True)
class Compared:
    """What is compared of an output of one run, and the expected values."""

    result: NDArray[Any]
    expected: ExpectedRows
    size: float = 1.0
    """The size of the scores of the run, whose rounding errors are as many times as large."""
    extreme: str = ""
    """What the run has beside ordinary inputs."""
    dtype: str = ""
    """The dtype of the output; empty for a copy of the inputs, of which no bit may differ."""
    counts: tuple[int, int, int] = (0, 0, 0)
    """The longest length, the rows that are compared, and all rows."""
    where: Callable[[tuple[int, ...]], str] = str
    """The index of an element -> its place in the output, as a report shows it."""

    @property
    def kind(self) -> tuple[float, str]:
        """Runs of one kind share a bound."""
        return self.size, self.extreme


def judge_outputs(
    runs: Sequence[Mapping[str, Compared]], computed_in: str | None = None
) -> dict[str, list[Agreement]]:
    """Compare each output of all runs; an output has one agreement for each run, in their order.

    Of copies of what is expected, which state no dtype, no bit may differ.
    """
    outputs = {name: [run[name] for run in runs] for name in (runs[0] if runs else ())}
    return {
        name: judge_rows(several, several[0].dtype, computed_in)
        if several[0].dtype
        else [closest(x.result, x.expected.reference.astype(np.float64), 0.0) for x in several]
        for name, several in outputs.items()
    }


def judge_rows(runs: Sequence[Compared], dtype: str, computed_in: str | None = None) -> list[Agreement]:
    """Compare an output of several runs of one model or function.

    Integers and booleans are exact, unless the textbook formula shows that rounding errors decide them.

    Args:
        runs: The output in each run.
        dtype: The dtype of the output.
        computed_in: The dtype of the textbook formula, and of the scores and sums in the model.
    """
    if runs and runs[0].expected.reference.dtype.kind in "iub":
        return _judge_integers(runs)
    computed_in = computed_in or dtype
    roundings = ROUNDINGS if any(run.expected.is_measured for run in runs) else ROUNDINGS * UNMEASURED
    few, own_rounding = roundings * EPS[computed_in], EPS[dtype] if dtype != computed_in else 0.0
    drift = DRIFT * min(EPS[computed_in], EPS["float32"])
    ratio = max((run.expected.textbook_ratio for run in runs), default=0.0)
    # Extreme inputs and ordinary ones of a size have their own errors; one bound of both would be too wide.
    errors, sizes = defaultdict[tuple[float, str], float](float), defaultdict[tuple[float, str], float](float)
    for run in runs:
        sizes[run.kind] = max(sizes[run.kind], run.expected.largest)
    largest_errors = [textbook_error(run.expected.reference, run.expected.textbook, 1.0) for run in runs]
    cancelled = [
        run.expected.terms is None
        and has_cancelled(run.expected.largest, sizes[run.kind], EPS[computed_in], error)
        for run, error in zip(runs, largest_errors, strict=True)
    ]
    for run, is_noise in zip(runs, cancelled, strict=True):
        if not is_noise:
            errors[run.kind] = max(errors[run.kind], run.expected.textbook_error)
    agreements = []
    for run, is_noise, error in zip(runs, cancelled, largest_errors, strict=True):
        expected = run.expected
        bound = (2 * errors[run.kind] + few) * (sizes[run.kind] if is_noise else expected.size_of_errors)
        bound += 2 * error if is_noise else 0.0
        bound += (few * (run.size - 1) + own_rounding + drift * expected.longest_sum) * expected.largest
        if expected.magnitude is not None:
            values = np.abs(np.where(np.isfinite(expected.reference), expected.reference, 0))
            sharp = (2 * ratio + few) * expected.magnitude + own_rounding * values
            bound = np.minimum(sharp, bound) + smallest(dtype)
        agreements.append(closest(run.result, expected.reference, bound))
    return agreements


def has_cancelled(largest: float, of_all: float, eps: float, error: float = 0.0) -> bool:
    """Return whether the values of a run, up to `largest`, are rounding errors of terms that add up to 0.

    They are if they are no larger than the rounding errors of all runs, or than the `error` of the run itself.
    """
    return error > largest or largest <= ROUNDINGS * eps * of_all


def apart(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> float:
    """Return the largest difference over the largest value; of integers, the fraction that differs."""
    if pairs[0][0].dtype.kind in "iub":
        count = sum(one.size for one, _ in pairs)
        return sum(np.count_nonzero(one != other) for one, other in pairs) / count if count else 0.0
    largest = [largest_of(one.astype(np.float64)) for one, _ in pairs]
    of_all, eps = max(largest), EPS.get(pairs[0][1].dtype.name, 0.0)
    sizes = [of_all if has_cancelled(size, of_all, eps) else size for size in largest]
    return max(textbook_error(x.astype(np.float64), y, size) for (x, y), size in zip(pairs, sizes, strict=True))


def _judge_integers(runs: Sequence[Compared]) -> list[Agreement]:
    """Compare integers or booleans, which are exact unless the layer computes them from floats.

    If rounding errors decide some of them, twice the fraction in which the layer in its own dtype differs from
    float64 may differ, and one more, and each by twice as much as there.
    """
    # The layer in its own dtype shows how far a rounding error may move an integer.
    pairs = [(run.expected.reference, run.expected.textbook) for run in runs]
    bound = 2 * max(_distance(direct, exact)[0] for exact, direct in pairs)
    flipped = max(float(np.mean(direct != exact)) if exact.size else 0.0 for exact, direct in pairs)
    agreements = []
    for result, exact in ((run.result, run.expected.reference) for run in runs):
        if result.shape != exact.shape:
            agreements.append(OF_ANOTHER_SHAPE)
            continue
        error, index = _distance(result, exact)
        few = np.count_nonzero(result != exact) <= 2 * flipped * exact.size + 1
        largest = largest_of(np.asarray(exact, np.float64))
        agreements.append(Agreement(error, error / largest if largest else error, bound if few else 0.0, index))
    return agreements


def _distance(result: NDArray[Any], exact: NDArray[Any]) -> tuple[float, tuple[int, ...]]:
    """Return the largest difference, and its index."""
    unlike = np.asarray(result != exact)
    if not unlike.any():
        return 0.0, ()
    rough = np.abs(result[unlike].astype(np.float64) - exact[unlike].astype(np.float64))
    index = tuple(int(n) for n in np.argwhere(unlike)[int(np.argmax(rough))])
    return abs(float(int(result[index]) - int(exact[index]))), index  # float64 does not hold all of 64 bits


def smallest(dtype: str) -> float:
    """Return the smallest number that a result of this dtype has to tell from 0."""
    # Some hardware replaces numbers below the smallest normal one by 0, but not in float16.
    return 2.0**-24 if dtype == "float16" else 2.0**-1022 if dtype == "float64" else 2.0**-126


def closest(result: NDArray[Any], reference: Floats, bound: Floats | float) -> Agreement:
    """Return the error and the bound of the element that is closest to its bound, or furthest beyond it."""
    if result.shape != reference.shape:
        return OF_ANOTHER_SHAPE
    errors = _errors(result, reference)
    if not errors.size:
        return Agreement(0.0, 0.0, 0.0)
    bounds = np.where(np.isfinite(reference), bound, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(errors == 0, 0.0, errors / bounds)
    shares[np.isnan(shares)] = np.inf  # no error is within a bound that is NaN
    # Of several that are as far beyond, as without any bound, the one with the largest error.
    furthest = np.where(shares == shares.max(), errors, -1.0)
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(furthest), errors.shape))
    error, largest = float(errors[worst]), largest_of(reference)
    shown = float(bounds[worst] if math.isfinite(error) else bounds.max())
    return Agreement(error, error / largest if largest else error, shown, worst)


def _errors(result: NDArray[Any], reference: Floats) -> Floats:
    """Return the error of each element: inf unless it is finite like the reference, or the same NaN or inf."""
    actual, finite = np.asarray(result, np.float64), np.isfinite(reference)
    same = (actual == reference) | (np.isnan(actual) & np.isnan(reference))
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = np.where(finite, np.abs(actual - reference), 0.0)
    return np.where(np.where(finite, np.isfinite(actual), same), differences, np.inf)
