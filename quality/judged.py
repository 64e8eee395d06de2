"""`make judged`: what the judge finds of attention functions of the field, in results/judge.json.

Each function is judged in a process of its own: some libraries have been seen to hang beside others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from browsers import DRIVER, PLUGIN, adapter

from benchmarks import machine

CPU = "CPUExecutionProvider"
RESULTS = Path(__file__).parents[1] / "results" / "judge.json"
OURS = "sdpa_xp:scaled_dot_product_attention"
JUDGED: dict[str, tuple[str, str | None]] = {
    "torch SDPA": ("torch.nn.functional:scaled_dot_product_attention", None),
    "torch SDPA, compiled": ("quality.judged:compiled", "torch"),
    "FlexAttention, eager": ("quality.judged:flex_attention", "torch"),
    "jax.nn": ("jax.nn:dot_product_attention", None),
    "keras.ops": ("keras.ops:dot_product_attention", None),
    "MLX": ("mlx.core.fast:scaled_dot_product_attention", None),
    **{
        f"Attention-23 in onnxruntime {release}": ("quality.judged:onnx_attention", None)
        for release in ("1.23.2", "1.28.0", "1.31.1", "1.32.0")
    },
    "MultiHeadAttention in onnxruntime 1.31.1": ("quality.judged:multi_head", None),
    "GroupQueryAttention in onnxruntime 1.31.1": ("quality.judged:grouped_query", None),
    "MultiHeadAttention on WebGPU, in software": ("quality.judged:webgpu_multi_head", None),
    "Attention-23 in ONNX's evaluator": ("quality.judged:evaluated", None),
    "Attention-23 in OpenVINO": ("quality.judged:openvino_attention", None),
    "one_file.py": ("examples.one_file:attention", None),
    **{
        f"sdpa_xp on {name}": (OURS, name)
        for name in ("numpy", "torch", "jax", "mlx", "dask", "array-api-strict")
    },
}
"""By the name that pages show: the function, and its library if that is not its module's."""
FOLDER = Path(sys.prefix) / "onnxruntime"
"""Where `make runtimes` puts each release but the one that is installed."""
PACKAGES = ("sdpa_xp", "numpy", "torch", "jax", "keras", "mlx", "onnx", "onnxruntime", "openvino")


def flex_attention(
    query: Any, key: Any, value: Any, bias: Any = None, scale: Any = None, is_causal: bool = False
) -> Any:
    """FlexAttention of torch, which takes functions where others take arrays."""
    from torch.nn.attention import flex_attention as flex

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias.expand(*query.shape[:-1], key.shape[-2])[b, h, i, j]

    block_mask = None
    if is_causal:
        sizes = None, None, query.shape[-2], key.shape[-2]
        block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, *sizes, device="cpu")
    rules = {"scale": scale, "block_mask": block_mask, "enable_gqa": query.shape[-3] != key.shape[-3]}
    return flex.flex_attention(query, key, value, None if bias is None else score_mod, **rules)


def model_of(
    node: str, arrays: Mapping[str, Any], options: Mapping[str, Any], *, inputs: Sequence[str] = ()
) -> Any:
    """Return a graph of one node, of the shapes of a call; its inputs are the arrays, or in this order."""
    from onnx import helper

    stated = {name: x for name, x in options.items() if x is not None}
    domain = "com.microsoft" if node != "Attention" else ""
    info = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(x).dtype), x.shape)
        for name, x in arrays.items()
    ]
    outputs = ["output", "", ""] if node == "GroupQueryAttention" else ["output"]
    written = helper.make_node(node, [*(inputs or arrays)], outputs, domain=domain, **stated)
    output = helper.make_tensor_value_info("output", info[0].type.tensor_type.elem_type, None)
    opsets = [helper.make_opsetid("", 23)] + [helper.make_opsetid(domain, 1)] * bool(domain)
    graph = helper.make_graph([written], "attention", info, [output])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def in_onnxruntime(model: Any, arrays: Mapping[str, Any], provider: str = CPU) -> Any:
    from internals import engine

    return engine.OnnxruntimeSession(model.SerializeToString(), provider=provider).run(arrays)["output"]


in_webgpu = partial(in_onnxruntime, provider="WebGpuExecutionProvider")
"""Attention has no kernel there, and would run on the CPU."""


def in_evaluator(model: Any, arrays: Mapping[str, Any]) -> Any:
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model).run(None, {**arrays})[0]


def in_openvino(model: Any, arrays: Mapping[str, Any]) -> Any:
    import openvino

    if arrays["query"].dtype.name == "bfloat16":
        raise TypeError("NumPy arrays of bfloat16 come back as float16")
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU", options)([*arrays.values()])[0]


