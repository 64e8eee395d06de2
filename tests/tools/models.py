"""Exported models of all forms, on which the tools of other projects are run: calls and layers, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime

from sdpa_xp import KVCache, biases, masks, scaled_dot_product_attention
from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp.positional import Rotary
from sdpa_xp_export import TensorSpec, export_attention, to_onnx

Arrays = dict[str, np.ndarray]
SIZES = {"B": 2, "L": 150, "S": 170, "P": 20, "C": 170}, {"B": 3, "L": 1, "S": 7, "P": 5, "C": 6}
"""The lengths of two runs: of more than a block of `tiled`, and of one query."""
QUERY, KEY = TensorSpec("float32", ("B", 4, "L", 8)), TensorSpec("float32", ("B", 2, "S", 8))
NEW, PAST = TensorSpec("float32", ("B", 2, "L", 8)), TensorSpec("float32", ("B", 2, "P", 8))
FIXED = TensorSpec("float32", (2, 4, 256, 8))
TOKENS = TensorSpec("float32", ("B", "L", 16))
COUNTS = TensorSpec("int64", ("B",))
OPEN, STEP = (QUERY, KEY, KEY), (QUERY, NEW, NEW)
CACHE: dict[str, Any] = {"past_key": PAST, "past_value": PAST, "is_causal": True}
ROOM = TensorSpec("float32", ("B", 2, "C", 8))
PADDED: dict[str, Any] = {"past_key": ROOM, "past_value": ROOM, "past_lengths": COUNTS, "is_causal": True}
_RNG = np.random.default_rng(36)
TABLE = _RNG.standard_normal((32, 4), np.float32)
LAYERS = [
    MultiHeadAttention.init(np.random.default_rng(seed), 16, num_heads=4, num_kv_heads=2, like=TABLE)
    for seed in (0, 1)
]
EXTRA = _RNG.standard_normal((16, 16), np.float32) / 4


@dataclass(frozen=True)
class Exported:
    """A model, the form of its attention, and a call or a layer that it came from."""

    form: str
    export: Callable[[], onnx.ModelProto]

    def feeds(self, size: int) -> Arrays:
        return drawn(self.model, SIZES[size])

    @property
    def model(self) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(kept(self.export))
        return copy


@cache
def kept(export: Callable[[], onnx.ModelProto]) -> onnx.ModelProto:
    return export()


def drawn(model: onnx.ModelProto, sizes: dict[str, int]) -> Arrays:
    """Inputs of a model, drawn by name and dtype: all integers are lengths, of which one is 0."""
    rng = np.random.default_rng(1)
    feeds = {}
    for graph_input in model.graph.input:
        tensor = graph_input.type.tensor_type
        shape = [axis.dim_value or sizes[axis.dim_param] for axis in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind == "b":
            array = rng.random(shape) < 0.5
        elif dtype.kind == "i":
            array = rng.integers(0, min(sizes["P"], sizes["S"]) - 1, shape)
            array[-1] = 0
        else:
            array = rng.standard_normal(shape)
        feeds[graph_input.name] = array.astype(dtype)
    return feeds


def run(model: onnx.ModelProto | bytes, feeds: Arrays) -> list[np.ndarray]:
    """Return the outputs; of the inputs, those are taken that the model has."""
    data = model if isinstance(model, bytes) else model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {x.name: feeds[x.name] for x in session.get_inputs()})


def call(form: str, specs: tuple[TensorSpec, ...], **rules: Any) -> Exported:
    return Exported(form, lambda: export_attention(*specs, form=form, **rules))


def stack(form: str, **rules: Any) -> Exported:
    """Two layers of attention with norms and a product between them, and padding."""

    def layers(x: Any, key_lengths: Any) -> Any:
        xp = x.__array_namespace__()
        for layer in LAYERS:
            centred = x - xp.mean(x, axis=-1, keepdims=True)
            x = x + layer(centred, attn_mask=masks.padding(key_lengths) & masks.causal())
            x = x + xp.tanh(x @ EXTRA)
        return x

    return Exported(form, lambda: to_onnx(layers, TOKENS, COUNTS, form=form, **rules))


def decoder(form: str) -> Exported:
    def step(x: Any, past_key: Any, past_value: Any) -> Any:
        kv_cache = KVCache(past_key, past_value, rotary=Rotary(4), rotated=True)
        kv_cache = kv_cache.append(*LAYERS[0].project_key_value(x))
        return {"output": LAYERS[0].attend(x, kv_cache), "key": kv_cache.key, "value": kv_cache.value}

    past = TensorSpec("float32", ("B", 2, "P", 4))
    return Exported(form, lambda: to_onnx(step, TOKENS, past, past, form=form))


def with_arrays(x: Any) -> Any:
    """Attention among arrays that are constants of the graph, and integers raised to a power in a Loop."""
    xp = x.__array_namespace__()
    positions = xp.arange(x.shape[1]) % 5
    heads = xp.reshape(
        x + xp.astype(positions**positions, xp.float32)[:, None] / 256, (x.shape[0], 1, x.shape[1], 16)
    )
    memory = EXTRA[None, None]
    return scaled_dot_product_attention(
        heads, memory, memory, bias=biases.relative(TABLE[:, :1]), sinks=TABLE[0, :1]
    )


BOTH = masks.sliding_window(40, 0) & masks.padding(COUNTS)
MODELS: dict[str, Exported] = {
    "primitive 17, causal": call("primitive", OPEN, opset=17, is_causal=True),
    "primitive 21, padding": call("primitive", OPEN, opset=21, attn_mask=masks.padding(COUNTS)),
    "primitive 24, boolean": call(
        "primitive", OPEN, opset=24, attn_mask=TensorSpec("bool", ("B", 1, "L", "S")), outputs=("output", "lse")
    ),
    "primitive, cache": call("primitive", STEP, **CACHE),
    "tiled 17, plain": call("tiled", OPEN, opset=17),
    "tiled 18, causal": call("tiled", OPEN, opset=18, is_causal=True),
    "tiled 21, padding": call("tiled", OPEN, opset=21, attn_mask=masks.padding(COUNTS)),
    "tiled 24, window and padding": call("tiled", OPEN, opset=24, attn_mask=BOTH),
    "tiled, fixed": call("tiled", (FIXED,) * 3, is_causal=True),
    "tiled, cache": call("tiled", STEP, **CACHE),
    "tiled, padded cache": call("tiled", STEP, **PADDED),
    "tiled, two outputs": call(
        "tiled", OPEN, sinks=TensorSpec("float32", (4,)), outputs=("output", "lse"), softcap=3.0
    ),
    "tiled, bias": call("tiled", OPEN, bias=biases.alibi(4), attn_mask=TensorSpec("float32", ("L", "S"))),
    "attention 23, causal": call("attention", OPEN, opset=23, is_causal=True),
    "attention 24, padding": call("attention", OPEN, opset=24, attn_mask=masks.padding(COUNTS)),
    "attention, cache": call("attention", STEP, **CACHE),
    "grouped_query, fixed": call("grouped_query", (FIXED,) * 3, is_causal=True),
    "multi_head, fixed": call("multi_head", (FIXED,) * 3),
    "layers, primitive": stack("primitive"),
    "layers, tiled": stack("tiled"),
    "layers, attention": stack("attention", opset=23),
    "decoder, tiled": decoder("tiled"),
    "decoder, attention": decoder("attention"),
    "arrays, tiled": Exported("tiled", lambda: to_onnx(with_arrays, TOKENS, form="tiled")),
}
