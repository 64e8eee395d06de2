"""What the run on a GPU needs: which packages are here, in which versions, and which libraries find a GPU."""

from __future__ import annotations

import importlib.util
import re
import time
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from itertools import chain
from pathlib import Path

from quality.gpu.child import ROOT, Child

QUESTIONS = {
    "torch": "import torch; print('' if torch.cuda.is_available() else 'finds no GPU')",
    "cupy": "import cupy; print('' if cupy.is_available() else 'finds no GPU')",
    "onnxruntime": "from internals import providers;"
    "is_there = 'CUDAExecutionProvider' in providers();"
    "print('' if is_there else 'starts no CUDA provider, which onnxruntime-gpu has')",
}
"""Library -> what prints why it has no GPU, or an empty line."""


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # from a finder that refuses it
        return False


def described(module: str) -> str:
    """Return the distributions of a module, with their versions and newer ones that pyproject.toml asks for.

    An older one is no reason to skip a step: what ran is a fact about that version.
    """
    if not is_installed(module):
        return "not installed"
    texts = []
    for name in sorted({*_distributions().get(module, [])}):
        lowest = _lowest().get(_canonical(name), "")
        is_older = _numbers(version(name)) < _numbers(lowest)
        texts.append(f"{name} {version(name)}" + (f" (pyproject.toml asks for {lowest})" if is_older else ""))
    return ", ".join(texts) or "installed, of an unknown version"


def without_device(libraries: Collection[str], folder: Path, seconds: float) -> dict[str, str]:
    """Ask the libraries for a GPU, all at a time; return why some have none, by library."""
    end = time.monotonic() + seconds
    reasons = {name: f"{name} is not installed" for name in libraries if not is_installed(name)}
    children = {
        name: Child(["-c", QUESTIONS[name]], folder / f"device of {name}")
        for name in libraries
        if name not in reasons
    }
    try:
        for name, child in children.items():
            code = child.code(end - time.monotonic())
            out, err = child.printed()
            if code is None:  # a driver may hang
                reasons[name] = f"{name} did not find a GPU in {seconds:.0f} s"
            elif code:
                reasons[name] = f"{name} fails: {(err.strip().splitlines() or [f'exit code {code}'])[-1]}"
            elif answer := out.strip():
                reasons[name] = f"{name} {answer}"
    finally:
        for child in children.values():
            child.end()
    return reasons


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def _lowest() -> dict[str, str]:
    """Return the lowest version that pyproject.toml asks for, by distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = chain(project["dependencies"], *project["optional-dependencies"].values())
    matches = (re.match(r"([\w.-]+)(?:\[.*?\])?>=([\d.]+)", text) for text in texts)
    return {_canonical(match[1]): match[2] for match in matches if match}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(release: str) -> list[int]:
    """Return the numbers of a version before its suffix: [2, 11, 0] of 2.11.0+cu130."""
    return [int(number) for number in re.findall(r"\d+", release.partition("+")[0])]