def attention_in(run: Callable[[Any, Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """Return how an engine computes ONNX's operator Attention."""

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Any:
        arrays = {"query": query, "key": key, "value": value}
        if attn_mask is not None:  # ONNX pads a shorter mask, and so does not repeat the one of a column
            shape = *attn_mask.shape[:-2], query.shape[-2], key.shape[-2]
            arrays["attn_mask"] = np.broadcast_to(attn_mask, shape)
        options = {"is_causal": int(is_causal), "scale": scale, "softcap": softcap}
        return run(model_of("Attention", arrays, options), arrays)

    return attention


onnx_attention, evaluated, openvino_attention = map(attention_in, (in_onnxruntime, in_evaluator, in_openvino))


def packed(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """(B, H, L, E) -> (B, L, H * E)."""
    return {name: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) for name, x in tokens.items()}


def grouped_query(
    query: Any, key: Any, value: Any, scale: float | None = None, softcap: float | None = None
) -> Any:
    """GroupQueryAttention of com.microsoft, in onnxruntime: causal, of as many keys as queries."""
    ends, keys = np.full(query.shape[0], key.shape[2] - 1, np.int32), np.asarray(key.shape[2], np.int32)
    arrays = packed({"query": query, "key": key, "value": value}) | {"ends": ends, "keys": keys}
    inputs = ["query", "key", "value", "", "", "ends", "keys"]
    options = {"num_heads": query.shape[1], "kv_num_heads": key.shape[1], "scale": scale, "softcap": softcap}
    output = in_onnxruntime(model_of("GroupQueryAttention", arrays, options, inputs=inputs), arrays)
    return output.reshape(*output.shape[:2], query.shape[1], -1).swapaxes(1, 2)


def compiled(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch SDPA through torch.compile, of the call's own shapes."""
    import torch

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
    function = torch.compile(torch.nn.functional.scaled_dot_product_attention, dynamic=False)
    return function(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def multi_head_in(run: Callable[[Any, Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """Return how an engine computes MultiHeadAttention of com.microsoft."""

    def attention(
        query: Any, key: Any, value: Any, bias: Any = None, is_causal: bool = False, scale: float | None = None
    ) -> Any:
        heads, arrays = query.shape[1], packed({"query": query, "key": key, "value": value})
        inputs = [*arrays] if bias is None else [*arrays, "", "", "bias"]
        arrays |= {} if bias is None else {"bias": bias}
        options = {"num_heads": heads, "scale": scale, "unidirectional": int(is_causal)}
        output = run(model_of("MultiHeadAttention", arrays, options, inputs=inputs), arrays)
        return output.reshape(*output.shape[:2], heads, -1).swapaxes(1, 2)

    return attention


multi_head, webgpu_multi_head = map(multi_head_in, (in_onnxruntime, in_webgpu))


def verdict_of(name: str) -> dict[str, Any]:
    """Return what a page shows of a verdict."""
    import onnxruntime

    from sdpa_xp_export import judge

    function, library = JUDGED[name]
    if "onnxruntime" in name and not name.endswith(f" {onnxruntime.__version__}"):
        raise SystemExit(f"`make judged` installs the release; here is onnxruntime {onnxruntime.__version__}")
    if "WebGPU" in name and not DRIVER.is_file():  # or the CPU would compute the row
        raise SystemExit("`make judged` needs Debian's chromium, whose SwiftShader computes WebGPU")
    verdict = judge(function, library=library)
    profile = {answer.question: answer.answer for answer in verdict.profile}
    faults = [
        {"case": x.case, "dtype": x.dtype, "rules": x.rules, "what": x.what, "smallest": x.smallest}
        for x in verdict.faults
    ]
    reasons = sorted({entry.reason for entry in verdict.not_judged})
    counts = {"judged": verdict.judged, "not judged": len(verdict.not_judged)}
    return {
        "function": function,
        "library": verdict.library,
        **counts,
        "profile": profile,
        "faults": faults,
    } | {"reasons": reasons}


def main(names: list[str]) -> int:
    """Judge all, or those that are named, and write the file; with `--one`, print one verdict."""
    if names[:1] == ["--one"]:
        print(json.dumps(verdict_of(names[1])))
        return 0
    kept = json.loads(RESULTS.read_text("utf-8"))["verdicts"] if RESULTS.exists() and names else {}
    for name in names or JUDGED:
        command = [sys.executable, "-m", "quality.judged", "--one", name]
        release = FOLDER / name.rpartition(" ")[2]  # which `verdict_of` checks
        folders = [str(folder) for folder in (release, PLUGIN) if folder.is_dir()]
        environment = (
            os.environ
            | adapter()
            | {"KERAS_BACKEND": "numpy", "PYTHONPATH": os.pathsep.join(["tests", *folders])}
        )
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            print(f"{name}: {run.stderr[-500:]}")
            return 1
        kept[name] = json.loads(run.stdout.splitlines()[-1])
        print(name, len(kept[name]["faults"]), "faults", flush=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in JUDGED if name in kept)
    head = json.dumps(machine.facts(*PACKAGES))
    RESULTS.write_text(f'{head[:-1]}, "verdicts": {{\n{lines}}}}}\n', "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
