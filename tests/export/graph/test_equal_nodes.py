"""Equal nodes are one node: graphs are smaller, and no tool can take one for the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from edits import nodes
from feature_calls import features
from graphs import run

from sdpa_xp import scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, to_onnx
from sdpa_xp_export.export import export_call

X = TensorSpec("float32", ("N", 4))


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_in(attribute.g)


def computations(graph: onnx.GraphProto) -> Counter[bytes]:
    """What each node computes; a copy is there to be another value."""
    counted: Counter[bytes] = Counter()
    for node in graph.node:
        bare = onnx.NodeProto()
        bare.CopyFrom(node)
        bare.name = ""
        del bare.output[:]
        counted[bare.SerializeToString(deterministic=True)] += node.op_type != "Identity"
    return counted


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", features("float32"))
@pytest.mark.parametrize("form", ["auto", "tiled", "primitive"])
def test_no_node_is_there_twice(form: Any, name: str) -> None:
    try:
        model = export_call(features("float32")[name], form=form)
    except ValueError:  # of a form that does not take the call
        return
    for graph in graphs_in(model.graph):
        assert max(computations(graph).values(), default=1) == 1


def test_operands_that_commute() -> None:
    def layer(x: Any) -> Any:
        xp = x.__array_namespace__()
        one, other = (x > 0) & (x < 2), (2 > x) & (0 < x)  # noqa: SIM300
        return xp.where(one, x + 1, 1 + x) * xp.where(other, x * 2, 2 * x) + xp.where(x == 1, x, 0.0)

    counted = Counter(node.op_type for node in to_onnx(layer, X).graph.node)
    assert [counted[op] for op in ("And", "Less", "Greater", "Mul", "Equal")] == [1, 1, 1, 2, 1]


def test_what_is_not_equal_stays() -> None:
    """Other operands, attributes, dtypes and orders; and numbers that differ in their sign alone."""

    def layer(x: Any) -> Any:
        xp = x.__array_namespace__()
        return (
            x - 1.0,
            1.0 - x,
            x / 2.0,
            2.0 / x,
            xp.sum(x, axis=0),
            xp.sum(x, axis=0, keepdims=True),
            xp.astype(x, xp.float64),
            xp.astype(x, xp.float16),
            x < 1,
            x > 1,
            x * 0.0,
            x * -0.0,
        )

    x = np.asarray([[1.0, 2, 3, 4]], np.float32)
    for output, expected in zip(run(to_onnx(layer, X), {"x": x}).values(), layer_of(x), strict=True):
        np.testing.assert_array_equal(output, expected)
        np.testing.assert_array_equal(np.signbit(output), np.signbit(expected))


def layer_of(x: np.ndarray) -> list[np.ndarray]:
    half, double = x.astype(np.float16), x.astype(np.float64)
    sums = [x.sum(axis=0), x.sum(axis=0, keepdims=True)]
    return [x - 1, 1 - x, x / 2, 2 / x, *sums, double, half, x < 1, x > 1, x * 0.0, x * np.float32(-0.0)]


def test_outputs_that_are_equal_are_two_values() -> None:
    model = to_onnx(lambda x: (x + 1, 1 + x), X)
    assert len({value.name for value in model.graph.output}) == 2
    outputs = run(model, {"x": np.ones((2, 4), np.float32)})
    np.testing.assert_array_equal(outputs["output_0"], outputs["output_1"])


def test_two_equal_calls_of_attention_are_one() -> None:
    def layer(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x) + scaled_dot_product_attention(x, x, x)

    spec = TensorSpec("float32", ("B", 2, "L", 8))
    counted = Counter(node.op_type for node in nodes(to_onnx(layer, spec, form="primitive").graph))
    assert (counted["Softmax"], counted["MatMul"]) == (1, 2)
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype(np.float32)
    np.testing.assert_allclose(run(to_onnx(layer, spec), {"x": x})["output"], layer(x), rtol=0, atol=2e-6)


def test_a_graph_has_the_same_bytes_each_time() -> None:
    def layer(x: Any) -> Any:
        return x[x[:, 0] > 0] + x[0 < x[:, 0]]  # noqa: SIM300

    assert len({to_onnx(layer, X).SerializeToString(deterministic=True) for _ in range(3)}) == 1
