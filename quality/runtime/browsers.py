"""`python -m quality.runtime.browsers [NAME...]`: forms in browsers and other programs, into browsers.json.

Each graph is written for the provider that runs it. WebAssembly is onnxruntime-web in Node.js, and WebGPU is
onnxruntime's plugin on SwiftShader: tests/browsers.py says what must be installed. WebAssembly runs all calls.
WebGPU takes a second for each graph and runs our list of features in float32, since SwiftShader has no float16
and WebGPU no float64. OpenVINO and ONNX's reference evaluator run the list in each dtype.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from browsers import MODULES, PLUGIN, adapter
from feature_calls import DTYPES, features
from internals import (
    ENGINES,
    PROVIDERS,
    READERS,
    SESSIONS,
    ExportCall,
    Runtime,
    checked_call,
    probe,
    run_session,
)

from quality.runtime.jobs import Job, jobs, jobs_of_features
from sdpa_xp import masks
from sdpa_xp_export import TensorSpec
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, check_tensors, unsupported_reason

RESULTS = Path(__file__).parents[2] / "results" / "browsers.json"
READER_RUNTIMES = {"openvino": "openvino>=2026.4;cpu", "reference": "onnx"}
NAMES = ("wasm", "webgpu", *READER_RUNTIMES)
RELEASE = "1.30"
"""Graphs are written for this release, the newest of onnxruntime-web."""
LENGTHS = (5, 31, 32, 33, 100, 300)
"""The tokens of a call; kernels of attention change at 32."""


def main(names: list[str]) -> int:
    """Run the providers and programs of these names, or all, and write what came; 1 if something is wrong."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or NAMES:
        results[name] = measured(name, calls_of(name))
        results = {known: results[known] for known in NAMES if known in results}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(form["wrong"] for result in results.values() for form in result["forms"].values()))


def calls_of(name: str) -> list[Job]:
    """The calls that a provider or a program computes, and calls of more tokens."""
    if name in READERS:
        lists = (jobs_of_features(features(dtype), dtype) for dtype in DTYPES)
        return [*chain.from_iterable(lists), *by_length()]
    run = jobs() if name == "wasm" else jobs_of_features(features("float32"), "float32")
    return [*run, *by_length()]


def measured(name: str, calls: list[Job]) -> dict[str, Any]:
    """Return what the provider or program computes of all calls, in each form."""
    if name in READERS:
        program, plugin = f"{ENGINES[name]} {READERS[name].version()}", None
    else:
        if name == "webgpu":
            sys.path.insert(0, str(PLUGIN))
        facts = session_class(name).about([PROVIDERS[name]], probe())
        if PROVIDERS[name] not in facts["started"]:
            raise RuntimeError(f"{name} does not start: {facts['why_not']}")
        program = f"{'onnxruntime-web' if name == 'wasm' else 'onnxruntime'} {facts['version']}"
        plugin = facts["note"]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "program": program,
        "plugin": plugin,
        "dtypes": ", ".join(dict.fromkeys(job.call.query.dtype for job in calls)),
        "calls": len(calls),
        "forms": {form: form_results(name, form, calls) for form in FORMS},
    }


def form_results(name: str, form: str, calls: list[Job]) -> dict[str, Any]:
    """Run all calls that are not refused in a form."""
    ran, wrong = Counter[str](), {}
    accepted = [job for job in calls if reason(name, form, job.call) is None]
    for job in accepted:
        if fault := computed(name, form, job, ran):
            wrong[job.name] = fault
            print(f"{name}, {form}: {job.name}: {fault}", flush=True)
    print(f"{name}, {form}: {len(accepted) - len(wrong)} right, {len(wrong)} wrong", flush=True)
    return {
        "right": len(accepted) - len(wrong),
        "refused": dict(sorted(refusals(name, form, calls).items())),
        "wrong": wrong,
        "nodes": {provider: round(count / ran.total(), 3) for provider, count in sorted(ran.items())},
    }


def refusals(name: str, form: str, calls: list[Job]) -> Counter[str]:
    """Return why the exporter refuses the form for this provider, and how many of the calls."""
    return Counter(filter(None, (reason(name, form, job.call) for job in calls)))


def reason(name: str, form: str, call: ExportCall) -> str | None:
    """Return why the exporter refuses a call; None if it does not."""
    target = Runtime.parse("runtime", runtime_of(name))
    try:
        check_tensors("runtime", call, target)
    except TypeError as error:
        no_bfloat16 = "onnxruntime's JavaScript API has no tensor of bfloat16"
        return str(error) if name in READERS else no_bfloat16
    return unsupported_reason(form, call, target)


def runtime_of(name: str) -> str:
    return READER_RUNTIMES.get(name) or f"onnxruntime>={RELEASE};{name}"


def session_class(name: str) -> Any:
    """Return the class of the sessions of a provider."""
    return SESSIONS["wasm" if name == "wasm" else "onnxruntime"]


def by_length() -> Iterator[Job]:
    """Calls of each of `LENGTHS`, with equal and with grouped heads."""
    rules: dict[str, dict[str, Any]] = {
        "all pairs": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "attn_mask": masks.sliding_window(20, 0)},
        "padding": {"attn_mask": masks.padding(TensorSpec("int64", (1,)))},
    }
    for length in LENGTHS:
        query, shared = (TensorSpec("float32", (1, heads, length, 64)) for heads in (4, 2))
        calls: dict[str, ExportCall] = {}
        for name, rule in rules.items():
            for key in (query, shared):
                what = f"{length} tokens, {name}, {key.shape[1]} key heads"
                calls[what] = checked_call("runtime.webgpu", query, key, key, **rule)
        yield from jobs_of_features(calls, "float32")


def computed(name: str, form: str, job: Job, ran: Counter[str]) -> str | None:
    """Run a graph; return what is wrong with its outputs. `ran` counts its nodes by their provider."""
    proto = export_call(job.call, form=form, runtime=runtime_of(name))
    model, outputs = proto.SerializeToString(), [output.name for output in proto.graph.output]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if name in READERS:
                reader = READERS[name](model, outputs)
                return job.fault([reader.run(feeds) for feeds in job.feeds])
            session = session_class(name)(model, outputs, PROVIDERS[name], Path(folder) / "profile")
            runs = [run_session(session, feeds) for feeds in job.feeds]
        except Exception as error:  # each program has errors of its own
            return str(error).splitlines()[0]
        if PROVIDERS[name] not in session.providers:  # without an adapter it silently falls back to the CPU
            raise RuntimeError(f"{name} found no adapter")
        ran.update(provider for *_, provider in session.nodes())
    return job.fault(runs)


if __name__ == "__main__":
    wanted = {"NODE_PATH": str(MODULES)} | adapter()
    if not wanted.items() <= os.environ.items():  # the system reads the path of libraries when a process starts
        command = [sys.executable, "-m", "quality.runtime.browsers", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | wanted)
    sys.exit(main(sys.argv[1:]))
