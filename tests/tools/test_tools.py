"""What people run on ONNX files, on models of all forms: the result computes what the model computed."""

from __future__ import annotations

import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from short_runs import assert_right
from tools.models import MODELS, SIZES, run
from tools.results import CLOSE, assert_equal, expected
from tools.tools import TOOLS

INEXACT = {"quantize_dynamic, MatMul": 0.03, "float16 of onnxruntime": 2e-3}
"""Tools that replace numbers by shorter ones: int8 of the weights of layers, and half of the mantissa."""
CONTRIB = ("grouped_query", "multi_head")
"""Forms of operators that only onnxruntime has."""
NEEDS = {"onnxsim": "onnxsim", "onnxslim": "onnxslim", "onnxoptimizer": "onnxoptimizer"}
UPSTREAM = {
    ("onnxslim", "grouped_query, fixed"),
    ("float16 of onnxruntime", "tiled, two outputs"),
    ("float16 of onnxruntime", "arrays, tiled"),
}
"""What a tool makes invalid: a row of the table in docs/how-to/export.md, and a test in test_table.py."""
CASES = [
    pytest.param(tool, name, marks=[pytest.mark.needs(NEEDS[tool])] if tool in NEEDS else [])
    for tool in TOOLS
    for name in MODELS
    if (tool, name) not in UPSTREAM
]


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith(("layers", "decoder", "arrays"))]
)
def test_the_models_are_right(name: str) -> None:
    assert_right(MODELS[name].model)


def test_models_of_all_forms() -> None:
    assert {exported.form for exported in MODELS.values()} == {
        *("primitive", "tiled", "attention", "grouped_query", "multi_head")
    }
    assert len(MODELS) >= 20


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("tool", "name"), CASES)
@pytest.mark.filterwarnings("ignore")  # of the tools
def test_the_result_of_a_tool_computes_the_same(tool: str, name: str) -> None:
    """At two sizes, so open lengths have stayed open."""
    result = TOOLS[tool](MODELS[name].model)
    for size in range(len(SIZES)):
        feeds = MODELS[name].feeds(size)
        assert_equal(run(result, feeds), expected(name, size), INEXACT.get(tool, CLOSE))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name, exported in MODELS.items() if exported.form not in CONTRIB])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of rows without a key
def test_the_evaluator_of_onnx_reads_every_model(name: str) -> None:
    assert_equal(ReferenceEvaluator(MODELS[name].model).run(None, MODELS[name].feeds(0)), expected(name, 0))


@pytest.mark.parametrize("name", MODELS)
def test_a_body_has_constants_of_its_own(name: str) -> None:
    """onnx 1.23.2 renames no constants that a body captures, and does not keep what only a body reads."""
    graph = MODELS[name].model.graph
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        for body in (x.g for x in node.attribute if x.type == onnx.AttributeProto.GRAPH):
            read = {read for inner in body.node for read in inner.input}
            assert not constants & read
            assert not {graph_input.name for graph_input in body.input} & {
                graph_input.name for graph_input in graph.input
            }
