"""How far an output of a model may be off, element by element.

An element agrees if its error is within two bounds. The first is the bound of `agreement`: twice the largest
error of the textbook formula, plus a few rounding errors, relative to the largest value of the run. The mean of
many values may be much smaller than the values, but its rounding errors are not. So the largest value is taken
from the sums of the sizes of the terms.

The second bound is relative to the magnitude of the element (see `magnitudes`): twice the largest ratio of the
textbook formula, plus a few rounding errors. Without it, a large element would hide an error in a small one, in
the same run or in another run.

The textbook formula is computed in the dtype of scores and sums. If the output has a narrower dtype, each
element may have one more rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._verify.agreement import EPS, ROUNDINGS, alike, index_of, largest_of, textbook_error
from sdpa_xp_export._verify.reference import Floats
from sdpa_xp_export.report import Agreement


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The expected values of some rows of an output."""

    reference: Floats
    textbook: NDArray[Any]
    """The textbook formula, in the dtype of the computation."""
    magnitude: Floats
    terms: Floats
    """The sum of the sizes of the terms of each element; the element itself if it is no sum."""

    @staticmethod
    def joined(parts: Sequence[ExpectedRows], axis: int) -> ExpectedRows:
        """Return the rows of all parts, which follow each other along `axis`."""
        if len(parts) == 1:
            return parts[0]
        arrays = zip(*((x.reference, x.textbook, x.magnitude, x.terms) for x in parts), strict=True)
        return ExpectedRows(*(np.concatenate(several, axis) for several in arrays))

    @property
    def largest(self) -> float:
        """The largest sum of sizes, which no value exceeds."""
        return largest_of(self.terms)

    @property
    def textbook_error(self) -> float:
        """The error of the textbook formula divided by the largest value; 0 if it overflows."""
        return textbook_error(self.reference, self.textbook, self.largest)

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
    """What the run has beside ordinary inputs; runs that have the same share a bound."""


def judge_rows(runs: Sequence[Compared], dtype: str, computed_in: str) -> list[Agreement]:
    """Compare an output of several runs of one model.

    Args:
        runs: The output in each run.
        dtype: The dtype of the output.
        computed_in: The dtype of the textbook formula, and of the scores and sums in the model.
    """
    own_rounding = EPS[dtype] if dtype != computed_in else 0.0
    ratio = max((run.expected.textbook_ratio for run in runs), default=0.0)
    by_kind = {}
    for size, extreme in {(run.size, run.extreme) for run in runs}:
        errors = [run.expected.textbook_error for run in runs if (run.size, run.extreme) == (size, extreme)]
        by_kind[size, extreme] = 2 * max(errors) + ROUNDINGS * size * EPS[computed_in] + own_rounding
    agreements = []
    for run in runs:
        expected = run.expected
        values = np.abs(np.where(np.isfinite(expected.reference), expected.reference, 0))
        sharp = (2 * ratio + ROUNDINGS * EPS[computed_in]) * expected.magnitude + own_rounding * values
        bound = np.minimum(sharp, by_kind[run.size, run.extreme] * expected.largest) + smallest(dtype)
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


def closest(result: NDArray[Any], reference: Floats, bound: Floats) -> Agreement:
    """Return the error and the bound of the element that is closest to its bound, or furthest beyond it."""
    actual = np.asarray(result, np.float64)
    finite = np.isfinite(reference)
    bound = np.where(finite, bound, 0.0)
    right = alike(actual, reference)
    if not right.all():
        return Agreement(math.inf, math.inf, float(np.max(bound, initial=0.0)), index_of(1.0 - right))
    errors = np.where(finite, np.abs(np.where(finite, actual, 0) - np.where(finite, reference, 0)), 0.0)
    if not errors.size:
        return Agreement(0.0, 0.0, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(errors == 0, 0.0, errors / bound)
    worst = index_of(shares)
    error, largest = float(errors[worst]), largest_of(reference)
    return Agreement(error, error / largest if largest else error, float(bound[worst]), worst)
