"""Graphs for CUDA: where onnxruntime-gpu places them, which kernels it chooses, and what it allocates.

`make cuda-placement` asks it without a GPU, in many minutes, at night. Here its results
must be those of the graphs of today.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from feature_calls import DTYPES, features
from standins.cuda.placement import RESULTS, RUNTIME, Graph, broken_rules, digest, graphs, groups

from sdpa_xp_export.export import export_call


def results() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_results_are_those_of_todays_graphs(dtype: str) -> None:
    """If not, run `make cuda-placement`. Numbers in a graph may change; nodes and what they read may not."""
    today = {name: digest(models) for name, models in groups(list(graphs([dtype]))).items()}
    assert {name for name in today if name.startswith("auto")}
    assert today == {name: known for name, known in results()["digests"].items() if name.endswith(f", {dtype}")}


def test_no_graph_breaks_a_rule_of_placement() -> None:
    measured = results()
    assert {"1.28.0", "1.31.1"} <= {*measured["releases"]}
    for release, by_group in measured["releases"].items():
        assert {name: about["broken"] for name, about in by_group.items() if about["broken"]} == {}, release
        assert sum(about["graphs"] for about in by_group.values()) > 1900
        assert by_group.keys() == measured["digests"].keys()
        for name, about in by_group.items():
            if name.startswith(("auto", "tiled")):
                # A length that follows from data is any number here, and such a run may fail.
                assert about["did not run"] <= 0.1 * about["ran"], name


def test_each_rule_can_be_broken() -> None:
    call = features("float32")["softcap, causal"]
    graph = Graph("softcap, causal", call, "auto", "attention", export_call(call, runtime=RUNTIME))
    runs = [{"bytes": size, "inputs": 10, "kernels": ["unfused"], "reads": 1} for size in (1000, 2000)]
    line: dict[str, Any] = {"host": [["Sub", "loop", "int64", 1]], "copies": {"main": 3}, "runs": runs}

    def broken(**changed: Any) -> list[str]:
        return list(broken_rules(graph, line | changed))

    assert broken() == []
    assert broken(error="the process ended with -6") == ["the process ended with -6"]
    assert broken(host=[["MatMul", "main", "float", 3]]) == ["MatMul of float with 3 long axes is on the host"]
    assert broken(host=[["Less", "loop", "bool", 2]]) == [
        "Less of bool with 2 long axes is on the host in a loop"
    ]
    assert broken(copies={"loop": 2}) == ["2 copies between host and device in a loop"]
    assert broken(runs=[runs[0], runs[1] | {"reads": 9}]) == [
        "the host reads the device 1 times, and 9 times at more steps"
    ]
    assert broken(runs=[runs[0], runs[1] | {"bytes": 4000}]) == [
        "memory grows 4.0 times if lengths double (unfused)"
    ]
