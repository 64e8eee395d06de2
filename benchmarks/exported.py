"""Exported attention in onnxruntime on the CPU: `auto` beside every other graph of the same call.

One process holds a session of each graph and runs them in turn; a number is the median over the rounds. The
peak memory is measured in a fresh process, above its memory before the first run. Inputs and outputs are
(1, 8, S, 64), float32, heads before lengths, so the times of fused operators include the Transposes they need.
If the query heads share key heads, keys and values are (1, 2, S, 64). A decoding step has one query and a cache
of S tokens. Calls through `jit` are timed beside a session of the same graph, torch SDPA and NumPy, and a
sentence encoder beside the graph that torch exports of it.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import onnx
import onnxruntime
from measuring import interleaved, internals, ratios
from sessions import RUNTIME, session
from tables import table

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, jit
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


JIT_LENGTHS = (8, 1024, 4096)
JIT_CALLS = [(call, length) for length in JIT_LENGTHS for call in ("all pairs", "causal")]
"""The calls through `jit`, with their lengths; the shortest shows what `jit` itself takes."""
ENCODER = "all-MiniLM-L6-v2, 8 texts of 128 tokens"
MOST_OVER_BARE, MOST_MICROSECONDS = 1.05, 40
"""The bars of `jit`: its time over that of the bare session, from S = 1,024 on and for the encoder, and
by how much it is longer for 8 tokens."""


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


def jit_contenders(call: str, length: int) -> dict[str, Callable[[], Any]]:
    """Return a call by `jit`, by a session of the same graph as a user opens it, by torch and by NumPy.

    The last two join long calls alone: threads of a session spin for a while after its turn, and slow others.
    """
    import torch

    is_causal = call == "causal"

    def layer(query: Any, key: Any, value: Any) -> Any:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    arrays = np.random.default_rng(0).standard_normal((3, 1, HEADS, length, WIDTH), np.float32)
    fast = jit(layer, runtime=RUNTIME)
    fast(*arrays)
    bare = onnxruntime.InferenceSession(fast.model.SerializeToString())
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True))
    tensors = [torch.from_numpy(array) for array in arrays]
    theirs = torch.nn.functional.scaled_dot_product_attention
    others: dict[str, Callable[[], Any]] = {
        "torch SDPA": lambda: theirs(*tensors, is_causal=is_causal),
        "sdpa_xp on NumPy": lambda: layer(*arrays),
    }
    return {
        "jit": lambda: fast(*arrays),
        "bare session": lambda: bare.run(None, inputs)[0],
        "jit, tensors": lambda: fast(*tensors),
        **(others if length == JIT_LENGTHS[-1] else {}),
    }


def encoder_contenders(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the encoder of examples/minilm.py by `jit`, and torch's graph of transformers' model."""
    import torch
    from transformers import BertModel

    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import minilm

    ids = np.random.default_rng(0).integers(1000, 20_000, (8, 128))
    mask = np.ones((8, 128), bool)
    fast = jit(minilm.load().tokens, runtime=RUNTIME)
    fast(ids, mask)
    model = BertModel.from_pretrained(minilm.folder(), add_pooling_layer=False).eval()
    path = folder / "encoder.onnx"
    example = torch.from_numpy(ids), torch.ones(8, 128, dtype=torch.int64)
    lengths = {0: torch.export.Dim("B"), 1: torch.export.Dim("L")}
    torch.onnx.export(model, example, path, dynamo=True, dynamic_shapes=(lengths, lengths), verbose=False)
    theirs = onnxruntime.InferenceSession(str(path))
    names = [value.name for value in theirs.get_inputs()]
    inputs = dict(zip(names, (ids, mask.astype(np.int64)), strict=True))
    return {"jit": lambda: fast(ids, mask), "bare session": lambda: theirs.run(None, inputs)[0]}


