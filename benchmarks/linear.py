"""python benchmarks/linear.py: linear attention, beside the recurrence and the operator of onnxruntime.

Prints the milliseconds and the megabytes of each rule, (1, 8, L, 64) float32 on NumPy, one thread if
OMP_NUM_THREADS is 1. The megabytes are the most that NumPy holds in a call, its result included.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
from measuring import Spread, interleaved

from sdpa_xp import linear_attention, linear_attention_vjp
from sdpa_xp_export import TensorSpec, to_onnx

RULES = {"linear": (0, 0), "gated, a head": (1, 0), "gated": (64, 0), "delta": (0, 1), "gated_delta": (64, 1)}
LENGTHS = (1024, 4096, 16384)


def recurrence(query: Any, key: Any, value: Any, decay: Any = None, beta: Any = None) -> Any:
    """Return the output of the plain formula."""
    state, outputs = np.zeros((*key.shape[:-2], 64, 64), np.float32), []
    for t in range(query.shape[-2]):
        if decay is not None:
            state = state * np.exp(decay[..., t, :])[..., None]
        update = value[..., t : t + 1, :]
        if beta is not None:
            update = beta[..., t : t + 1, :] * (update - key[..., t : t + 1, :] @ state)
        state = state + key[..., t, :, None] * update
        outputs.append(query[..., t : t + 1, :] * np.float32(0.125) @ state)
    return np.concatenate(outputs, axis=-2)


def gradients(**arrays: Any) -> Any:
    (output, _), pullback = linear_attention_vjp(**arrays)
    return pullback(output)


def megabytes(run: Callable[[], object]) -> float:
    tracemalloc.start()
    run()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


def main() -> None:
    rng = np.random.default_rng(0)
    for rule, (width, has_beta) in RULES.items():
        for length in LENGTHS:
            arrays = {
                name: rng.standard_normal((1, 8, length, 64), np.float32) for name in ("query", "key", "value")
            }
            arrays["key"] /= np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
            if width:
                arrays["decay"] = -rng.random((1, 8, length, width), np.float32)
            if has_beta:
                arrays["beta"] = rng.random((1, 8, length, 1), np.float32)
            model = to_onnx(linear_attention, **{n: TensorSpec("float32", x.shape) for n, x in arrays.items()})
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            session = onnxruntime.InferenceSession(model.SerializeToString(), options)
            runs: dict[str, Callable[[], object]] = {
                "sdpa_xp": partial(linear_attention, **arrays),
                "recurrence": partial(recurrence, **arrays),
                "gradients": partial(gradients, **arrays),
            }
            most = {name: megabytes(run) for name, run in runs.items()}
            runs["onnxruntime"] = partial(session.run, None, arrays)
            for name, times in interleaved(runs, 1.0, least=3).items():
                memory = f"; MB {most[name]:.0f}" if name in most else ""
                print(f"{rule}, L = {length}, {name}: ms {Spread.from_numbers(times, 1e3)}{memory}", flush=True)


if __name__ == "__main__":
    main()
