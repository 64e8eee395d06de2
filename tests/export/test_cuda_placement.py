"""What can be known of CUDA without a GPU: each node that is written for it has a kernel there.

cuda_kernels.json holds, for some releases of onnxruntime, the dtypes that the CUDA provider has a kernel for,
by operator, opset of its definition and type parameter: from docs/OperatorKernels.md of each release, and for
1.31.1 checked against the wheel. A kernel is for one definition: one of opset 13 does not serve a node of 21.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export._call.call import ExportCall, ExportOptions
from sdpa_xp_export._call.checking import checked_call
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import Runtime
from sdpa_xp_export.forms.choice import unsupported_reason

KERNELS = json.loads((Path(__file__).parent / "cuda_kernels.json").read_text())
TARGET = Runtime.parse("test", "onnxruntime>=1.31;cuda")
DTYPES = ("float32", "float16", "bfloat16", "float64")
LENGTHS = TensorSpec("int64", ("B",))


@dataclass(frozen=True)
class Node:
    op: str
    opset: int
    domain: str
    inputs: tuple[str | None, ...]

    def missing(self, release: str) -> str:
        """What the node lacks on CUDA; empty where it has a kernel."""
        if self.domain:
            since, parameters = "1", ["T", "T", "T", *["lengths, and what it is left out"] * 9]
        else:
            schema = onnx.defs.get_schema(self.op, self.opset)
            since, parameters = str(schema.since_version), [parameter.type_str for parameter in schema.inputs]
        kernel = KERNELS[release].get(self.op, {}).get(since)
        if kernel is None:
            return f"{self.op}-{since}"
        for dtype, parameter in zip(
            self.inputs, [*parameters, *[parameters[-1]] * len(self.inputs)], strict=False
        ):
            if dtype is not None and parameter in kernel and dtype not in kernel[parameter]:
                return f"{self.op}-{since}({parameter}={dtype})"
        return ""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes of each graph from now on, those in bodies of loops too."""
    nodes: list[Node] = []
    add_many = Graph.add_many

    def recorded(
        self: Graph, op: str, *inputs: GraphValue | None, domain: str = "", **rest: Any
    ) -> list[GraphValue]:
        nodes.append(
            Node(
                op,
                self.opset,
                domain,
                tuple(None if graph_value is None else graph_value.dtype for graph_value in inputs),
            )
        )
        return add_many(self, op, *inputs, domain=domain, **rest)

    monkeypatch.setattr(Graph, "add_many", recorded)
    return nodes


def call_of(query: TensorSpec, key: TensorSpec, value: TensorSpec, **rest: Any) -> ExportCall:
    return checked_call("test", query, key, value, ExportOptions(**rest))


def calls(dtype: str) -> dict[str, dict[str, Any]]:
    query = TensorSpec(dtype, ("B", 8, "L", 64))
    key = TensorSpec(dtype, ("B", 2, "S", 64))
    new = TensorSpec(dtype, ("B", 2, "L", 64))
    past = TensorSpec(dtype, ("B", 2, "P", 64))
    plain = {"query": query, "key": key, "value": key}
    step = {"query": query, "key": new, "value": new, "past_key": past, "past_value": past, "is_causal": True}
    ids = TensorSpec("int64", ("B", "L")), TensorSpec("int64", ("B", "S"))
    window = masks.causal("lower_right") & masks.sliding_window(4, 0, offset="lower_right")
    return {
        "plain": plain,
        "fixed": dict.fromkeys(("query", "key", "value"), TensorSpec(dtype, (2, 8, 32, 64))),
        "causal": plain | {"is_causal": True},
        "fixed batch, causal": dict.fromkeys(("query", "key", "value"), TensorSpec(dtype, (2, 8, "L", 64)))
        | {"is_causal": True},
        "causal, grouped": plain | {"key": new, "value": new, "is_causal": True},
        "softcap, scale": plain | {"softcap": 5.0, "scale": -0.3},
        "learned scale": plain | {"scale": TensorSpec(dtype, (8, 1, 1))},
        "boolean": plain | {"attn_mask": TensorSpec("bool", ("B", 1, "L", "S"))},
        "floating": plain | {"attn_mask": TensorSpec(dtype, ("L", "S"))},
        "two biases": plain
        | {"attn_mask": TensorSpec(dtype, ("S",)), "bias": TensorSpec(dtype, (8, "L", "S"))},
        "padding": plain | {"attn_mask": masks.padding(LENGTHS)},
        "window": plain | {"attn_mask": window & masks.padding(LENGTHS, LENGTHS)},
        "documents": plain | {"attn_mask": masks.document(*ids) | ~masks.prefix(LENGTHS)},
        "patterns": plain | {"attn_mask": masks.chunked(4) & masks.dilated(2)},
        "function": plain | {"attn_mask": masks.from_function(lambda b, h, i, j: (i - j) % 3 == (b + h) // 2)},
        "alibi": plain | {"bias": biases.alibi(8)},
        "relative": plain | {"bias": biases.relative(TensorSpec(dtype, (32, 8)))},
        "sinks": plain | {"sinks": TensorSpec(dtype, (8,))},
        "all outputs": plain | {"is_causal": True, "outputs": ("output", "lse", "weights", "scores")},
        "lse": plain | {"outputs": ("output", "lse")},
        "cache": step,
        "padded cache": step | {"past_lengths": LENGTHS},
        "layout": {name: TensorSpec(dtype, ("B", "L", 8, 64)) for name in ("query", "key", "value")}
        | {"layout": "...LHE"},
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("release", KERNELS)
def test_auto_writes_what_has_kernels(written: list[Node], release: str, dtype: str) -> None:
    target = ".".join(release.split(".")[:2])
    for name, call in calls(dtype).items():
        written.clear()
        export_attention(**call, runtime=f"onnxruntime>={target};cuda")
        assert written
        assert [node for node in written if node.missing(release)] == [], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["attention", "multi_head", "grouped_query", "tiled", "primitive"])
def test_each_form_has_kernels(written: list[Node], form: str, dtype: str) -> None:
    """On the newest release; what the form refuses is refused with its reason."""
    stated = 0
    for name, call in calls(dtype).items():
        written.clear()
        if unsupported_reason(form, call_of(**call), TARGET):
            continue
        export_attention(**call, form=form, runtime=str(TARGET))
        stated += 1
        assert [node for node in written if node.missing("1.31.1")] == [], name
    fused = form in ("attention", "multi_head", "grouped_query")
    refused = fused and (dtype == "float64" or (form == "grouped_query" and dtype == "float32"))
    assert (stated == 0) is refused


def test_a_missing_kernel_is_seen() -> None:
    assert Node("Less", 18, "", ("bfloat16", "bfloat16")).missing("1.31.1") == "Less-13(T=bfloat16)"
    assert Node("Attention", 23, "", ("float32",) * 3).missing("1.24.4") == "Attention-23"
    assert Node("GroupQueryAttention", 18, "com.microsoft", ("float32",)).missing("1.31.1")
    assert not Node("MatMul", 18, "", ("float32", "float32")).missing("1.23")
