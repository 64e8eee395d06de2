"""The reference, against torch in float64 and numbers worked out by hand, and the textbook against it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import array_api_compat.numpy as xp
import internals
import numpy as np
import pytest

from quality.agreement.features import LENGTHS, features


def expected_output(
    call: internals.ExportCall, inputs: dict[str, Any], computed_in: str
) -> internals.ExpectedRows:
    arguments = internals.reference_inputs(call, inputs)
    return internals.expected_rows(call.outputs, arguments, computed_in)[call.outputs[0]]


@pytest.mark.parametrize("case", features("float64"))
def test_the_textbook_formula_means_the_same(case: str) -> None:
    """In float64 the two differ by rounding alone: else the bound, twice their difference, would allow it."""
    call = features("float64")[case].call
    for seed in range(3):
        inputs = internals.random_inputs(call, LENGTHS, np.random.default_rng(seed))
        expected = expected_output(call, inputs, "float64")
        exact, rounded = expected.reference, expected.textbook
        np.testing.assert_allclose(rounded, exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", features("float32"))
def test_the_bound_is_a_matter_of_rounding(case: str, dtype: str) -> None:
    """No sample makes the textbook formula so bad that its bound would pass a wrong result."""
    call = features(dtype)[case].call
    inputs = internals.random_inputs(call, LENGTHS, np.random.default_rng(0))
    expected = expected_output(call, inputs, dtype)
    exact, rounded = expected.reference, expected.textbook
    agreement = internals.judge(rounded, exact, rounded, dtype)
    assert agreement.bound < 64 * internals.EPS[dtype] * np.max(np.abs(exact[np.isfinite(exact)]))
    assert not internals.judge(np.zeros_like(rounded), exact, rounded, dtype).agrees


def test_by_hand() -> None:
    """Scores 0 and ln 3: weights 1/4 and 3/4; then capped at 1, biased by -1, masked."""
    q, k, v = np.asarray([[1.0]]), np.asarray([[0.0], [math.log(3)]]), np.asarray([[4.0], [8.0]])
    output, lse, weights = internals.reference.attention(q, k, v)
    assert weights[0] == pytest.approx([0.25, 0.75])
    assert output[0, 0] == pytest.approx(7)
    assert lse[0] == pytest.approx(math.log(4))
    capped = math.tanh(2 * math.log(3)) - 1
    _, lse, _ = internals.reference.attention(q, k, v, scale=2, softcap=1.0, bias=np.asarray([[0.0, -1.0]]))
    assert lse[0] == pytest.approx(math.log(1 + math.exp(capped)))
    output, lse, weights = internals.reference.attention(q, k, v, np.asarray([[False, False]]))
    assert (output[0, 0], lse[0], weights.tolist()) == (0, -math.inf, [[0, 0]])


KEYS = {2: (5, 8), 3: (1, 5, 8), 4: (2, 1, 5, 8)}
QUERIES = {3: (4, 7, 8), 4: (2, 4, 7, 8)}


@pytest.mark.parametrize("ranks", [*itertools.product(QUERIES, KEYS, KEYS)], ids=str)
def test_axes(ranks: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal(QUERIES[ranks[0]]), rng.standard_normal(KEYS[ranks[1]])
    value = rng.standard_normal((*KEYS[ranks[2]][:-1], 3))
    output, lse, weights = internals.reference.attention(query, key, value, is_causal=True)
    result = internals.stages(xp, query, key, value, is_causal=True)
    np.testing.assert_allclose(result["output"], output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.broadcast_to(result["lse"], lse.shape), lse, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.broadcast_to(result["weights"], weights.shape), weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize("first", [0.8, 1 / 2000], ids=["one large weight", "equal weights"])
def test_the_spread_is_that_of_a_sum_in_order(first: float) -> None:
    """Of 2,000 terms that are added one by one: a large one that comes first is rounded with each."""
    weights = np.full(2000, (1 - first) / 1999)
    weights[0] = first
    value = np.random.default_rng(0).standard_normal((2000, 400))
    exact = {"weights": weights[None], "output": weights[None] @ value}
    spread = internals.spreads(value, exact)["output"]
    in_order = np.cumsum((weights[:, None] * value).astype(np.float32), axis=0, dtype=np.float32)[-1]
    error = np.sqrt(np.mean((in_order - exact["output"]) ** 2)) / internals.EPS["float32"]
    assert 0.25 < error / np.sqrt(np.mean(spread**2)) < 1
