"""`python -m standins.cuda.placement PACKAGES...`: where onnxruntime-gpu places graphs for CUDA, without a GPU.

PACKAGES are folders, named for the onnxruntime-gpu that is installed there. For each, build.py builds
CUDA libraries whose kernels do nothing, and opened.py opens every graph of tests/feature_calls.py and of
calls.py there, and runs it at two lengths. Placement, kernels, reads and memory go to
results/cuda_placement.json; no number is tested. A graph that breaks a rule fails the run.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from feature_calls import DTYPES, features
from internals import ExportCall, FormChoice, Runtime, metadata_of
from standins.cuda.build import build
from standins.cuda.calls import calls

from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

TESTS = Path(__file__).parents[2]
RESULTS = TESTS.parent / "results" / "cuda_placement.json"
RUNTIME = "onnxruntime>=1.31;cuda"
BATCHES = {"A": 1, "B": 1}
SHORT, LONG = (256, 1024), (2048, 4096)
"""The lengths that are names in two runs: for the reads in steps of a loop, and for the memory of `auto`."""
GROWTH = 2.3
"""What is linear in the lengths doubles at most, but for what an arena rounds."""
INTEGERS = ("int64", "int32", "bool")


class Graph(NamedTuple):
    """A graph that was written for a call."""

    name: str
    call: ExportCall
    form: FormChoice
    """The form that was asked for, perhaps "auto"."""
    written: str
    """The form that it is in."""
    model: onnx.ModelProto


def graphs(dtypes: Sequence[str] = DTYPES, forms: Sequence[FormChoice] = ("auto", *FORMS)) -> Iterator[Graph]:
    """Export every call in every form that takes it."""
    target = Runtime.parse("placement", RUNTIME)
    for form in forms:
        for dtype in dtypes:
            for name, call in (features(dtype) | calls(dtype)).items():
                if form == "auto" or unsupported_reason(form, call, target) is None:
                    model = export_call(call, form=form, runtime=RUNTIME)
                    yield Graph(name, call, form, metadata_of(model)["sdpa_xp.form"], model)


def meant_for(release: str, models: Sequence[Graph]) -> list[Graph]:
    """Return the graphs that are also written for a release; they are the same there, or refused."""
    target = Runtime.parse("placement", f"onnxruntime>={release};cuda")
    return [
        graph
        for graph in models
        if graph.form == "auto" or unsupported_reason(graph.form, graph.call, target) is None
    ]


def groups(models: Sequence[Graph]) -> dict[str, list[Graph]]:
    """Return graphs by the form that was asked for, and dtype."""
    groups: dict[str, list[Graph]] = {}
    for graph in models:
        groups.setdefault(f"{graph.form}, {graph.call.query.dtype}", []).append(graph)
    return groups


def digest(models: Sequence[Graph]) -> str:
    """Return what stays the same while the nodes of the graphs and what they read do; numbers may change."""
    text = "\n".join(line for graph in models for line in (graph.name, *_structure(graph.model.graph)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _structure(graph: onnx.GraphProto) -> Iterator[str]:
    for value in (*graph.input, *graph.output):
        yield f"{value.name} {value.type.tensor_type.elem_type}"
    for constant in graph.initializer:
        yield f"{constant.name} {constant.data_type} {list(constant.dims)}"
    for node in graph.node:
        yield f"{node.domain} {node.op_type} {list(node.input)} {list(node.output)}"
        for attribute in node.attribute:
            yield from _structure(attribute.g)


def broken_rules(graph: Graph, line: Mapping[str, Any]) -> Iterator[str]:
    """Say which rules the placement of a graph breaks."""
    if "error" in line:
        yield line["error"]
        return
    for op, place, dtype, axes in line["host"]:
        if dtype not in INTEGERS or axes > 1:
            where = " in a loop" if place == "loop" else ""
            yield f"{op} of {dtype} with {axes} long axes is on the host{where}"
    if count := line["copies"].get("loop"):
        yield f"{count} copies between host and device in a loop"
    if not line["runs"] or any("error" in run for run in line["runs"]):
        return
    short, long = line["runs"]
    if long["reads"] > short["reads"]:
        yield f"the host reads the device {short['reads']} times, and {long['reads']} times at more steps"
    returns_pairs = {"weights", "scores"} & {*graph.call.outputs}
    if graph.form == "auto" and not returns_pairs and growth(line["runs"]) > GROWTH:
        kernels = ", ".join(long["kernels"])
        yield f"memory grows {growth(line['runs']):.1f} times if lengths double ({kernels})"


def growth(runs: Sequence[Mapping[str, int]]) -> float:
    """Return by which factor memory grows that is not an input, if the lengths double."""
    short, long = (max(1, run["bytes"] - run["inputs"]) for run in runs)
    return long / short


def placed(packages: Path, models: Sequence[Graph]) -> list[dict[str, Any]]:
    """Open and run the graphs in the onnxruntime-gpu of a folder."""
    build(packages)
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[bytes, tuple[str, list[dict[str, int]], bool]] = {}
        keys = []
        for graph in models:  # the graphs of `auto` come first
            bare = onnx.ModelProto()
            bare.CopyFrom(graph.model)
            del bare.metadata_props[:]
            keys.append(bare.SerializeToString(deterministic=True))
            if keys[-1] not in jobs:
                file = Path(folder, f"{len(jobs):04d}.onnx")
                file.write_bytes(keys[-1])
                has_steps = any(node.op_type == "Loop" for node in graph.model.graph.node)
                lengths = LONG if graph.form == "auto" else SHORT if has_steps else ()
                runs = [dict.fromkeys(graph.call.symbols, length) | BATCHES for length in lengths]
                jobs[keys[-1]] = str(file), runs, graph.form == "auto"
        lines: list[dict[str, Any]] = []
        while len(lines) < len(jobs):
            lines += _opened(packages, Path(folder), [*jobs.values()][len(lines) :])
        by_model = dict(zip(jobs, lines, strict=True))
        return [by_model[key] for key in keys]


def _opened(packages: Path, folder: Path, jobs: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what the jobs gave, up to the one that ended the process if one did."""
    index, results, log = (folder / name for name in ("index.json", "lines", "log"))
    index.write_text(json.dumps(jobs))
    results.write_text("")
    log.write_text("")
    path = os.pathsep.join([str(packages), str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    libraries = {"LD_LIBRARY_PATH": str(packages / "cuda"), "PYTHONPATH": path, "CUDA_STANDIN_LOG": str(log)}
    command = [sys.executable, "-m", "standins.cuda.opened", str(index), str(results)]
    ended = subprocess.run(command, env=os.environ | libraries, capture_output=True, text=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    if len(lines) < len(jobs):
        last = ended.stderr.strip().splitlines()[-1:]
        lines.append({"error": f"the process ended with {ended.returncode}: {''.join(last)[:300]}"})
    return lines


def summary(models: Sequence[Graph], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the results say of a group of graphs in a release."""
    host, copies, kernels = Counter[str](), Counter[str](), Counter[str]()
    broken: dict[str, list[str]] = {}
    ran = failed = 0
    for graph, line in zip(models, lines, strict=True):
        if why := list(broken_rules(graph, line)):
            broken[graph.name] = why
        host.update(op for op, *_ in line.get("host", ()))
        copies.update(line.get("copies", {}))
        runs = line.get("runs", ())
        failed += any("error" in run for run in runs)
        ran += bool(runs) and all("error" not in run for run in runs)
        kernels.update(runs[-1].get("kernels", ()) if runs else ())
    return {
        "graphs": len(models),
        "ran": ran,
        "did not run": failed,
        "on the host": host,
        "copies": copies,
        "kernels of attention": kernels,
        "broken": broken,
    }


def main(arguments: Sequence[str]) -> int:
    """Write the results; 1 if a rule is broken. With --changed, keep those of graphs that are the same."""
    folders = [Path(argument) for argument in arguments if argument != "--changed"]
    written = groups(list(graphs()))
    digests = {name: digest(models) for name, models in written.items()}
    known = json.loads(RESULTS.read_text()) if "--changed" in arguments else {"releases": {}, "digests": {}}
    releases = {}
    for folder in folders:
        kept = {
            name: about
            for name, about in known["releases"].get(folder.name, {}).items()
            if known["digests"].get(name) == digests.get(name)
        }
        chosen = {name: meant_for(folder.name, models) for name, models in written.items() if name not in kept}
        lines = iter(placed(folder.resolve(), [graph for models in chosen.values() for graph in models]))
        releases[folder.name] = kept | {
            name: summary(models, list(islice(lines, len(models)))) for name, models in chosen.items()
        }
        broken = {name: about["broken"] for name, about in releases[folder.name].items() if about["broken"]}
        start = f"onnxruntime-gpu {folder.name}: {len(chosen)} groups of graphs"
        print(f"{start}; broken rules: {broken}", flush=True)
    results = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, without a GPU",
        "digests": digests,
        "releases": releases,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(about["broken"] for release in releases.values() for about in release.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
