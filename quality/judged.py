"""`make judged`: what the judge finds of attention functions of the field, in results/judge.json.

Each function is judged in a process of its own: some libraries have been seen to hang beside others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULTS = Path(__file__).parents[1] / "results" / "judge.json"
OURS = "sdpa_xp:scaled_dot_product_attention"
JUDGED: dict[str, tuple[str, str | None]] = {
    "torch SDPA": ("torch.nn.functional:scaled_dot_product_attention", None),
    "FlexAttention, eager": ("quality.judged:flex_attention", "torch"),
    "jax.nn": ("jax.nn:dot_product_attention", None),
    "keras.ops": ("keras.ops:dot_product_attention", None),
    "MLX": ("mlx.core.fast:scaled_dot_product_attention", None),
    "onnxruntime, Attention-23": ("quality.judged:onnx_attention", None),
    "one_file.py": ("examples.one_file:attention", None),
    **{
        f"sdpa_xp on {name}": (OURS, name)
        for name in ("numpy", "torch", "jax", "mlx", "dask", "array-api-strict")
    },
}
"""By the name that pages show: the function, and its library if that is not its module's."""
PACKAGES = ("sdpa_xp", "numpy", "torch", "jax", "keras", "mlx", "onnxruntime")


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


def onnx_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Any:
    """ONNX's operator Attention, of the call's own shapes, in onnxruntime."""
    import numpy as np
    import onnxruntime
    from onnx import helper

    arrays = {"query": query, "key": key, "value": value} | (
        {} if attn_mask is None else {"attn_mask": attn_mask}
    )
    info = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(x).dtype), x.shape)
        for name, x in arrays.items()
    ]
    rules = {name: x for name, x in {"scale": scale, "softcap": softcap}.items() if x is not None}
    node = helper.make_node("Attention", [*arrays], ["output"], is_causal=int(is_causal), **rules)
    output = helper.make_tensor_value_info("output", info[0].type.tensor_type.elem_type, None)
    graph = helper.make_graph([node], "attention", info, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {name: np.ascontiguousarray(x) for name, x in arrays.items()})[0]


def verdict_of(name: str) -> dict[str, Any]:
    """Return what a page shows of a verdict."""
    from sdpa_xp_export import judge

    function, library = JUDGED[name]
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
        environment = os.environ | {"KERAS_BACKEND": "numpy"}
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
