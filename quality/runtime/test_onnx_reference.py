"""Graphs in the evaluator that defines ONNX: what is right there does not rest on a kernel of onnxruntime.

The evaluator has no operators of com.microsoft, and joins the results of the steps of a Loop
where the standard stacks them; `tiled` is right either way.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from feature_calls import features
from internals import DEFAULT_RUNTIME, Runtime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from packaging.version import Version

from quality.runtime.jobs import Job, Outputs, jobs_of_features
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import unsupported_reason

TARGET = Runtime.parse("test", DEFAULT_RUNTIME)
HAS_ATTENTION = pytest.mark.skipif(
    Version(onnx.__version__) < Version("1.23"), reason="this evaluator's Attention differs from the standard"
)
FORMS = [
    pytest.param("attention", 23, marks=HAS_ATTENTION),
    pytest.param("attention", 24, marks=HAS_ATTENTION),
    pytest.param("attention", 25, marks=HAS_ATTENTION),
    ("primitive", 18),
    ("tiled", 18),
]


@cache
def jobs() -> list[Job]:
    """NaN stands in each key and value that no query attends, and behind the end of a padded cache."""
    return list(jobs_of_features(features("float32"), "float32"))


def computed(job: Job, form: str, opset: int, feeds: Outputs) -> dict[str, np.ndarray]:
    runtime = "onnx" if opset == 25 else DEFAULT_RUNTIME
    model = export_call(job.call, form=form, opset=opset, runtime=runtime)
    names = [graph_output.name for graph_output in model.graph.output]
    with np.errstate(all="ignore"):  # it warns of each row without a key
        outputs = ReferenceEvaluator(model).run(None, dict(feeds))
    return dict(zip(names, outputs, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_every_call_is_right(form: str, opset: int, pytestconfig: pytest.Config) -> None:
    """With `--thin`, every second call."""
    calls = [job for job in jobs() if unsupported_reason(form, job.call, TARGET) is None]
    assert len(calls) > 60
    if pytestconfig.getoption("--thin"):
        calls = calls[::2]
    faults = {job.name: job.fault([computed(job, form, opset, feeds) for feeds in job.feeds]) for job in calls}
    assert {name: fault for name, fault in faults.items() if fault} == {}


class Log(OpRun):
    """The operator where it is defined everywhere."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        assert not (x <= 0).any()
        return (np.log(x),)


def test_no_logarithm_is_taken_of_0() -> None:
    """As of a row without a key: it is -inf on the CPU, and -88 on WebGPU with SwiftShader."""
    (job,) = (job for job in jobs() if job.name == "all outputs (float32)")
    model = export_call(job.call, form="primitive")
    evaluator = ReferenceEvaluator(model, new_ops=[Log])
    with np.errstate(all="ignore"):
        rows = [evaluator.run(["lse"], dict(feeds))[0] for feeds in job.feeds]
    assert any(np.isneginf(lse).any() for lse in rows)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_padding_may_hold_anything(form: str, opset: int, number: float) -> None:
    """In keys alone, in values alone, and in both, against the same call with 0 there."""
    (job,) = (job for job in jobs() if job.name == "mask: padding (float32)")
    feeds = dict(job.feeds[0])
    real = np.arange(feeds["key"].shape[-2]) < feeds["key_lengths"][:, None]
    hidden = ~real[:, None, :, None]
    assert hidden.any()
    for names in (["key"], ["value"], ["key", "value"]):
        padded, clean = dict(feeds), dict(feeds)
        for name in ("key", "value"):
            clean[name] = np.where(hidden, np.float32(0), feeds[name])
            padded[name] = np.where(hidden, np.float32(number), feeds[name]) if name in names else clean[name]
        result, expected = (computed(job, form, opset, inputs)["output"] for inputs in (padded, clean))
        np.testing.assert_array_equal(result, expected)
