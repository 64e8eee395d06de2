"""The releases of onnxruntime: where each is installed, and running graphs in one, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import onnx
from internals import version

from quality.runtime.arrays import load, save
from quality.runtime.jobs import Outputs

INSTALLED = version()
NEWEST = "1.32.0"
RELEASES = ("1.23.2", "1.24.4", "1.26.0", "1.28.0", INSTALLED, NEWEST)
REDUCED = ("1.23.2", "1.28.0", INSTALLED)
FOLDER = Path(sys.prefix) / "onnxruntime"
"""Where `make runtimes` puts each release but the one that is installed."""

ROOT = Path(__file__).parents[2]
SECONDS = 300  # a graph that takes so long hangs

Name = TypeVar("Name")
Graph = tuple[onnx.ModelProto, Sequence[Outputs]]
"""A model, and the inputs of each run."""


def path_of(release: str) -> Path | None:
    """What goes to the front of the path of a process so that it finds `release`; None if it does anyway."""
    if release == INSTALLED:
        return None
    if not (FOLDER / release / "onnxruntime").is_dir():
        raise FileNotFoundError(
            f"onnxruntime {release} is not in {FOLDER / release}: `make runtimes` puts it there, or "
            f"pip install --no-deps --target {FOLDER / release} onnxruntime=={release}"
        )
    return FOLDER / release


def run_graphs(release: str, graphs: Mapping[Name, Graph], folder: Path) -> dict[Name, list[Outputs] | str]:
    """The outputs of each run of each graph in `release`, or why there are none.

    A graph that ends the process is told from the others, which then run in another process.
    """
    names = {f"{number:04d}": name for number, name in enumerate(graphs)}
    for job, name in names.items():
        model, feeds = graphs[name]
        (folder / job).mkdir()
        onnx.save(model, folder / job / "model.onnx")
        for number, arrays in enumerate(feeds):
            save(folder / job / f"feeds-{number:02d}", arrays)
    left = list(names)
    while left:
        ended = _child(release, folder, left)
        if ended is None:
            break
        job, why = ended
        (folder / job / "error").write_text(why)
        left = left[left.index(job) + 1 :]
    return {name: _outcome(folder / job, len(graphs[name][1])) for job, name in names.items()}


def _outcome(job: Path, runs: int) -> list[Outputs] | str:
    if (job / "error").exists():
        return (job / "error").read_text()
    return [load(job / f"outputs-{number:02d}") for number in range(runs)]


def _ended(process: subprocess.Popen[bytes], log: Path) -> int | None:
    """The exit status of a process; None if it was stopped, since it began no job for so long."""
    written = -1
    while True:
        try:
            return process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            if log.stat().st_size == written:
                process.kill()
                return None
            written = log.stat().st_size


def _child(release: str, folder: Path, jobs: Sequence[str]) -> tuple[str, str] | None:
    """Run the jobs; None if the process came to the end of them, else which one ended it, and how."""
    paths = [path_of(release), ROOT, ROOT / "tests", os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    with (folder / "log").open("w") as log, (folder / "errors").open("w") as errors:
        command = [sys.executable, "-m", "quality.runtime.child", str(folder), *jobs]
        with subprocess.Popen(command, env=environment, stdout=log, stderr=errors) as process:
            code = _ended(process, folder / "log")
    words = (folder / "log").read_text().split()
    if words[:1] != [release] or (code and len(words) == 1):
        raise RuntimeError(f"onnxruntime {release} did not start:\n{(folder / 'errors').read_text()}")
    if code == 0:
        return None
    if code is None:
        return words[-1], f"the process hung for {SECONDS} s"
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return words[-1], f"the process died: {how}"
