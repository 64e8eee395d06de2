"""Graphs for OpenVINO in it: every call of the list that is not refused, in both forms that are right there."""

from __future__ import annotations

import pytest
from feature_calls import features
from internals import READERS, Runtime

from quality.runtime.jobs import Job, jobs_of_features
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import check_tensors, unsupported_reason

RUNTIME = "openvino>=2026.4;cpu"
TARGET = Runtime.parse("test", RUNTIME)


def calls(dtype: str) -> list[Job]:
    """Those that the exporter writes for OpenVINO."""
    kept = []
    for job in jobs_of_features(features(dtype), dtype):
        try:
            check_tensors("test", job.call, TARGET)
        except TypeError:
            continue
        kept.append(job)
    return kept


def test_refused() -> None:
    """A double softmax, and ids of 64 bits."""
    written = {job.name for job in calls("float32")}
    refused = [name for name in features("float32") if f"{name} (float32)" not in written]
    assert refused == ["mask: documents", "softmax in float64"]
    assert calls("float64") == []
    for form in ("attention", "multi_head", "grouped_query"):
        assert all(unsupported_reason(form, job.call, TARGET) for job in calls("float32"))


@pytest.mark.needs("openvino")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["primitive", "tiled"])
def test_every_call_is_right(form: str, dtype: str, pytestconfig: pytest.Config) -> None:
    """With `--thin`, a part of the calls."""
    jobs = [job for job in calls(dtype) if unsupported_reason(form, job.call, TARGET) is None]
    assert len(jobs) > 100
    faults = {}
    for job in jobs[:: 9 if pytestconfig.getoption("--thin") else 1]:
        model = export_call(job.call, form=form, runtime=RUNTIME)
        names = [output.name for output in model.graph.output]
        reader = READERS["openvino"](model.SerializeToString(), names)
        faults[job.name] = job.fault([reader.run(feeds) for feeds in job.feeds])
    assert {name: fault for name, fault in faults.items() if fault} == {}
