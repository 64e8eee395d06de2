"""Exported attention in onnxruntime on the CPU: what `auto` takes, beside every other graph of the same call.

One process holds a session of each graph and runs them in turn; a number is the median over the rounds. The
peak of memory is that of a fresh process, above what it held before the first run. Inputs and outputs are
(1, 8, S, 64), float32, heads before lengths, so the fused operators pay for the Transposes that they need.

`python benchmarks/exported.py [--quick]` writes exported.json and exported.md into results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
import onnx
from measuring import interleaved, ratios
from sessions import RUNTIME, session
from tables import table

from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export._runtime.memory import peak_above

HEADS, WIDTH = 8, 64
LENGTHS = (128, 512, 2048, 4096)
FORMS = ("auto", "primitive", "tiled", "attention", "multi_head", "grouped_query")
TORCH_OPSETS = (18, 23)
RESULTS = Path(__file__).parents[1] / "results" / "exported.json"
SECONDS = 2.0
"""Per graph and cell."""


def graphs(length: int, causal: bool, folder: Path) -> Iterator[tuple[str, Path]]:
    """Each graph of the call, by who wrote it, as a file."""
    qkv = TensorSpec("float32", (1, HEADS, length, WIDTH))
    for form in FORMS:
        if form == "grouped_query" and not causal:
            continue
        model = export_attention(qkv, qkv, qkv, is_causal=causal, form=form, runtime=RUNTIME)
        path = folder / f"{form}-{length}-{causal}.onnx"
        onnx.save(model, path)
        yield form, path
    for opset in TORCH_OPSETS:
        yield f"torch, opset {opset}", _torch_graph(length, causal, opset, folder)


def _torch_graph(length: int, causal: bool, opset: int, folder: Path) -> Path:
    import torch

    class Module(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    path = folder / f"torch{opset}-{length}-{causal}.onnx"
    example = tuple(torch.zeros(1, HEADS, length, WIDTH) for _ in range(3))
    torch.onnx.export(Module(), example, path, dynamo=True, opset_version=opset, verbose=False)
    return path


def feeds(names: list[str], length: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((1, HEADS, length, WIDTH)).astype(np.float32) for name in names}


def timed(paths: dict[str, Path], length: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each run of each graph, in interleaved rounds; all give the same numbers."""
    sessions = {name: session(path) for name, path in paths.items()}
    given = {name: feeds([each.name for each in s.get_inputs()], length) for name, s in sessions.items()}
    outputs = {name: s.run(None, given[name])[0] for name, s in sessions.items()}
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["primitive"], rtol=0, atol=5e-6, err_msg=name)
    return interleaved({name: partial(s.run, None, given[name]) for name, s in sessions.items()}, seconds)


def worst(runs: dict[str, list[float]]) -> float:
    """The time of `auto` over that of the graph beside which it does worst, by the median of the rounds."""
    return max(statistics.median(ratios(runs["auto"], times)) for name, times in runs.items() if name != "auto")


def peak_of(path: Path, length: int) -> int:
    """Bytes above those before the first run, in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", str(path), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def print_peak(path: Path, length: int) -> None:
    loaded = session(path)
    given = feeds([each.name for each in loaded.get_inputs()], length)
    _, peak = peak_above(lambda: loaded.run(None, given))
    print(peak)


def form_of(path: Path) -> str:
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    return metadata["sdpa_xp.form"]


def measured(folder: Path, seconds: float) -> list[dict[str, Any]]:
    cells = []
    for length in LENGTHS:
        for causal in (False, True):
            paths = dict(graphs(length, causal, folder))
            runs = timed(paths, length, seconds)
            rows = {
                name: {
                    "milliseconds": round(statistics.median(times) * 1e3, 3),
                    "quartiles": [round(each * 1e3, 3) for each in statistics.quantiles(times, n=4)[::2]],
                    "runs": len(times),
                    "peak_megabytes": round(peak_of(paths[name], length) / 1e6, 1),
                }
                for name, times in runs.items()
            }
            cell = {"S": length, "causal": causal, "auto": form_of(paths["auto"]), "graphs": rows}
            cells.append(cell | {"auto_over_best": round(worst(runs), 3)})
            print(row_of(cells[-1]), flush=True)
    return cells


def row_of(cell: dict[str, Any]) -> str:
    """The cell as a line: milliseconds (megabytes) of each graph."""
    rows = cell["graphs"].items()
    shown = ", ".join(f"{name} {row['milliseconds']} ({row['peak_megabytes']:.0f})" for name, row in rows)
    kind = "causal" if cell["causal"] else "all pairs"
    return f"S={cell['S']} {kind}: auto is {cell['auto']}, {cell['auto_over_best']} of the best: {shown}"


def page(facts: dict[str, Any]) -> str:
    """The results as a page: milliseconds (megabytes of peak memory) of each graph in each cell."""
    cells = facts["cells"]
    columns = [f"S = {cell['S']}{', causal' if cell['causal'] else ''}" for cell in cells]
    names = list(dict.fromkeys(name for cell in cells for name in cell["graphs"]))

    def entry(cell: dict[str, Any], name: str) -> str:
        row = cell["graphs"].get(name)
        return "" if row is None else f"{row['milliseconds']:.3g} ({row['peak_megabytes']:.0f})"

    lines = table(
        ["graph", *columns],
        [
            *([name, *(entry(cell, name) for cell in cells)] for name in names),
            ["*auto is*", *(cell["auto"] for cell in cells)],
            ["*auto over the best*", *(f"{cell['auto_over_best']:.2f}" for cell in cells)],
        ],
    )
    run_by = f"onnxruntime {facts['onnxruntime']}, torch {facts['torch']}"
    about = f"{facts['call']}, {run_by}, {facts['cores']} cores of {facts['cpu']}, {facts['date']}."
    notes = (
        "Each number is the median of interleaved runs in milliseconds. The number in brackets is the peak of\n"
        "memory in MB above that of the process before. The last line compares auto with the graph that beats\n"
        "it most: the median over the rounds of the ratio of their times."
    )
    return "\n".join(["# Exported graphs in onnxruntime", "", about, "", notes, "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second a graph; writes nothing")
    parser.add_argument("--peak-of", nargs=2, metavar=("MODEL", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print_peak(Path(arguments.peak_of[0]), int(arguments.peak_of[1]))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cells = measured(Path(folder), 1.0 if arguments.quick else SECONDS)
    if not arguments.quick:
        call = f"(1, {HEADS}, S, {WIDTH}) float32, CPU"
        facts = machine.facts("onnxruntime", "onnx", "torch") | {"call": call, "cells": cells}
        RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(facts))


if __name__ == "__main__":
    main()
