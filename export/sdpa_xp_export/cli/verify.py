"""`sdpa-xp verify`: whether a model computes what it states, where its nodes ran, and what it took."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import typer

from sdpa_xp.errors import ArgumentValueError, renamed

from .._call.call import OPTIONS
from .._files.loading import data_files
from .._files.paths import PathArgument, free_target, publish
from .._runtime.limits import TIMEOUT
from .._runtime.releases import ENGINES, PROVIDERS, EngineName, Runtime, short_provider
from ..report import LayerReport
from ..verify import verify, verify_golden
from . import DISAGREES
from .export import CALL, export_arguments, read
from .report import facts, page, show
from .terminal import check_output, flags, progress, say, say_json

HTML = PathArgument("verify", "html")
UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}{end}": 1024**power for power, prefix in enumerate("kmgt", start=1) for end in ("", "ib")}
"""Bytes in a unit: a GB is 10**9, and a GiB or a G is 2**30."""


@flags(
    settings={
        "provider": {"values": PROVIDERS},
        "engine": {"values": ENGINES},
        "require_provider": {"values": PROVIDERS},
        "seed": {"min": 0},
        "timeout": {"show_default": False},
    },
    engines=", ".join(ENGINES),
    timeout=f"{TIMEOUT:.0f}",
)
def run_verify(
    model: Path,
    call: Path | None = None,
    golden: Path | None = None,
    provider: str | None = None,
    engine: str = "onnxruntime",
    require_provider: str | None = None,
    require_runtime: bool = False,
    thorough: bool = False,
    seed: int | None = None,
    timeout: float = TIMEOUT,
    memory: str | None = None,
    record: bool = False,
    runs: bool = False,
    json: bool = False,
    html: Path | None = None,
    force: bool = False,
) -> None:
    """Check a model in an engine against the reference.

    The reference is computed in float64.

    Args:
        model: An ONNX file. Of a call: as sdpa-xp export or save wrote it. Of a layer: with --golden.
        call: A TOML file with the call, as for export --config. Default: the model's metadata.
        golden: A file of verify_layer: verify the model of a layer by the runs in it.
        provider (<provider>): cpu, cuda, wasm or webgpu. Default: cpu, and cuda if it starts here.
        engine (<engine>): What runs the model: {engines}.
        require_provider (<provider>): Run on this provider. Exit 1 if a node ran elsewhere, 2 if it is not
            offered.
        require_runtime: Exit 1 if the model is for another engine, or for a newer release of it.
        thorough: Try more lengths and rows; takes minutes.
        seed (<number>): Repeat the runs of this seed. Default: a new one, which the report names.
        timeout (<seconds>): The most seconds for the reference and for the engine, all runs together. Default:
            {timeout}, an hour.
        memory (<bytes>): The most memory of the model, such as 4GiB. Default: 8 GiB, more for a large model or
            call. A limit also leaves out runs that are too long for it.
        record: Write the verdict into the model's metadata.
        runs: Show each run.
        json: Print JSON for scripts.
        html: Also write the report to this file, as an HTML page.
        force: Replace an existing file.
    """
    _check(provider, require_provider)
    if golden is not None:
        _check_alone({"call": call, "seed": seed, "thorough": thorough or None})
    if html:
        _check_page(html, model, {call: "the file of --call", golden: "the golden file"}, overwrite=force)
    runtime: dict[str, Any] = {
        "provider": require_provider or provider,
        "engine": engine,
        "timeout": timeout,
        "memory": None if memory is None else _number_of_bytes(memory),
        "record": record,
    }
    report: LayerReport  # both functions refuse other providers and engines
    with progress(f"verify {model.name}", quiet=json) as steps:
        if golden is not None:
            report = verify_golden(model, golden, **runtime)
        else:
            runtime |= {"watch": lambda _done, total, shown: steps.end(shown, total)}
            stated = None if call is None else _written(call)
            report = verify(model, call=stated, seed=seed, thorough=thorough, **runtime)
    names = {"thorough": "--thorough", "memory": "--memory"}  # what was left out names keywords of `verify`
    report = replace(report, left_out=tuple(renamed(line, names) for line in report.left_out))
    on_required = cast(EngineName, engine) if require_runtime else None
    failures = _failures(report, on_provider=require_provider is not None, on_engine=on_required)
    if html:
        publish(page(report, model.name, failures).encode(), html, HTML, overwrite=force)
    if json:
        say_json(facts(report, failures))
    else:
        if html:
            say(f"wrote {html}")
        if record:
            say(f"recorded the verdict in {model}")
        show(report, failures, runs=runs, thorough=thorough)
    if failures:
        raise typer.Exit(DISAGREES)


def _check_page(html: Path, model: Path, others: Mapping[Path | None, str], *, overwrite: bool) -> None:
    """Check before the long work that the page can be written, and replaces nothing that is read."""
    inputs = {model: "the model"} | {path: what for path, what in others.items() if path is not None}
    if html.is_file():  # what is not there is not read
        with suppress(OSError):  # `verify` says why it cannot read the model
            inputs |= dict.fromkeys(data_files(model), "the data of the model")
    check_output(HTML, html, inputs)
    free_target(html, HTML, overwrite=overwrite)


def _written(path: Path) -> dict[str, Any]:
    """Return the call that a TOML file states. What is no part of a call, as the form, is left out."""
    arguments = export_arguments(read(path, CALL), CALL)
    return {name: value for name, value in arguments.items() if name in OPTIONS}


def _number_of_bytes(text: str) -> int:
    """Read a number of bytes such as 4GiB."""
    # Of more digits, a float may be infinite, which `int` refuses.
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        rule, hint = "`memory` must be a number of bytes", "Write it as 4GiB or 500MB."
        raise ArgumentValueError("verify", rule, {"memory": repr(text)}, hint)
    return int(float(match[1]) * UNITS[match[2]])


def _check(provider: str | None, required: str | None) -> None:
    """Refuse two providers."""
    one, other = (short_provider(name) or name for name in (provider, required))
    if provider and required and one != other:
        got = {"provider": provider, "require_provider": required}
        raise ArgumentValueError("verify", "`provider` and `require_provider` must be the same", got)


def _check_alone(others: dict[str, object]) -> None:
    """Refuse options that choose other runs than those of a golden file."""
    if options := {name: value for name, value in others.items() if value is not None}:
        names = " and ".join(f"`{name}`" for name in options)
        rule = f"`golden` must be passed without {names}: it has the runs"
        raise ArgumentValueError("verify", rule, options)


def _failures(report: LayerReport, *, on_provider: bool, on_engine: EngineName | None) -> list[str]:
    """Return a line for each thing that failed: a run, a node on the wrong provider, an old runtime."""
    failures = [
        f"{run.output} of {run.inputs} on {run.provider}: "
        f"error {run.agreement.absolute:.2g}, bound {run.agreement.bound:.2g}"
        for run in report.failing
    ]
    if on_provider:
        failures += [
            f"node {placed.node} ({placed.op}) ran on {placed.provider}, not on {placed.requested}"
            for placed in report.fell_back
        ]
    if on_engine and not report.runtime:
        failures.append("the file does not state the runtime that it is for")
    elif on_engine:
        release = report.engine.rpartition(" ")[2]
        parts = [Runtime.parse("verify", stated) for stated in report.runtime.split(", ")]
        file = "the file" if len(parts) == 1 else "a part of the file"
        failures += filter(None, (stated.older_note(release, on_engine, file) for stated in parts))
    return failures
