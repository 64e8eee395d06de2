"""Calls of linear attention and of the causal convolution, their float64 reference, and ONNX's own cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest

Arrays = dict[str, np.ndarray]
RULES = {
    "linear": (0, False),
    "gated": (8, False),
    "gated, a head": (1, False),
    "delta": (0, True),
    "gated_delta": (8, True),
    "gated_delta, a head": (1, True),
}
"""The width of the decay, 0 for none, and whether there is a beta."""
DECAYS = (0.0, 0.01, 0.3, 2.0, 20.0, np.inf)
"""What is forgotten at a token: sums of these overflow exp in a chunk, and inf - inf would be NaN."""


def draw(rule: str, length: int, dtype: str = "float64", heads: int = 4, seed: int = 0) -> Arrays:
    """(2, heads, L, 8), (2, 2, L, 8) with rows of length 1, (2, 2, L, 5), and what the rule needs."""
    rng, (width, has_beta) = np.random.default_rng(seed), RULES[rule]
    key = rng.standard_normal((2, 2, length, 8))
    arrays = {
        "query": rng.standard_normal((2, heads, length, 8)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal((2, 2, length, 5)),
    }
    if width:
        arrays["decay"] = -rng.choice(DECAYS, (2, 2, length, width), p=(0.2, 0.3, 0.2, 0.15, 0.1, 0.05))
    if has_beta:
        arrays["beta"] = rng.random((2, 2, length, 1))
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    state = rng.standard_normal((2, 2, 8, 5))
    return arrays | {"state": state.astype("float64" if dtype == "float64" else "float32")}


def recurrence(arrays: Mapping[str, Any], dtype: Any = np.float64, scale: float = 8**-0.5) -> tuple[Any, Any]:
    """Token after token, as the text of the operator has it."""
    x = {name: np.asarray(array).astype(dtype) for name, array in arrays.items()}
    query, key, value = x["query"], x["key"], x["value"]
    state = x.get("state", np.zeros((*key.shape[:-2], key.shape[-1], value.shape[-1]), dtype))
    outputs = []
    with np.errstate(all="ignore"):
        for t in range(query.shape[-2]):
            if "decay" in x:
                state = state * np.exp(x["decay"][..., t, :])[..., None]
            update = value[..., t, :]
            if "beta" in x:
                read = np.sum(state * key[..., t, :, None], axis=-2)
                update = x["beta"][..., t, :] * (update - read)
            state = state + key[..., t, :, None] * update[..., None, :]
            shared = np.repeat(state, query.shape[-3] // key.shape[-3], axis=-3)
            outputs.append(np.sum(shared * query[..., t, :, None], axis=-2) * dtype(scale))
    return np.stack(outputs, axis=-2), state


def onnx_cases(operator: str) -> Iterator[tuple[str, dict[str, Any], Arrays, dict[str, Any], list[np.ndarray]]]:
    """The name of each node test, its arrays as the library takes them, their keywords, and the results."""
    from onnx import helper

    file = {"LinearAttention": "linear_attention", "CausalConvWithState": "causal_conv_with_state"}[operator]
    pytest.importorskip(f"onnx.backend.test.case.node.{file}", reason="this onnx lacks the operator")
    for test in import_module("onnx.backend.test.case.node")._NodeTestCases:
        node = test.model.graph.node[0]
        if node.op_type == operator and "_expanded" not in test.name:
            ((inputs, outputs),) = test.data_sets
            stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            arrays = dict(zip(filter(None, node.input), inputs, strict=True))
            if "past_state" in arrays:
                arrays["state"] = arrays.pop("past_state")
            if operator == "CausalConvWithState":
                activation = stated.get("activation", b"none").decode()
                rules = {} if activation == "none" else {"activation": activation}
            else:
                for name in arrays.keys() - {"state"}:
                    heads = stated["q_num_heads" if name == "query" else "kv_num_heads"]
                    packed = arrays[name]  # a beta may have one number for all heads
                    arrays[name] = heads_first(packed, min(heads, packed.shape[-1]))
                outputs = [heads_first(outputs[0], stated["q_num_heads"]), *outputs[1:]]
                rules = {
                    "rule": stated.get("update_rule", b"gated_delta").decode(),
                    "scale": stated.get("scale"),
                }
            yield test.name, arrays, rules, outputs


def heads_first(array: np.ndarray, heads: int) -> np.ndarray:
    """(B, L, heads * width) -> (B, heads, L, width)."""
    return np.swapaxes(array.reshape(*array.shape[:2], heads, -1), 1, 2)


def assert_as_onnx(results: Any, expected: list[np.ndarray], name: str) -> None:
    for result, array in zip(results, expected, strict=True):
        eps = 8 * float(np.finfo(array.dtype).eps)
        np.testing.assert_allclose(result, array, atol=eps, rtol=eps, err_msg=name)
