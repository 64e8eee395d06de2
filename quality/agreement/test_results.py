"""results/agreement.json is what a run says today: the same features, refused for the same reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from feature_calls import DTYPES
from internals import attention, backends, compare, session

from quality.agreement.features import feature_jobs, features
from quality.agreement.measure import RESULTS, as_json, rounded, written
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export.forms.choice import FORMS

COMMITTED = json.loads(RESULTS.read_text())
MADE = "`make agreement` writes it anew"


def told(row: dict[str, Any]) -> dict[str, str]:
    """Of each feature why it is refused, or nothing."""
    return {result["feature"]: result["refused"] for result in row["features"]}


def label(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["backend"], row["implementation"], row["dtype"]


def test_it_has_every_feature_of_every_dtype() -> None:
    assert {row["dtype"] for row in COMMITTED["rows"]} == set(DTYPES), MADE
    for row in COMMITTED["rows"]:
        assert list(told(row)) == list(features(row["dtype"])), MADE


def test_it_has_every_library_and_every_form() -> None:
    ran = {row["backend"] for row in COMMITTED["rows"]}
    assert ran | set(COMMITTED["absent"]) == {*backends.LIBRARIES, "onnxruntime"}, MADE
    assert set(COMMITTED["absent"]) <= {"cupy"}
    assert {row["implementation"] for row in COMMITTED["rows"]} == {"xp", *FORMS}, MADE


def test_all_of_it_agrees() -> None:
    for row in COMMITTED["rows"]:
        assert row["agrees"]
        assert row["disagreeing"] == []
        for result in row["features"]:
            agreement = result["agreement"]
            assert result["refused"] or agreement["absolute"] <= agreement["bound"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_says_the_same(dtype: str) -> None:
    """On NumPy and in every form: no more is refused, no less, and in the same words."""
    rows = compare(feature_jobs(dtype), dtype, backends.find_backends(["numpy"]), session.providers()[-1:])
    committed = {label(row): told(row) for row in COMMITTED["rows"]}
    for row in map(as_json, rows):
        assert told(row) == committed[label(row)], MADE
        assert row["agrees"]


def test_it_is_written_as_it_is_read() -> None:
    assert json.loads(written(COMMITTED)) == COMMITTED
    assert written(COMMITTED) == RESULTS.read_text(), MADE
    assert rounded({"a": [0.123456, 1], "b": "c"}) == {"a": [0.123, 1], "b": "c"}


@pytest.mark.parametrize("wrong", ["dtype", "shape", "refused"])
def test_what_is_not_as_stated_disagrees(wrong: str) -> None:
    """An output of another dtype or shape, and a library that computes nothing."""

    def compute(xp: Any, call: Any, arrays: Any) -> Any:
        if wrong == "refused":
            raise ArgumentValueError("scaled_dot_product_attention", "nothing must be computed", {"xp": xp})
        output = attention(xp, call, arrays)
        return output.astype("float64") if wrong == "dtype" else output[..., :1]

    jobs = {"plain": replace(feature_jobs("float32")["plain"], compute=compute)}
    (row,) = compare(jobs, "float32", backends.find_backends(["numpy"]), [])
    assert not row.agrees


def test_an_error_is_no_refusal() -> None:
    """Neither of a function that computes, nor of a library that takes no array at all."""

    def broken(*_: Any) -> Any:
        raise ValueError("operands could not be broadcast")

    (backend,) = backends.find_backends(["numpy"])
    jobs = {"plain": replace(feature_jobs("float32")["plain"], compute=broken)}
    with pytest.raises(ValueError, match="operands"):
        [*compare(jobs, "float32", [backend], [])]
    with pytest.raises(ValueError, match="operands"):
        replace(backend, put=broken).holds("float64")


def test_a_library_may_refuse() -> None:
    """JAX without x64 has no float64 to hold scores in: that is no disagreement."""
    name = 'softmax_dtype="float64"'
    (row,) = compare({name: feature_jobs("float32")[name]}, "float32", backends.find_backends(["jax"]), [])
    assert row.disagreeing == ()
    assert row.results[0].refused.startswith("`softmax_dtype` must be one that jax.numpy has")


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_worst_of_all_inputs_and_jobs_is_shown(wrong: int) -> None:
    """One output of one job is wrong."""
    job = feature_jobs("float32")["plain"]
    lengths = [inputs["query"].shape for inputs in job.inputs]

    def compute(xp: Any, call: Any, arrays: Any) -> Any:
        return attention(xp, call, arrays) + (arrays["query"].shape == lengths[wrong])

    jobs = {"right": job, "wrong": replace(job, compute=compute), "right too": job}
    (row,) = compare(jobs, "float32", backends.find_backends(["numpy"]), [])
    assert row.disagreeing == ("wrong",)
    assert row.worst is not None
    assert row.worst.absolute == pytest.approx(1, abs=1e-5)
