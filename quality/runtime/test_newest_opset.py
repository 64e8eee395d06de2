"""Opset 27, for onnxruntime 1.32: it has linear attention, and from 25 on Attention has windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from linear_cases import assert_as_onnx, onnx_cases
from onnx import helper

from quality.conformance.onnx_cases import CASES, Case, named
from quality.conformance.onnx_exports import exports as exports_of_case
from quality.runtime.jobs import jobs
from quality.runtime.outcomes import exports, faults, runtime_of
from quality.runtime.releases import NEWEST, run_graphs
from sdpa_xp import causal_conv_with_state, linear_attention
from sdpa_xp_export import TensorSpec, to_onnx
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS

OPSET = 27
OTHERS = ("float64", "bfloat16")
"""With `--thin`, calls of these are left out: their graphs cast to float32 or are those of float32."""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_call_is_right(form: str, pytestconfig: pytest.Config) -> None:
    thin = bool(pytestconfig.getoption("--thin"))
    calls = [job for job in jobs() if not thin or job.call.query.dtype not in OTHERS]
    graphs = exports([NEWEST], [form], calls, OPSET)
    assert {graph.job.name: fault for graph, fault in faults(NEWEST, graphs).items()} == {}
    assert graphs[NEWEST][form].graphs


WINDOWS = [
    case
    for case in CASES
    # In a cache, ONNX's cases have a mask beside the window, so that the whole is a mask in the graph.
    if case.window != (None, None) and not case.past and case.key_lengths is None and case.softmax_dtype is None
]


@pytest.mark.parametrize("case", WINDOWS, ids=named)
def test_windows_of_onnx_are_attributes_again(case: Case) -> None:
    (export,) = exports_of_case(case)
    model = export_call(export.call, form="attention", opset=25, runtime=runtime_of(NEWEST))
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    stated = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert tuple(stated.get(f"{side}_window_size") for side in ("left", "right")) == case.window
    assert bool(stated["is_causal"]) == case.is_causal


@pytest.mark.parametrize("function", [linear_attention, causal_conv_with_state])
def test_linear_attention_is_the_operator_of_onnx(function: Any, tmp_path: Path) -> None:
    operator = {linear_attention: "LinearAttention", causal_conv_with_state: "CausalConvWithState"}[function]
    graphs, expected = {}, {}
    for name, arrays, rules, outputs in onnx_cases(operator):
        inputs = {"past" if n == "state" else n: x for n, x in arrays.items()}

        def layer(past: Any = None, rules: Any = rules, **inputs: Any) -> Any:
            return function(**inputs, state=past, **rules)

        specs = {n: TensorSpec(x.dtype.name, x.shape) for n, x in inputs.items()}
        model = to_onnx(layer, **specs, opset=OPSET, runtime=runtime_of(NEWEST))
        assert ("", operator) in {(node.domain, node.op_type) for node in model.graph.node}
        graphs[name], expected[name] = (model, [inputs]), outputs
    for name, results in run_graphs(NEWEST, graphs, tmp_path).items():
        assert_as_onnx(results[0].values(), expected[name], name)
