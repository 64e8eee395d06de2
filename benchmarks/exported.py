"""Exported attention in onnxruntime on the CPU: `auto` beside every other graph of the same call.

One process holds a session of each graph and runs them in turn; a number is the median over the rounds. The
peak memory is measured in a fresh process, above its memory before the first run. Inputs and outputs are
(1, 8, S, 64), float32, heads before lengths, so the times of fused operators include the Transposes they need.
If the query heads share key heads, keys and values are (1, 2, S, 64). A decoding step has one query and a cache
of S tokens.

`python benchmarks/exported.py [--quick] [--only TEXT]` writes exported.json and exported.md into results/. With
`--only`, it measures the calls whose names contain TEXT, and keeps the others if the machine and the versions
are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import onnx
from measuring import interleaved, internals, ratios
from sessions import RUNTIME, session
from tables import table

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export.forms.choice import FORMS

HEADS, KEY_HEADS, WIDTH = 8, 2, 64
TORCH_OPSETS = (18, 23)
GROUPED = "causal, 2 key heads"
STEP = "a step with a cache"
CALLS: dict[str, dict[str, Any]] = {
    "all pairs": {},
    "causal": {"is_causal": True},
    "window of 256": {"attn_mask": masks.sliding_window(255, 0)},
    "padding": {"attn_mask": masks.padding(TensorSpec("int64", (1,)))},
    GROUPED: {"is_causal": True},
    STEP: {"is_causal": True},
}
ALIKE = ("all pairs", "causal", "window of 256", "padding")
"""Calls whose query, key and value have one shape."""
RESULTS = Path(__file__).parents[1] / "results" / "exported.json"
SECONDS = 2.0
"""Per graph and cell."""
MOST_OVER_BEST, MOST_MEGABYTES = 1.05, 64
"""The bars of `auto`: its time as a multiple of the time of the best graph, and its memory."""


class Cell(NamedTuple):
    """A call of one length, which is fixed or open in the graph."""

    call: str
    length: int
    is_open: bool = False

    def __str__(self) -> str:
        return f"{self.call}, S = {self.length:,}{', open' if self.is_open else ''}"


CELLS = (
    *(Cell(call, length) for length in (128, 512, 2048, 4096) for call in ("all pairs", "causal")),
    *(Cell(call, 4096) for call in ("window of 256", "padding")),
    *(Cell(call, length, is_open=True) for length in (512, 4096) for call in ALIKE),
    Cell(GROUPED, 4096),
    *(Cell(call, 4096, is_open=True) for call in (GROUPED, STEP)),
)


def graphs(cell: Cell, folder: Path) -> Iterator[tuple[str, Path]]:
    """Write each graph of the call to a file; yield its name and its path."""
    arrays = specs(cell)
    for form in ("auto", *FORMS):
        try:
            model = export_attention(**arrays, **CALLS[cell.call], form=form, runtime=RUNTIME)
        except ValueError:  # the form does not have this call
            continue
        path = folder / f"{form}-{cell}.onnx"
        onnx.save(model, path)
        yield form, path
    if cell.call in ("all pairs", "causal") and not cell.is_open:
        for opset in TORCH_OPSETS:
            yield f"torch, opset {opset}", _torch_graph(cell.length, cell.call == "causal", opset, folder)


def specs(cell: Cell) -> dict[str, TensorSpec]:
    """Return what the graph of a call takes: a step has one new token, and a past of S tokens."""
    length = "S" if cell.is_open else cell.length
    new = 1 if cell.call == STEP else length
    query = TensorSpec("float32", (1, HEADS, new, WIDTH))
    key = TensorSpec("float32", (1, KEY_HEADS, new, WIDTH)) if cell.call == GROUPED else query
    past = TensorSpec("float32", (1, HEADS, length, WIDTH))
    cache = {"past_key": past, "past_value": past} if cell.call == STEP else {}
    return {"query": query, "key": key, "value": key} | cache


def _torch_graph(length: int, causal: bool, opset: int, folder: Path) -> Path:
    import torch

    class Module(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    path = folder / f"torch{opset}-{length}-{causal}.onnx"
    example = tuple(torch.zeros(1, HEADS, length, WIDTH) for _ in range(3))
    torch.onnx.export(Module(), example, path, dynamo=True, opset_version=opset, verbose=False)
    return path


def feeds(loaded: Any, length: int) -> dict[str, Any]:
    """Return random inputs of a session. Open lengths are `length`; the last tenth of the keys is padding."""
    rng = np.random.default_rng(0)
    return {
        graph_input.name: np.asarray([length * 9 // 10])
        if graph_input.type == "tensor(int64)"
        else rng.standard_normal(
            [length if isinstance(size, str) else size for size in graph_input.shape], np.float32
        )
        for graph_input in loaded.get_inputs()
    }


def timed(paths: dict[str, Path], length: int, seconds: float) -> dict[str, list[float]]:
    """Return seconds of each run of each graph, in interleaved rounds, and check that all results agree."""
    sessions = {name: session(path) for name, path in paths.items()}
    inputs = {name: feeds(loaded, length) for name, loaded in sessions.items()}
    outputs = {name: s.run(None, inputs[name])[0] for name, s in sessions.items()}
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["primitive"], rtol=0, atol=5e-6, err_msg=name)
    return interleaved({name: partial(s.run, None, inputs[name]) for name, s in sessions.items()}, seconds)


def worst(runs: dict[str, list[float]], form: str) -> float:
    """Return the time of `auto`, which has `form`, over that of the fastest other graph: a median of rounds."""
    others = (times for name, times in runs.items() if name not in ("auto", form))
    return max(statistics.median(ratios(runs["auto"], times)) for times in others)


def peak_of(path: Path, length: int) -> int:
    """Return the peak memory above the memory before the first run, in bytes, of a separate process."""
    command = [sys.executable, __file__, "--peak-of", str(path), str(length)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(process.stdout)


def print_peak(path: Path, length: int) -> None:
    loaded = session(path)
    inputs = feeds(loaded, length)
    _, peak = internals.peak_above(lambda: loaded.run(None, inputs))
    print(peak)


def form_of(path: Path) -> str:
    return internals.metadata_of(onnx.load(path))["sdpa_xp.form"]


def measured(folder: Path, chosen: Sequence[Cell], seconds: float) -> list[dict[str, Any]]:
    cells = []
    for cell in chosen:
        paths = dict(graphs(cell, folder))
        runs = timed(paths, cell.length, seconds)
        rows = {
            name: {
                "milliseconds": round(statistics.median(times) * 1e3, 3),
                "quartiles": [round(quartile * 1e3, 3) for quartile in statistics.quantiles(times, n=4)[::2]],
                "runs": len(times),
                "peak_megabytes": round(peak_of(paths[name], cell.length) / 1e6, 1),
            }
            for name, times in runs.items()
        }
        form = form_of(paths["auto"])
        facts = {"call": str(cell), "auto": form, "graphs": rows}
        cells.append(facts | {"auto_over_best": round(worst(runs, form), 3)})
        print(row_of(cells[-1]), flush=True)
    return cells


def row_of(cell: dict[str, Any]) -> str:
    """Return the cell as a line: milliseconds (megabytes) of each graph."""
    rows = cell["graphs"].items()
    graph_entries = ", ".join(
        f"{name} {row['milliseconds']} ({row['peak_megabytes']:.0f})" for name, row in rows
    )
    return f"{cell['call']}: auto is {cell['auto']}, {cell['auto_over_best']} of the best: {graph_entries}"


def page(facts: dict[str, Any]) -> str:
    """Return the results as a page: milliseconds (megabytes of peak memory) of each graph in each cell."""
    cells = facts["cells"]
    names = list(dict.fromkeys(name for cell in cells for name in cell["graphs"]))

    def entry(cell: dict[str, Any], name: str) -> str:
        row = cell["graphs"].get(name)
        return "" if row is None else f"{row['milliseconds']:.3g} ({row['peak_megabytes']:.0f})"

    def bar(cell: dict[str, Any]) -> str:
        is_met = cell["auto_over_best"] <= MOST_OVER_BEST
        return f"{cell['auto_over_best']:.2f}" + ("" if is_met else " **no**")

    lines = table(
        ["call", *names, "auto is", "auto over the best"],
        [[cell["call"], *(entry(cell, name) for name in names), cell["auto"], bar(cell)] for cell in cells],
    )
    run_by = f"onnxruntime {facts['onnxruntime']}, torch {facts['torch']}"
    about = f"{facts['shape']}, {run_by}, {facts['cores']} cores of {facts['cpu']}, {facts['date']}."
    most = max(cell["graphs"]["auto"]["peak_megabytes"] for cell in cells)
    notes = (
        "Each number is the median of interleaved runs in milliseconds. The number in brackets is the peak of\n"
        "memory in MB above that of the process before. The last column compares auto with the graph of\n"
        "another form, or of torch, that beats it most: the median over the rounds of the ratio of their\n"
        f"times. The bar is {MOST_OVER_BEST:g}. The limit of memory for auto is {MOST_MEGABYTES} MB;\n"
        f'its largest value is {most:.0f} MB. "Open" lengths are known only when the graph runs, so that\n'
        "one graph serves them all."
    )
    return "\n".join(["# Exported graphs in onnxruntime", "", about, "", notes, "", *lines, ""])


def joined(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with the recorded cells that were not measured again, in the order of CELLS."""
    recorded = json.loads(RESULTS.read_text())
    if other := [name for name in facts.keys() - {"date", "cells"} if recorded.get(name) != facts[name]]:
        raise SystemExit(f"{RESULTS} was measured with another {', '.join(sorted(other))}: run all of it")
    by_call = {cell["call"]: cell for cell in (*recorded["cells"], *facts["cells"])}
    date = machine.dates(recorded["date"], facts["date"])
    return facts | {"date": date, "cells": [by_call[str(cell)] for cell in CELLS if str(cell) in by_call]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second a graph; writes nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="the calls whose names contain this")
    parser.add_argument("--peak-of", nargs=2, metavar=("MODEL", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print_peak(Path(arguments.peak_of[0]), int(arguments.peak_of[1]))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        chosen = [cell for cell in CELLS if arguments.only in str(cell)]
        cells = measured(Path(folder), chosen, 1.0 if arguments.quick else SECONDS)
    if not arguments.quick:
        shape = f"(1, {HEADS}, S, {WIDTH}) float32, CPU"
        facts = machine.facts("onnxruntime", "onnx", "torch") | {"shape": shape, "cells": cells}
        facts = joined(facts) if arguments.only else facts
        RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(facts))


if __name__ == "__main__":
    main()
