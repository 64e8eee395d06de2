"""The table of the home page: a few features on a few libraries and in onnxruntime, run while it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat.numpy
import numpy as np
import onnxruntime

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export._agree.backends import Backend, find_backends
from sdpa_xp_export._verify import reference
from sdpa_xp_export._verify.agreement import judge
from sdpa_xp_export._verify.textbook import textbook

LIBRARIES = {"numpy": "NumPy", "torch": "torch", "jax": "JAX", "array-api-strict": "array-api-strict"}
RULES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "sliding window": {"attn_mask": masks.sliding_window(5, 0)},
    "padding that holds NaN": {"attn_mask": masks.padding([9, 0])},
    "documents in one sequence": {"attn_mask": masks.document([0] * 4 + [1] * 5, [0] * 4 + [1] * 5)},
    "soft cap": {"softcap": 5.0},
}
Compute = Callable[[dict[str, Any], dict[str, Any]], np.ndarray]


def table() -> str:
    """Return the table in Markdown: the largest errors against the reference; `no` beyond the bound."""
    columns: dict[str, Compute] = {
        LIBRARIES[backend.name]: computes_on(backend) for backend in find_backends([*LIBRARIES])
    }
    columns["onnxruntime"] = in_a_graph
    rows = [["feature", *columns], ["---"] * (len(columns) + 1)]
    for feature, rules in RULES.items():
        rows.append([feature, *(error(compute, rules) for compute in columns.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def error(compute: Compute, rules: dict[str, Any]) -> str:
    """Compute a call whose four query heads share two key heads; return its error, or `no` beyond the bound."""
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 4, 9, 8), "key": (2, 2, 9, 8), "value": (2, 2, 9, 8)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    plain = dict(rules)
    if "attn_mask" in rules:
        plain["attn_mask"] = np.broadcast_to(masks.to_array(rules["attn_mask"], (2, 4, 9, 9)), (2, 4, 9, 9))
    exact = reference.attention(**arrays, **plain)[0]
    rounded = textbook(array_api_compat.numpy, **arrays, **plain)
    for name in ("key", "value"):
        unseen = ~plain["attn_mask"].any(axis=(1, 2)) if "attn_mask" in plain else np.zeros((2, 9), bool)
        arrays[name] = np.where(unseen[:, None, :, None], np.float32(np.nan), arrays[name])
    agreement = judge(compute(arrays, rules), exact, rounded, "float32")
    return f"{agreement.absolute:.0e}" if agreement.agrees else "no"


def computes_on(backend: Backend) -> Compute:
    """Return a function that computes a call on NumPy arrays with this library."""

    def compute(arrays: dict[str, Any], rules: dict[str, Any]) -> np.ndarray:
        inputs = {name: backend.put(array) for name, array in arrays.items()}
        return backend.get(scaled_dot_product_attention(**inputs, **rules))

    return compute


def in_a_graph(arrays: dict[str, Any], rules: dict[str, Any]) -> np.ndarray:
    specs = {name: TensorSpec("float32", array.shape) for name, array in arrays.items()}
    model = export_attention(**specs, **rules)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (output,) = session.run(None, arrays)
    return np.asarray(output)
