"""A form is right on the release that `runtime` names, on each later one and on each provider, or refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from internals import FEW_SCORES, NEWEST_TRIED, PREFERRED, TARGETS, VERY_MANY_SCORES, FormName, metadata_of
from short_runs import assert_right

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx
from sdpa_xp_export.forms.choice import FORMS, SAME_ORDER

FIXED = TensorSpec("float32", (1, 4, 40, 64))
RULES: dict[str, dict[str, Any]] = {
    "all pairs": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "attn_mask": masks.sliding_window(7, 0)},
    "padding": {"attn_mask": masks.padding(TensorSpec("int64", (1,)))},
    "weights": {"outputs": ("output", "weights")},
}


def form_of(*specs: TensorSpec, **said: Any) -> str:
    """The form that a model says it is of."""
    model = export_attention(*specs, **said)
    return metadata_of(model)["sdpa_xp.form"]


@pytest.mark.parametrize("release", ["1.23", "1.23.2"])
def test_a_window_that_releases_count_otherwise_is_refused(release: str) -> None:
    """GroupQueryAttention with a window: no graph is right on onnxruntime 1.23 and on 1.24."""
    call: dict[str, Any] = {"form": "grouped_query", "is_causal": True}
    near = call | {"attn_mask": masks.sliding_window(7, 0)}
    runtime = f"onnxruntime>={release};cpu"
    with pytest.raises(ValueError, match="at the earliest"):
        export_attention(FIXED, FIXED, FIXED, **near, runtime=runtime)
    assert form_of(FIXED, FIXED, FIXED, **near, runtime="onnxruntime>=1.24;cpu") == "grouped_query"
    for open_window in (call, call | {"attn_mask": masks.sliding_window(None, 0)}):
        form = form_of(FIXED, FIXED, FIXED, **open_window, runtime=runtime)
        assert form == "grouped_query"


def test_an_opset_that_the_release_does_not_load_is_refused_without_an_attention_too() -> None:
    with pytest.raises(ValueError, match="or later"):
        to_onnx(lambda x: x + 1, FIXED, opset=24, runtime="onnxruntime>=1.23;cpu")
    to_onnx(lambda x: x + 1, FIXED, opset=24, runtime="onnxruntime>=1.24;cpu")


@pytest.mark.parametrize("provider", TARGETS)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_graph_of_an_old_release_is_one_of_each_later_release(provider: str, rules: dict[str, Any]) -> None:
    """Or it is refused: what is written for a release may not become wrong by an update of onnxruntime."""
    newest: dict[str, bytes] = {}
    for minor, form in product(reversed(range(23, 32)), FORMS):
        said: dict[str, Any] = rules | {"form": form, "runtime": f"onnxruntime>=1.{minor};{provider}"}
        try:
            model = export_attention(FIXED, FIXED, FIXED, **said)
        except ValueError:
            newest.setdefault(form, b"refused")
            continue
        del model.metadata_props[:]
        written = model.SerializeToString(deterministic=True)
        assert written == newest.setdefault(form, written), f"{form} for 1.{minor}"


ON_WEBGPU = pytest.mark.parametrize("provider", ["webgpu", "web"])


@ON_WEBGPU
@pytest.mark.parametrize("operator", ["MultiHeadAttention", "GroupQueryAttention"])
def test_what_webgpu_computes_wrong_is_refused(operator: str, provider: str) -> None:
    form = {"MultiHeadAttention": "multi_head", "GroupQueryAttention": "grouped_query"}[operator]
    said: dict[str, Any] = {"is_causal": True, "form": form}
    assert form_of(FIXED, FIXED, FIXED, **said) == form
    with pytest.raises(ValueError, match="the WebGPU provider"):
        export_attention(FIXED, FIXED, FIXED, **said, runtime=f"onnxruntime>=1.31;{provider}")
    assert form_of(FIXED, FIXED, FIXED, **said, runtime="onnxruntime>=1.31;wasm") == form


@ON_WEBGPU
@pytest.mark.parametrize("minor", [23, 28, 31])
@pytest.mark.parametrize("length", [5, 31, 32, 33, 4096, 2**14, "L"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_webgpu_takes_the_forms_of_primitives(
    rules: dict[str, Any], length: int | str, minor: int, provider: str
) -> None:
    """They are right on WebAssembly and on WebGPU, and have kernels on both."""
    spec = TensorSpec("float32", (1, 8, length, 64))
    form = form_of(spec, spec, spec, **rules, runtime=f"onnxruntime>=1.{minor};{provider}")
    many = length in (4096, 2**14, "L") and rules is not RULES["weights"]
    assert form == ("tiled" if many else "primitive")


@ON_WEBGPU
@pytest.mark.parametrize("form", ["primitive", "tiled"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_webgpu_gets_no_softmax(form: str, rules: dict[str, Any], provider: str) -> None:
    """WebGPU's gives 0 for a row with a NaN, and a model that diverges would look healthy."""
    rules = rules | {"outputs": ("output",)}  # tiled gives no weights
    for minor in (23, 31):
        said = rules | {"form": form, "runtime": f"onnxruntime>=1.{minor};{provider}"}
        model = export_attention(FIXED, FIXED, FIXED, **said)
        assert "Softmax" not in operators(model.graph)
        assert_right(model)
    assert "Softmax" in operators(export_attention(FIXED, FIXED, FIXED, **rules, form=form).graph)


