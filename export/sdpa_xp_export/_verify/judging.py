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
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.errors import ArgumentValueError

from ..report import Agreement
from .reference import DRIFT, Floats

# By luck the textbook formula may be exact in a run, and the model need not be.
ROUNDINGS = 4
OF_ANOTHER_SHAPE = Agreement(math.inf, math.inf, 0.0)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def judge(
    result: NDArray[Any],
    reference: NDArray[np.float64],
    textbook: NDArray[Any],
    dtype: str,
    largest_terms: float | None = None,
) -> Agreement:
    """Compare `result`, whose dtype is `dtype`, with the reference; `textbook` sets the bound.

    It is relative to `largest_terms`, the largest sum of the sizes of the terms of an element, or else to the
    largest value of the reference.
    """
    if result.shape != reference.shape:
        rule = "`result` must have the shape of the reference"
        raise ArgumentValueError("judge", rule, {"result": result.shape, "reference": reference.shape})
    return judge_together([(result, reference, textbook)], dtype, largest_terms=largest_terms)[0]


def judge_together(
    runs: Sequence[tuple[NDArray[Any], NDArray[np.float64], NDArray[Any]]],
    dtype: str,
    size: float = 1.0,
    largest_terms: float | None = None,
    sums: Iterable[int] = itertools.repeat(0),
) -> list[Agreement]:
    """Compare several results of one computation, each with its reference, by one bound for all.

    In a result of few elements, the error of the textbook formula is random. So the bound uses its largest
    error in all runs, each relative to the largest value of its reference. Scores of `size` have rounding
    errors of `size` times epsilon, and so have their exponentials. `sums` are the numbers of terms of the
    longest sum in each run, if its terms may be alike; half dtypes are summed in float32.
    """
    drift = DRIFT * min(EPS[dtype], EPS["float32"])
    compared = []
    for result, reference, textbook in runs:
        largest = largest_of(reference) if largest_terms is None else largest_terms
        compared.append((result, reference, largest, textbook_error(reference, textbook, largest)))
    relative_bound = 2 * max(error for *_, error in compared) + ROUNDINGS * size * EPS[dtype]
    return [
        closest(result, reference, (relative_bound + drift * terms) * largest)
        for (result, reference, largest, _), terms in zip(compared, sums, strict=False)
    ]


def judge_integers(runs: Sequence[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]) -> list[Agreement]:
    """Compare integers or booleans, which are exact unless the layer computes them from floats.

    If rounding errors decide some of them, twice the fraction in which the layer in its own dtype differs from
    float64 may differ, and one more, and each by twice as much as there.
    """
    # `direct` is the layer in its own dtype, so it shows how far a rounding error may move an integer.
    bound = 2 * max(_distance(direct, exact)[0] for _, exact, direct in runs)
    flipped = max(float(np.mean(direct != exact)) if exact.size else 0.0 for _, exact, direct in runs)
    agreements = []
    for result, exact, _ in runs:
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

    reference: Floats
    textbook: NDArray[Any]
    """The textbook formula, in the dtype of the computation."""
    magnitude: Floats
    """The size of the numbers whose rounding causes the error of each element."""
    terms: Floats
    """The sum of the sizes of the terms of each element; the element itself if it is no sum."""
    spread: Floats
    """The standard deviation of the error of the sum over the keys, in units of epsilon; 0 if there is none."""
    leaks: NDArray[np.bool_] | None = None
    """Where a masked NaN may make the output NaN; None if it must not do so anywhere."""

    @staticmethod
    def joined(parts: Sequence[ExpectedRows], axis: int | None) -> ExpectedRows:
        """Return the rows of all parts, which follow each other along `axis`.

        Without an axis, each part is a sum over some of the queries: return the sum over all of them.
        """
        combine: Any = partial(reduce, np.add) if axis is None else partial(np.concatenate, axis=axis)
        arrays: Any = ([getattr(part, field.name) for part in parts] for field in fields(ExpectedRows))
        joined: Any = (None if several[0] is None else combine(several) for several in arrays)
        rows = ExpectedRows(*joined)
        # The error of n numbers grows with the root of n, and each part has its share of them.
        return replace(rows, spread=math.sqrt(len(parts)) * rows.spread) if axis is None else rows

    @property
    def largest(self) -> float:
        """The largest sum of sizes, which no value exceeds."""
        return largest_of(self.terms)

    @property
    def size_of_errors(self) -> Floats:
        """What the error of each element is relative to: the largest sum of sizes, and its spread."""
        return self.largest + np.where(np.isfinite(self.spread), self.spread, 0.0)

    @property
    def textbook_error(self) -> float:
        """The largest error of the textbook formula over `size_of_errors`; 0 if it overflows."""
        return textbook_error(self.reference, self.textbook, self.size_of_errors)

    @property
    def textbook_ratio(self) -> float:
        """The largest error of the textbook formula over the magnitude of its element; 0 if it overflows."""
        known = np.isfinite(self.reference) & (self.magnitude > 0)
        with np.errstate(invalid="ignore"):
            errors = np.abs(np.asarray(self.textbook, np.float64)[known] - self.reference[known])
            ratios = errors / self.magnitude[known]
        return float(np.max(ratios[np.isfinite(ratios)], initial=0.0))


@dataclass(frozen=True, slots=True)
class Compared:
    """Some rows of an output of one run, and their expected values."""

    result: NDArray[Any]
    expected: ExpectedRows
    size: float
    """The size of the scores of the run."""
    extreme: str = ""
    """What the run has beside ordinary inputs."""

    @property
    def kind(self) -> tuple[float, str]:
        """Runs of one kind share a bound."""
        return self.size, self.extreme


def judge_rows(runs: Sequence[Compared], dtype: str, computed_in: str) -> list[Agreement]:
    """Compare an output of several runs of one model.

    Args:
        runs: The output in each run.
        dtype: The dtype of the output.
        computed_in: The dtype of the textbook formula, and of the scores and sums in the model.
    """
    few, own_rounding = ROUNDINGS * EPS[computed_in], EPS[dtype] if dtype != computed_in else 0.0
    ratio = max((run.expected.textbook_ratio for run in runs), default=0.0)
    # Extreme inputs and ordinary ones of a size have their own errors; one bound of both would be too wide.
    errors: dict[tuple[float, str], float] = defaultdict(float)
    for run in runs:
        errors[run.kind] = max(errors[run.kind], run.expected.textbook_error)
    agreements = []
    for run in runs:
        expected = run.expected
        values = np.abs(np.where(np.isfinite(expected.reference), expected.reference, 0))
        sharp = (2 * ratio + few) * expected.magnitude + own_rounding * values
        whole = (2 * errors[run.kind] + few) * expected.size_of_errors
        whole += (few * (run.size - 1) + own_rounding) * expected.largest
        bound = np.minimum(sharp, whole) + smallest(dtype)
        agreements.append(closest(run.result, expected.reference, bound))
    return agreements


def judge_copies(runs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> list[Agreement]:
    """Compare results that are copies of what is expected: no bit may differ."""
    return [
        closest(result, np.asarray(expected, np.float64), np.zeros(expected.shape)) for result, expected in runs
    ]


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