def measured_jit(folder: Path, text: str, seconds: float) -> list[dict[str, Any]]:
    """Return the times of each call through `jit` whose name contains a text, beside those of the others."""
    cells = []
    named = {f"{call}, S = {length:,}": partial(jit_contenders, call, length) for call, length in JIT_CALLS}
    for name, contenders in (named | {ENCODER: partial(encoder_contenders, folder)}).items():
        if text not in name:
            continue
        runs = contenders()
        expected = np.asarray(runs["bare session"]())
        for run in runs.values():
            np.testing.assert_allclose(np.asarray(run()), expected, rtol=0, atol=2e-5)
        times = interleaved(runs, seconds, calls=100 if name.endswith(" 8") else 1)
        above = statistics.median(a - b for a, b in zip(times["jit"], times["bare session"], strict=True))
        cells.append(
            {
                "call": name,
                "milliseconds": {key: round(statistics.median(t) * 1e3, 4) for key, t in times.items()},
                "over_bare": round(statistics.median(ratios(times["jit"], times["bare session"])), 3),
                "microseconds_above": round(above * 1e6, 1),
            }
        )
        print(cells[-1], flush=True)
    return cells


def jit_page(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of the calls through `jit`, if they were measured."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["milliseconds"]))
    lines = table(
        ["call", *names, "jit over the bare session", "microseconds above it"],
        [
            [
                cell["call"],
                *(
                    f"{cell['milliseconds'][name]:.3g}" if name in cell["milliseconds"] else ""
                    for name in names
                ),
                f"{cell['over_bare']:.2f}",
                f"{cell['microseconds_above']:.0f}",
            ]
            for cell in cells
        ],
    )
    about = (
        "Milliseconds of calls through `jit`, of a session of the same graph with default options, and of\n"
        "other ways to compute the call. The encoder stands beside the graph that torch exports of\n"
        f"transformers' model. The bars: {MOST_OVER_BARE:g} of the bare session from S = 1,024 on, and\n"
        f"{MOST_MICROSECONDS} microseconds above it for 8 tokens."
    )
    return ["## Through jit", "", about, "", *lines, ""] if cells else []


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
    where = f"{facts['cores']} cores of {facts['cpu']} with {facts['instructions']}"
    about = f"{facts['shape']}, {run_by}, {where}, {facts['date']}."
    most = max(cell["graphs"]["auto"]["peak_megabytes"] for cell in cells)
    notes = (
        "Each number is the median of interleaved runs in milliseconds. The number in brackets is the peak of\n"
        "memory in MB above that of the process before. The last column compares auto with the graph of\n"
        "another form, or of torch, that beats it most: the median over the rounds of the ratio of their\n"
        f"times. The bar is {MOST_OVER_BEST:g}. The limit of memory for auto is {MOST_MEGABYTES} MB;\n"
        f'its largest value is {most:.0f} MB. "Open" lengths are known only when the graph runs, so that\n'
        "one graph serves them all."
    )
    head = ["# Exported graphs in onnxruntime", "", about, "", notes, "", *lines, ""]
    return "\n".join([*head, *jit_page(facts.get("jit", []))])


def joined(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with the recorded cells that were not measured again, in the order of CELLS."""
    recorded = json.loads(RESULTS.read_text())
    if other := [name for name in facts.keys() - {"date", "cells", "jit"} if recorded.get(name) != facts[name]]:
        raise SystemExit(f"{RESULTS} was measured with another {', '.join(sorted(other))}: run all of it")
    by_call = {cell["call"]: cell for cell in (*recorded["cells"], *facts["cells"])}
    date = machine.dates(recorded["date"], facts["date"])
    jit_cells = {cell["call"]: cell for cell in (*recorded.get("jit", []), *facts["jit"])}
    facts["jit"] = list(jit_cells.values())
    return facts | {"date": date, "cells": [by_call[str(cell)] for cell in CELLS if str(cell) in by_call]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second a graph; writes nothing")
    help_of_only = "the calls whose names contain this; `jit: TEXT` for calls through jit alone"
    parser.add_argument("--only", default="", metavar="TEXT", help=help_of_only)
    parser.add_argument("--peak-of", nargs=2, metavar=("MODEL", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print_peak(Path(arguments.peak_of[0]), int(arguments.peak_of[1]))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        chosen = [cell for cell in CELLS if arguments.only in str(cell)]
        seconds = 1.0 if arguments.quick else SECONDS
        cells = measured(Path(folder), chosen, seconds)
        jit_cells = measured_jit(Path(folder), arguments.only.removeprefix("jit: "), seconds)
    if not arguments.quick:
        shape = f"(1, {HEADS}, S, {WIDTH}) float32, CPU"
        facts = machine.facts("onnxruntime", "onnx", "torch") | {
            "shape": shape,
            "cells": cells,
            "jit": jit_cells,
        }
        facts = joined(facts) if arguments.only else facts
        RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(facts))


if __name__ == "__main__":
    main()