def operators(graph: onnx.GraphProto) -> set[str]:
    """The operators of a graph, and of the bodies of its loops."""
    bodies = [
        node_attribute.g
        for node in graph.node
        for node_attribute in node.attribute
        if node_attribute.name == "body"
    ]
    return {node.op_type for node in graph.node}.union(*map(operators, bodies))


def test_layers_get_them_too() -> None:
    """Fixed and long, without a mask: for the CPU that is MultiHeadAttention."""
    layer = MultiHeadAttention.init(np.random.default_rng(0), 64, num_heads=8)
    words = TensorSpec("float32", (1, 2048, 64))
    operators = {}
    for provider in ("cpu", "wasm", "webgpu", "web"):
        model = to_onnx(layer, words, runtime=f"onnxruntime>=1.28;{provider}")
        operators[provider] = {node.op_type for node in model.graph.node if node.domain}
    fused = {"MultiHeadAttention"}
    assert operators == {"cpu": fused, "wasm": fused, "webgpu": set(), "web": set()}


BFLOAT16 = TensorSpec("bfloat16", (1, 4, 40, 64))


@pytest.mark.parametrize("provider", ["wasm", "webgpu", "web"])
def test_browsers_have_no_bfloat16(provider: str) -> None:
    """A page could not pass the inputs; inside of a layer the dtype is fine."""
    runtime = f"onnxruntime>=1.31;{provider}"
    form_of(BFLOAT16, BFLOAT16, BFLOAT16, runtime="onnxruntime>=1.31;cpu")
    with pytest.raises(TypeError, match="must not be bfloat16"):
        export_attention(BFLOAT16, BFLOAT16, BFLOAT16, runtime=runtime)

    def inside(x: Any) -> Any:
        xp = x.__array_namespace__()
        half = xp.astype(x, "bfloat16")
        return xp.astype(scaled_dot_product_attention(half, half, half), x.dtype)

    to_onnx(inside, FIXED, runtime=runtime)


@pytest.mark.parametrize("form", ["auto", "primitive"])
@pytest.mark.parametrize(
    ("release", "untried"), [("1.32", False), ("1.32.9", False), ("1.33", True), ("9.9", True)]
)
def test_a_release_beyond_the_newest_that_was_tried_is_told(form: str, release: str, untried: bool) -> None:
    said: dict[str, Any] = {"form": form, "runtime": f"onnxruntime>={release};cpu"}
    reason = metadata_of(export_attention(FIXED, FIXED, FIXED, **said))["sdpa_xp.reason"]
    assert reason.endswith(f"; the newest release tried is {NEWEST_TRIED}") is untried
    layer = to_onnx(lambda x: scaled_dot_product_attention(x, x, x), FIXED, **said)
    assert ("the newest release tried" in metadata_of(layer)["sdpa_xp.forms"]) is untried


@pytest.mark.parametrize(
    ("runtime", "newest"), [("1.31;wasm", "1.30.0"), ("1.31;web", "1.30.0"), ("1.32;webgpu", "1.31.1")]
)
def test_browsers_were_tried_with_other_releases(runtime: str, newest: str) -> None:
    reason = metadata_of(export_attention(FIXED, FIXED, FIXED, runtime=f"onnxruntime>={runtime}"))[
        "sdpa_xp.reason"
    ]
    assert reason.endswith(f"; the newest release tried is {newest}")


def test_the_newest_release_that_was_tried_has_results() -> None:
    results = json.loads((Path(__file__).parents[3] / "results" / "runtimes.json").read_text())
    assert [*results["releases"]][-1] == NEWEST_TRIED
    assert f"Releases after {NEWEST_TRIED} were not tried" in " ".join(str(export_attention.__doc__).split())


def test_every_form_and_case_has_a_place() -> None:
    """A new form or kind of call that a table lacks would only be noticed by the call that it is for."""
    sizes = ("few queries", "few scores", "many scores", "very many scores")
    cases = {(kind, size) for kind in FEW_SCORES for size in sizes}
    assert [*get_args(FormName)] == [*PREFERRED] == [form.name for form in FORMS.values()]
    providers = (SAME_ORDER.get(name, name) for name in (*TARGETS, "openvino", "onnx"))
    assert PREFERRED["primitive"] == dict.fromkeys(providers, cases)
    assert max(FEW_SCORES.values()) < VERY_MANY_SCORES
