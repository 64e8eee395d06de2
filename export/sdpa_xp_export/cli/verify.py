"""`sdpa-xp verify`: whether a model computes what it states, where its nodes ran, and what it took."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sdpa_xp.errors import ArgumentValueError, renamed

from .._call.call import OPTIONS
from .._files.atomic import publish
from .._files.loading import data_files
from .._files.paths import PathArgument, free_target
from .._runtime.limits import TIMEOUT
from .._runtime.releases import ENGINES, PROVIDERS, EngineName, Runtime, short_provider
from ..report import LayerReport, Report, Run, closest_runs, described_error, shown_math_mode
from ..verify import verify
from ..verify_layer import verify_golden
from . import DISAGREES
from . import report_page as page
from .export import CALL, export_arguments, read
from .shared import (
    NO,
    YES,
    AsJson,
    Force,
    Provider,
    check_output,
    progress,
    say,
    say_json,
    say_table,
    value_option,
)

HTML = PathArgument("verify", "html")
SHOWN_FAILURES = 5
UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}{end}": 1024**power for power, prefix in enumerate("kmgt", start=1) for end in ("", "ib")}
"""Bytes in a unit: a GB is 10**9, and a GiB or a G is 2**30."""


def run_verify(
    model: Annotated[Path, typer.Argument(help="A file that sdpa-xp export wrote.")],
    call: Annotated[
        Path | None,
        typer.Option(help="A TOML file with the call, as for export --config. Default: the model's metadata."),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(help="A file of verify_layer: verify the model of a layer by the runs in it."),
    ] = None,
    provider: Provider = None,
    engine: Annotated[
        str, value_option("<engine>", f"What runs the model: {', '.join(ENGINES)}.", ENGINES)
    ] = "onnxruntime",
    require_provider: Annotated[
        str | None,
        value_option(
            "<provider>",
            "Run on this provider. Exit 1 if a node ran elsewhere, 2 if it is not offered.",
            PROVIDERS,
        ),
    ] = None,
    require_runtime: Annotated[
        bool,
        typer.Option(
            "--require-runtime",
            help="Exit 1 if the model is for another engine, or for a newer release of it.",
        ),
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Try more lengths and rows; takes minutes.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="<number>",
            help="Repeat the runs of this seed. Default: a new one, which the report names.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="<seconds>",
            help="The most seconds for the reference and for the engine, all runs together. "
            f"Default: {TIMEOUT:.0f}, an hour.",
            show_default=False,
        ),
    ] = TIMEOUT,
    memory: Annotated[
        str | None,
        value_option(
            "<bytes>",
            "The most memory of the model, such as 4GiB. Default: 8 GiB, more for a large model or call. "
            "A limit also leaves out runs that are too long for it.",
        ),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="Show each run.")] = False,
    as_json: AsJson = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write the report to this file, as an HTML page.")
    ] = None,
    force: Force = False,
) -> None:
    """Check a model in an engine against the reference.

    The reference is computed in float64.
    """
    _check(provider, require_provider)
    if golden is not None:
        _check_alone({"call": call, "seed": seed, "thorough": thorough or None})
    if html:  # before the long work
        others = {call: "the file of --call", golden: "the golden file"}
        inputs = {model: "the model"} | {path: what for path, what in others.items() if path is not None}
        if html.is_file():  # what is not there is not read
            with suppress(OSError):  # `verify` says why it cannot read the model
                inputs |= dict.fromkeys(data_files(model), "the data of the model")
        check_output(HTML, html, inputs)
        free_target(html, HTML, overwrite=force)
    limits = {"timeout": timeout, "memory": None if memory is None else _number_of_bytes(memory)}
    runtime: dict[str, Any] = {"provider": require_provider or provider, "engine": engine, **limits}
    report: LayerReport  # both functions refuse other providers and engines
    with progress(f"verify {model.name}", quiet=as_json) as steps:
        if golden is not None:
            report = verify_golden(model, golden, **runtime)
        else:
            runtime |= {"watch": lambda _done, total, shown: steps.end(shown, total)}
            stated = None if call is None else _written(call)
            report = verify(model, call=stated, seed=seed, thorough=thorough, **runtime)
    flags = {"thorough": "--thorough", "memory": "--memory"}  # what was left out names keywords of `verify`
    report = replace(report, left_out=tuple(renamed(line, flags) for line in report.left_out))
    on_required = cast(EngineName, engine) if require_runtime else None
    failures = _failures(report, on_provider=require_provider is not None, on_engine=on_required)
    if html:
        publish(page.page(report, model.name, failures).encode(), html, HTML, overwrite=force)
    if as_json:
        say_json(_facts(report, failures))
    else:
        if html:
            say(f"wrote {html}")
        if runs:
            _show_runs(report)
        _show(report, thorough=thorough)
        for failure in failures[: None if runs else SHOWN_FAILURES]:
            say(f"FAILS: {failure}")
        if len(failures) > SHOWN_FAILURES and not runs:
            say(f"and {len(failures) - SHOWN_FAILURES} more; --runs shows all")
    if failures:
        raise typer.Exit(DISAGREES)


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
        f"{_named(run)}: error {run.agreement.absolute:.2g}, bound {run.agreement.bound:.2g}"
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


def _facts(report: LayerReport, failures: list[str]) -> dict[str, object]:
    names = [
        *("agrees", "form", "reason", "onnxruntime", "engine", "runtime", "notes", "smallest_failure"),
        *("math_mode", "seed", "reference", "left_out", "nodes"),
    ]
    facts = {"holds": not failures, "failures": failures} | {name: getattr(report, name) for name in names}
    if isinstance(report, Report):
        facts |= {"call": page.stated(report.call), "call_from_metadata": report.from_metadata}
        facts |= {"computed_in": report.computed_in}
    return facts | {name: list(map(asdict, getattr(report, name))) for name in ("runs", "placements")}


def _show(report: LayerReport, *, thorough: bool) -> None:
    """Print the verdict, and what stands behind it: a line for each."""
    verdict = "agrees" if report.agrees else "DISAGREES"
    say(f"{report.form}: {verdict} in {len(report.runs)} runs on {report.engine}")
    for line in (*report.notes, report.smallest_failure):
        if line:
            say(line)
    for which, one_run in closest_runs(report).items():
        say(f"{which}: {one_run.output} of {one_run.inputs},")
        say(f"  on {one_run.provider}, {described_error(one_run)}")
    compared, rows = (sum(getattr(run, name) for run in report.runs) for name in ("compared", "rows"))
    more = "" if thorough else "; --thorough compares more"
    why = f" (a sample of each long run{more})" if compared < rows else ""
    say(f"rows compared: {compared:,} of {rows:,}{why}")
    say(page.origin(report))
    say(report.nodes)
    for mode in shown_math_mode(report):
        say(f"math mode: {mode}")
    repeats = f" (--seed {report.seed} repeats these runs)" if isinstance(report, Report) else ""
    say(f"seed: {report.seed}{repeats}")
    for line in report.left_out:
        say(f"not tried: {line}")
    for placed in report.fell_back:
        say(f"fell back: {placed.node} ({placed.op}) ran on {placed.provider}")


def _show_runs(report: LayerReport) -> None:
    """Print a table of the runs; what is the same in all of them is no column."""
    columns, cells = page.run_table(report.runs)
    marked = [[{"yes": YES, "NO": NO}.get(cell, cell) for cell in row] for row in cells]
    say_table(columns, marked)


def _named(run: Run) -> str:
    return f"{run.output} of {run.inputs} on {run.provider}"
