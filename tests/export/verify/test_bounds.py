"""The bounds of `verify` at numbers for which they are known: just within agrees, just beyond does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import Compared, ExpectedRows, checked_call, expected_rows, judge_outputs, judge_rows, smallest

from sdpa_xp_export import TensorSpec

EPS = 2.0**-23
HALF = 2.0**-10
OFF = 2.0**-16
"""The error of the textbook formula at its first element; relative to a magnitude of 4 it is a quarter."""


def compared(
    errors: list[float],
    reference: list[float],
    magnitude: list[float],
    *,
    textbook: float = OFF,
    terms: list[float] | None = None,
    spread: list[float] | None = None,
    size: float = 1.0,
) -> Compared:
    """A row that is off by `errors`, beside a textbook formula whose first element is off by `textbook`."""
    exact = np.asarray(reference, np.float64)
    off = exact + textbook * (np.arange(len(exact)) == 0)
    sums = exact if terms is None else np.asarray(terms)
    spreads = np.zeros(len(exact)) if spread is None else np.asarray(spread)
    return Compared(exact + errors, ExpectedRows(exact, off, np.asarray(magnitude), sums, spreads), size)


def within(run: Compared, dtype: str = "float32", computed_in: str = "float32") -> bool:
    (agreement,) = judge_rows([run], dtype, computed_in)
    return agreement.agrees


SHARP = 2 * OFF / 4 + 4 * EPS
"""The sharp bound of an element of magnitude 1."""
WHOLE = 2 * OFF / 8 + 4 * EPS
"""The whole bound of a run whose largest value is 1, if the textbook formula is off by `OFF` beside an 8."""


Share = Callable[[float], Compared]
BOUNDS: dict[str, tuple[Share, tuple[str, ...]]] = {
    # The whole bound would allow a large part of the largest value, ...
    "a small element": (lambda share: compared([0, share * SHARP], [1000, 1], [4, 1]), ()),
    # ... and the sharp bound half of the value.
    "an element of large magnitude": (lambda share: beside(share * WHOLE * 8), ()),
    "below it": (lambda share: beside(-share * WHOLE * 8), ()),
    "a mean, by the sizes of its terms": (
        lambda share: beside(share * (2 * OFF + 4 * EPS * 16), terms=[16, 16]), ()
    ),
    # Where a sum is rounded often, an error of the textbook formula says less, and one of the model too.
    "a sum": (lambda share: beside(share * (2 * OFF / 8 + 4 * EPS) * 32, spread=[0, 24]), ()),
    "a sum of the textbook": (lambda share: beside(share * (2 * OFF / 32 + 4 * EPS) * 8, spread=[24, 0]), ()),
    "large scores": (lambda share: beside(share * (2 * OFF + 4 * 100 * EPS * 8), size=100.0), ()),
    # A half dtype may round once more: by the value itself if it is held sharply, and else by the largest.
    "half": (lambda share: compared([0, share * (SHARP + HALF * 0.5)], [8, 0.5], [4, 1]), ("float16",)),
    "half, of large magnitude": (
        lambda share: compared([0, share * (WHOLE + HALF) * 8], [8, 0.5], [4, 2.0**20]), ("float16",)
    ),
    "computed in half": (
        lambda share: compared([0, share * 4 * HALF], [8, 1], [4, 1], textbook=0.0), ("float16", "float16")
    ),
}  # fmt: skip
"""A run that is off by a share of its bound, and its dtypes."""


def beside(error: float, **more: Any) -> Compared:
    """An element of large magnitude beside an 8."""
    return compared([0, error], [8, 1], [4, 2.0**20], **more)


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_within_a_bound_agrees(name: str) -> None:
    run, dtypes = BOUNDS[name]
    assert within(run(0.98), *dtypes)
    assert not within(run(1.02), *dtypes)


def test_the_worst_textbook_of_all_runs_sets_the_sharp_bound() -> None:
    """And the worst of the runs with scores of that size sets the whole one."""
    lucky = compared([0, SHARP * 0.98], [1000, 1], [4, 1], textbook=0.0)
    unlucky = compared([0, 0], [1000, 1], [4, 1])
    assert not judge_rows([lucky], "float32", "float32")[0].agrees
    assert judge_rows([lucky, unlucky], "float32", "float32")[0].agrees
    loose = compared([0, WHOLE * 8 * 0.98], [8, 1], [4, 2.0**20], textbook=0.0)
    for size, agrees in ((1.0, True), (100.0, False)):
        other = compared([0, 0], [8, 1], [4, 2.0**20], size=size)
        assert judge_rows([loose, other], "float32", "float32")[0].agrees is agrees


def test_a_subnormal_number_may_be_zero() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert within(compared([-smallest(dtype), 0], [smallest(dtype), 1], [0, 1], textbook=0.0), dtype)
        # Also where all values are so small, as beside a sink of hundreds.
        tiny = smallest(dtype) / 2
        assert within(compared([-tiny], [tiny], [tiny], textbook=0.0), dtype)
        assert not within(compared([4 * tiny], [tiny], [tiny], textbook=0.0), dtype)
    assert not within(compared([-(2.0**-125), 0], [2.0**-125, 1], [0, 1], textbook=0.0))


def test_a_copy_has_no_bound() -> None:
    exact = np.asarray([1.0, 2.0], np.float32)
    off = np.nextafter(exact, np.float32(3))
    copies = [{"present_key": Compared(result, ExpectedRows(exact, exact))} for result in (exact, off)]
    assert [agreement.agrees for agreement in judge_outputs(copies)["present_key"]] == [True, False]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_have_no_bound(wrong: float) -> None:
    run = compared([0, 0], [1, 1], [2.0**60, 2.0**60])
    bad = Compared(np.asarray([1, wrong]), run.expected, 1.0)
    assert not within(bad)
    expected = ExpectedRows(np.asarray([1, wrong]), np.ones(2), np.ones(2), np.ones(2), np.ones(2))
    assert within(Compared(np.asarray([1, wrong]), expected, 1.0))
    assert not within(Compared(np.asarray([1, 1.0]), expected, 1.0))


def test_large_scores_in_float64_have_the_error_of_float32_scaled_down() -> None:
    """The reference rounds scores of thousands as the textbook formula does: their difference shows nothing."""
    query, key, value = draw(np.random.default_rng(0), (5, 8), (200, 8), (200, 3), dtype="float64")
    bias = 4000 + np.asarray(np.arange(200) % 2, np.float64) / 3
    plain = {"attn_mask": None, "scale": 0.3, "softcap": None, "sinks": None}
    arguments = {"query": query, "key": key, "value": value, **plain, "bias": (bias[None],)}
    qkv = TensorSpec("float64", ("L", 8))
    call = checked_call("test", qkv, qkv, qkv)
    narrow = {name: x.astype(np.float32) for name, x in (("query", query), ("key", key), ("value", value))}
    both = ((arguments, "float64"), (arguments | narrow, "float32"))
    rows = [expected_rows(call.outputs, inputs, dtype)["output"] for inputs, dtype in both]
    error, of_float32 = (np.max(np.abs(one.textbook - one.reference)) / one.largest for one in rows)
    assert error == pytest.approx(of_float32 * 2.0**-29, rel=1e-3)
    assert error > 100 * 2.0**-52


@pytest.mark.parametrize(("error", "agrees"), [(1e-7, True), (1e-5, False)])
@pytest.mark.parametrize("left", [0.0, 1e-17])
def test_errors_of_unknown_terms_that_cancel_are_as_large_as_those_of_other_runs(
    left: float, error: float, agrees: bool
) -> None:
    zeros, others = np.full((2, 3), left), np.linspace(-1.0, 1.0, 6).reshape(2, 3)
    cancelled = Compared(zeros.astype(np.float32) + np.float32(error), ExpectedRows(zeros, zeros))
    ordinary = Compared(others.astype(np.float32), ExpectedRows(others, others.astype(np.float32)))
    assert judge_rows([cancelled, ordinary], "float32")[0].agrees is agrees
    known = Compared(cancelled.result, ExpectedRows(zeros, zeros, terms=np.abs(zeros)))
    assert not judge_rows([known, ordinary], "float32")[0].agrees


@pytest.mark.parametrize(("error", "agrees"), [(1.9, True), (2.1, False)])
@pytest.mark.parametrize("largest", [0.0, 1e-3, 0.5])
def test_a_run_of_rounding_errors_is_judged_by_its_own_and_sets_no_bound_of_others(
    largest: float, error: float, agrees: bool
) -> None:
    left = np.asarray([largest, 0.0])
    off = np.asarray([0.0, 1.0])
    cancelled = Compared(left + error * off, ExpectedRows(left, left + off))
    ordinary = np.linspace(-1.0, 1.0, 6)
    for more, is_right in ((1e-7, True), (1e-5, False)):
        other = Compared(ordinary + more, ExpectedRows(ordinary, ordinary))
        runs = judge_rows([cancelled, other], "float32")
        assert [agreement.agrees for agreement in runs] == [agrees, is_right]
