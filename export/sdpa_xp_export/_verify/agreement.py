"""When two results agree: the rule of flash-attention's tests, relative to the textbook formula.

A result in dtype d may be off by twice the error of the textbook formula computed in d by the same library,
plus a few rounding errors. So no tolerance is tuned by hand: the dtype and the library set the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export.report import Agreement

ROUNDINGS = 4
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def judge(
    result: NDArray[Any],
    reference: NDArray[np.float64],
    textbook: NDArray[Any],
    dtype: str,
    largest_terms: float | None = None,
) -> Agreement:
    """Compare `result`, whose dtype is `dtype`, with the reference; `textbook` sets the bound.

    The mean of many values may be much smaller than the values, but its rounding errors are not. So they are
    relative to `largest_terms`, if it is known: the largest sum of the sizes of the terms of an element.
    """
    _check_shapes(result, reference)
    largest = largest_of(reference) if largest_terms is None else largest_terms
    relative_bound = 2 * textbook_error(reference, textbook, largest) + ROUNDINGS * EPS[dtype]
    return _compare(result, reference, relative_bound * largest)


def judge_together(
    runs: Sequence[tuple[NDArray[Any], NDArray[np.float64], NDArray[Any]]], dtype: str, size: float = 1.0
) -> list[Agreement]:
    """Compare several results of one computation, each with its reference, by one bound for all.

    In a result of few elements, the error of the textbook formula is random. So the bound uses its largest
    error in all runs, each relative to the largest value of its reference. Scores of `size` have rounding
    errors of `size` times epsilon, and so have their exponentials.
    """
    for result, reference, _ in runs:
        _check_shapes(result, reference)
    error = max(textbook_error(reference, textbook) for _, reference, textbook in runs)
    relative_bound = 2 * error + ROUNDINGS * size * EPS[dtype]
    return [
        _compare(result, reference, relative_bound * largest_of(reference)) for result, reference, _ in runs
    ]


def judge_integers(runs: Sequence[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]) -> list[Agreement]:
    """Compare integers or booleans, which are exact unless the layer computes them from floats.

    If rounding errors decide some of them, twice the fraction in which the layer in its own dtype differs from
    float64 may differ, and one more, and each by twice as much as there.
    """
    bound = 2 * max(_distance(direct, exact)[0] for _, exact, direct in runs)
    flipped = max(float(np.mean(direct != exact)) if exact.size else 0.0 for _, exact, direct in runs)
    agreements = []
    for result, exact, _ in runs:
        _check_shapes(result, exact)
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


def _check_shapes(result: NDArray[Any], reference: NDArray[np.float64]) -> None:
    if result.shape != reference.shape:
        rule = "`result` must have the shape of the reference"
        raise ArgumentValueError("judge", rule, {"result": result.shape, "reference": reference.shape})


def _compare(result: NDArray[Any], reference: NDArray[np.float64], bound: float) -> Agreement:
    error, largest = _error(result, reference), largest_of(reference)
    return Agreement(error, error / largest if largest else error, bound, _worst(result, reference))


def _worst(result: NDArray[np.generic], reference: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the index of the largest error, or of the first value that should be finite and is not."""
    if not reference.size:
        return ()
    actual = np.asarray(result, np.float64)
    return index_of(np.where(alike(actual, reference), _differences(actual, reference), np.inf))


def alike(actual: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where a result is finite like the reference, or is the same NaN or inf."""
    same = (actual == reference) | (np.isnan(actual) & np.isnan(reference))
    return np.where(np.isfinite(reference), np.isfinite(actual), same)


def index_of(errors: NDArray[np.floating[Any]]) -> tuple[int, ...]:
    """Return the index of the largest error."""
    return tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape))


def _differences(actual: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    both = np.isfinite(actual) & np.isfinite(reference)
    differences: NDArray[np.float64] = np.abs(np.where(both, actual, 0) - np.where(both, reference, 0))
    return differences


def textbook_error(
    reference: NDArray[np.float64], textbook: NDArray[Any], largest: float | None = None
) -> float:
    """Return the error of the textbook formula divided by the largest value; 0 if it overflows."""
    largest = largest_of(reference) if largest is None else largest
    error = _error(np.where(np.isfinite(reference), textbook, reference), reference)
    return error / largest if largest and math.isfinite(error) else 0.0


def largest_of(reference: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(reference[np.isfinite(reference)]), initial=0.0))


def _error(result: NDArray[np.generic], reference: NDArray[np.float64]) -> float:
    finite = np.isfinite(reference)
    actual = np.asarray(result, np.float64)
    if not np.array_equal(np.isfinite(actual), finite):
        return math.inf
    if not np.array_equal(actual[~finite], reference[~finite], equal_nan=True):
        return math.inf
    return float(np.max(np.abs(actual[finite] - reference[finite]), initial=0.0))
