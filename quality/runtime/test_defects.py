"""The known defects, each met by a graph of one node: a release has them as defects.json says, and no other.

`--runtimes=1.24.4,1.26.0` chooses the releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from internals import known_defects, numbers_of
from onnx import helper

from quality.runtime.releases import NEWEST, REDUCED, run_graphs
from sdpa_xp_export import TensorSpec, export_attention, verify
from sdpa_xp_export.forms.choice import FORMS

RNG = np.random.default_rng(20170612)
QUERY, KEY, VALUE = (RNG.standard_normal((1, 2, n, 8)) for n in (3, 5, 5))
ROWS, COLUMNS = np.arange(3)[:, None], np.arange(5)
LARGE = 2**53 + 1
"""The least integer that float64 has not."""


class Trial(NamedTuple):
    """A node with its inputs, None for one that is left out; and its first output if it is right."""

    inputs: list[Any]
    right: Any
    options: Mapping[str, Any] = MappingProxyType({})
    opset: int = 23
    outputs: int = 1


def attention(allowed: Any = True, *, query: Any = QUERY, key: Any = KEY, softcap: float = 0.0) -> Any:
    """The formula, in float64; 0 for a query without keys."""
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(8)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    p = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ VALUE[..., : key.shape[-2], :]


def packed(x: Any) -> Any:
    """(1, H, L, E) -> (1, L, H * E)."""
    return np.swapaxes(x, 1, 2).reshape(1, x.shape[2], -1)


def of_itself(query: Any, right: Any, **options: Any) -> Trial:
    """GroupQueryAttention of as many keys as queries, all of them real."""
    tokens = [packed(x).astype(np.float32) for x in (query, KEY, VALUE)]
    lengths = [np.asarray([4], np.int32), np.asarray(5, np.int32)]
    heads = {"num_heads": 2, "kv_num_heads": 2}
    return Trial([*tokens, None, None, *lengths], packed(right), heads | options, outputs=3)


def trials() -> dict[str, Trial]:
    """Return what meets each defect."""
    tokens = [x.astype(np.float32) for x in (QUERY, KEY, VALUE)]
    lines = [packed(x) for x in tokens]
    none_in_1 = np.where(ROWS == 1, False, np.ones((3, 5), bool))
    first_4, real_4 = COLUMNS < 4, [None, None, None, np.asarray([4])]
    poisoned = [*tokens[:2], np.where(first_4[:, None], tokens[2], np.nan).astype(np.float32)]
    halves = [x.astype(np.float16) for x in (250 + QUERY, 250 + KEY / 50, VALUE)]
    five = RNG.standard_normal((1, 2, 5, 8))
    with_nan = np.where(COLUMNS[:, None] == 2, np.nan, five)
    nan = np.asarray([np.nan, 0.0], np.float32)
    causal, heads = {"is_causal": 1}, {"num_heads": 2}
    least = np.full((3, 5), np.finfo(np.float32).min)
    empty = np.zeros((0, 3, 16), np.float32)
    near = (COLUMNS[:, None] >= COLUMNS) & (COLUMNS[:, None] < COLUMNS + 3)
    return {
        "soft cap leaks": Trial(
            [*tokens, np.broadcast_to(first_4, (3, 5))], attention(first_4, softcap=0.5), {"softcap": 0.5}
        ),
        "rows without keys": Trial([*tokens, none_in_1], attention(none_in_1)),
        "lengths are ignored": Trial([*tokens, *real_4], attention(first_4), opset=24),
        "causal with lengths": Trial(
            [*tokens, *real_4], attention(first_4 & (ROWS + 1 >= COLUMNS)), causal, opset=24
        ),
        "least biases": Trial([*tokens, least], np.broadcast_to(VALUE.mean(-2, keepdims=True), QUERY.shape)),
        "float64": Trial([QUERY, KEY, VALUE], attention()),
        "overflow": Trial(halves, attention(query=halves[0].astype(float), key=halves[1].astype(float))),
        "masked NaN": Trial([*poisoned, np.broadcast_to(first_4, (3, 5))], attention(first_4)),
        "empty batch": Trial([empty] * 3, empty, heads),
        "diagonal": Trial(lines, packed(attention(ROWS >= COLUMNS)), heads | {"unidirectional": 1}),
        "bias of an empty row": Trial(
            [*lines, None, None, np.where(none_in_1, 0, -np.inf).astype(np.float32)[None, None]],
            packed(attention(none_in_1)),
            heads,
        ),
        "window of other keys": of_itself(five, attention(near, query=five), local_window_size=3),
        "NaN is 0": of_itself(
            with_nan, np.where(np.isnan(with_nan), np.nan, attention(COLUMNS[:, None] >= COLUMNS, query=five))
        ),
        "erf of NaN": Trial([nan], nan, opset=18),
        "sums of integers": Trial([np.asarray([LARGE, 0]), np.asarray([0])], [LARGE], opset=18),
        "products of integers": Trial([np.asarray([LARGE, 1]), np.asarray([0])], [LARGE], opset=18),
    }


def model_of(name: str, trial: Trial) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a graph of one node, and its inputs."""
    node = known_defects()[name].node
    domain = "com.microsoft" if node in ("MultiHeadAttention", "GroupQueryAttention") else ""
    feeds = {f"input_{n}": np.asarray(x) for n, x in enumerate(trial.inputs) if x is not None}
    inputs = [f"input_{n}" if x is not None else "" for n, x in enumerate(trial.inputs)]
    info = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in feeds.items()
    ]
    outputs = [f"output_{n}" for n in range(trial.outputs)]
    output = helper.make_tensor_value_info(outputs[0], info[0].type.tensor_type.elem_type, None)
    written = helper.make_node(node, inputs, outputs, domain=domain, **trial.options)
    opsets = [helper.make_opsetid("", trial.opset)] + [helper.make_opsetid(domain, 1)] * bool(domain)
    graph = helper.make_graph([written], "defect", info, [output])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def is_right(outputs: Any, right: Any) -> bool:
    """Return whether a run gave what is right; in float32, up to a few roundings. A crash did not."""
    if isinstance(outputs, str):
        return False
    (output,) = outputs[0].values()
    if output.dtype.kind == "i":
        return bool((output == right).all())
    close = {"float16": 1e-2, "float32": 1e-5}.get(output.dtype.name, 1e-13)
    return bool(np.allclose(output, right, rtol=0, atol=close, equal_nan=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        names = metafunc.config.getoption("--runtimes")
        metafunc.parametrize("release", names.split(",") if names else (*REDUCED, NEWEST))


def test_a_release_has_them_as_stated(release: str, tmp_path: Path) -> None:
    """A release that cannot load an opset says nothing of it."""
    tried, graphs = trials(), {}
    for name, trial in tried.items():
        model, feeds = model_of(name, trial)
        graphs[name] = model, [feeds]
    results = run_graphs(release, graphs, tmp_path)
    wrong = {name for name, trial in tried.items() if not is_right(results[name], trial.right)}
    unloaded = {name for name, result in results.items() if "opset 24 is under" in str(result).lower()}
    number = numbers_of(release)
    stated = {name for name in tried if known_defects()[name].since <= number < known_defects()[name].until}
    assert wrong - unloaded == stated


def test_each_of_the_cpu_is_met() -> None:
    assert {*trials()} == {name for name, defect in known_defects().items() if defect.provider == "cpu"}
    assert all(defect.form in (*FORMS, "") for defect in known_defects().values())


@pytest.mark.usefixtures("short_verify")
def test_verify_names_what_may_explain_a_failure() -> None:
    """Of the operators in the graph, and if it is wrong."""
    qkv = TensorSpec("float64", (1, 2, 5, 8))
    info = [helper.make_tensor_value_info(name, 11, qkv.shape) for name in ("query", "key", "value", "output")]
    node = helper.make_node("Attention", ["query", "key", "value"], ["output"])
    graph = helper.make_graph([node], "attention", info[:3], info[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    report = verify(model, call={"query": qkv, "key": qkv, "value": qkv})
    notes = [note for note in report.notes if "known" in note]
    assert not report.agrees
    assert any(
        "Attention" in note and "float64 is computed to the accuracy of float32" in note for note in notes
    )
    assert not any("Erf" in note for note in notes)


@pytest.mark.usefixtures("short_verify")
def test_verify_names_none_of_a_right_model() -> None:
    qkv = TensorSpec("float32", (1, 2, 5, 8))
    report = verify(export_attention(qkv, qkv, qkv, form="attention"))
    assert report.agrees
    assert not any("known" in note for note in report.notes)
