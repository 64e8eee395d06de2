"""Facts about the machine, and a process that ignores the shell's thread settings."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SETTINGS = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "SDPA_XP_NUM_THREADS")
"""Variables of the shell that would change the numbers."""


def without_settings() -> None:
    """Restart this command without the settings: a BLAS reads them once, while NumPy is imported."""
    if any(name in os.environ for name in SETTINGS):
        environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def facts(*packages: str) -> dict[str, Any]:
    """Day, machine and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "instructions": instructions(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


KINDS = ("unknown", "AVX2", "AVX-512", "AMX")
"""The instructions that decide how fast a BLAS can be on x86-64, the newest last."""
FLAGS = {"AMX": "amx_tile", "AVX-512": "avx512f", "AVX2": "avx2"}


def instructions() -> str:
    """Return the newest of KINDS that the processor has."""
    flags = {flag for line in _cpuinfo() if line.startswith("flags") for flag in line.split()}
    return next((kind for kind, flag in FLAGS.items() if flag in flags), KINDS[0])


def dates(recorded: str, new: str) -> str:
    """Return the days of results that were measured in parts."""
    return " and ".join(sorted({*recorded.split(" and "), new}))


def gpu() -> str:
    """Return name, memory and driver of the GPUs, or an empty string if there is none that answers."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def thread_pools() -> list[dict[str, Any]]:
    """The BLAS and OpenMP libraries of this process, the package that brought each, and its kernels."""
    import threadpoolctl

    return [
        {
            "package": _package(pool["filepath"]),
            "library": pool["internal_api"],
            "version": pool["version"],
            "kernels": pool.get("architecture"),
            "threads": pool["num_threads"],
        }
        for pool in threadpoolctl.threadpool_info()
    ]


def numpy_kernels() -> str:
    """Return which BLAS NumPy has, and which kernels the BLAS chose for this processor."""
    pools = [pool for pool in thread_pools() if pool["package"].startswith("numpy")]
    return ", ".join("{library} {version} {kernels}, {threads} threads".format(**pool) for pool in pools)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _package(file: str) -> str:
    """Return the folder of site-packages that contains a library: `numpy.libs`, `torch`."""
    return file.rpartition("site-packages/")[2].split("/")[0]


def _cpu() -> str:
    models = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
