"""results/derivatives.json is what is measured today: the same derivatives, refused for the same reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from quality.derivatives.features import features
from quality.derivatives.measure import RESULTS, agrees, joined, reason, rows, written
from quality.derivatives.memory import LEFT_OUT, LENGTHS, is_linear
from quality.derivatives.ways import columns
from sdpa_xp.errors import ArgumentValueError

COMMITTED = json.loads(RESULTS.read_text())
MADE = "`make derivatives` writes it anew"
PACKAGES = {
    "array-api-strict": "array_api_strict",
    "Dask": "dask",
    "torch": "torch",
    "torch.compile": "torch",
    "JAX": "jax",
    "jax.jit": "jax",
    "MLX": "mlx",
}
FEW = ("biases.from_function that adds", "masked NaN", "attention_state")
SLICE = dict.fromkeys(("NumPy", "array-api-strict", "Dask", "torch", "MLX"), FEW) | {"jax.jit": FEW[1:2]}
"""What is measured again. A feature takes JAX outside of a jit, and torch.compile, half a minute."""


def outcomes(measured: list[dict[str, Any]], name: str) -> dict[str, Mapping[str, Any]]:
    """Return the outcomes of a library, by derivative."""
    return {row["derivative"]: row["features"] for row in measured if row["library"] == name}


def test_it_has_every_feature_of_every_derivative() -> None:
    assert list(dict.fromkeys(row["library"] for row in COMMITTED["rows"])) == list(columns()), MADE
    for row in COMMITTED["rows"]:
        assert list(row["features"]) == list(features()), MADE


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.needs("torch", m)) for n, m in PACKAGES.items()]
)
def test_it_has_every_derivative(name: str) -> None:
    derivatives = columns()[name]().derivatives
    assert list(outcomes(COMMITTED["rows"], name)) == list(derivatives), MADE


def test_nothing_is_wrong() -> None:
    assert [row for row in COMMITTED["rows"] if not all(map(agrees, row["features"].values()))] == []
    nan = {(r["library"], title) for r in COMMITTED["rows"] for title, x in r["features"].items() if "nan" in x}
    assert nan == {("torch.compile", "masked NaN")}


CASES = [(name, title) for name, titles in SLICE.items() for title in titles]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "title"), CASES, ids=[f"{title} in {name}" for name, title in CASES])
def test_a_run_says_the_same(name: str, title: str) -> None:
    """No more is refused, no less, and in the same words."""
    pytest.importorskip(PACKAGES.get(name, "numpy"))
    for derivative, measured in outcomes(rows(name, title), name).items():
        outcome, committed = measured[title], outcomes(COMMITTED["rows"], name)[derivative][title]
        assert outcome.keys() == committed.keys(), (derivative, MADE)
        assert outcome.get("refused") == committed.get("refused"), (derivative, MADE)
        assert agrees(outcome), derivative


def test_the_memory_of_each_derivative_is_known() -> None:
    for name, peaks in COMMITTED["memory"].items():
        derivatives = outcomes(COMMITTED["rows"], name).keys() - set(LEFT_OUT)
        assert peaks.keys() == derivatives, MADE
    assert is_linear([10, 20])
    assert not is_linear([30, 30 + 4e-6 * (LENGTHS[1] ** 2 - LENGTHS[0] ** 2)])


def test_it_is_written_as_it_is_read() -> None:
    assert json.loads(written(COMMITTED)) == COMMITTED
    assert written(COMMITTED) == RESULTS.read_text(), MADE


def test_a_feature_that_is_measured_again_replaces_its_outcome() -> None:
    def row(**outcomes: int) -> list[dict[str, Any]]:
        return [{"library": "NumPy", "derivative": "one", "features": outcomes}]

    assert joined(row(plain=1, scale=2), row(scale=3)) == row(plain=1, scale=3)
    assert joined([], row(scale=3)) == row(scale=3)


def test_reasons() -> None:
    ours = ArgumentValueError("scaled_dot_product_attention_vjp", "`x` must be y", {"x": 1}, "Do this.")
    assert reason(ours) == "`x` must be y"
    assert reason(RuntimeError(f"cannot trace {ours}")) == "`x` must be y"
    assert reason(KeyError("\nno rule. Ask")) == "KeyError: '\\nno rule"
    assert not agrees({"error": 2.0, "bound": 1.0})
