"""`sdpa-xp verify`: whether a model computes what it states, where its nodes ran, and what it took."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from sdpa_xp._checks import message
from sdpa_xp_export._files.atomic import publish
from sdpa_xp_export._files.paths import PathArgument, free_target
from sdpa_xp_export._runtime.releases import PROVIDERS, ProviderName
from sdpa_xp_export.cli import DISAGREES
from sdpa_xp_export.cli import report_page as page
from sdpa_xp_export.cli.options import AsJson, Force, Provider, completed_from
from sdpa_xp_export.cli.printing import NO, YES, progress, say, say_json, say_table
from sdpa_xp_export.report import Report
from sdpa_xp_export.verify import verify

HTML = PathArgument("verify", "html")


def run_verify(
    model: Annotated[Path, typer.Argument(help="A file that sdpa-xp export wrote.")],
    provider: Provider = None,
    require_provider: Annotated[
        str | None,
        typer.Option(
            help="Run there, and exit 1 if a node ran elsewhere.", autocompletion=completed_from(PROVIDERS)
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page, to this file.")] = None,
    force: Force = False,
) -> None:
    """Run a model in onnxruntime against the float64 reference; exits 1 if it disagrees."""
    _check(provider, require_provider, html, as_json=as_json, force=force)
    with progress(f"verify {model.name}", quiet=as_json) as step:
        requested = cast(ProviderName | None, require_provider or provider)  # `verify` refuses others
        report = verify(model, provider=requested, seed=seed, watch=step)
    failures = _failures(report, required=require_provider is not None)
    if as_json:
        say_json(_facts(report, failures))
    elif html:
        text = page.page(report, model.name, failures)
        publish(text.encode(), html, HTML, overwrite=force)
        say(f"wrote {html}")
        say(str(report))
    else:
        _show(report)
    for failure in failures if not as_json else ():
        say(f"FAILS: {failure}")
    if failures:
        raise typer.Exit(DISAGREES)


def _check(
    provider: str | None, required: str | None, html: Path | None, *, as_json: bool, force: bool
) -> None:
    """Refuse arguments that contradict each other, and a file in the way, before the long work."""
    if provider and required and provider != required:
        got = {"provider": provider, "require_provider": required}
        raise ValueError(message("verify", "`provider` must be the required one", got))
    if html and as_json:
        got = {"html": str(html), "json": "True"}
        raise ValueError(message("verify", "one of `html` and `json` may be given", got))
    if html:
        free_target(html, HTML, overwrite=force)


def _failures(report: Report, *, required: bool) -> list[str]:
    """Return a line for each thing that failed."""
    failures = [
        f"{run.output} of {run.inputs} on {run.provider}: "
        f"error {run.agreement.absolute:.2g}, bound {run.agreement.bound:.2g}"
        for run in report.runs
        if not run.agreement.agrees
    ]
    if required:
        failures += [
            f"node {placed.node} ({placed.op}) ran on {placed.provider}, not on {placed.requested}"
            for placed in report.fell_back
        ]
    return failures


def _facts(report: Report, failures: list[str]) -> dict[str, object]:
    return {
        "holds": not failures,
        "failures": failures,
        "agrees": report.agrees,
        "form": report.form,
        "reason": report.reason,
        "onnxruntime": report.onnxruntime,
        "call": page.stated(report.call),
        "runs": [asdict(run) for run in report.runs],
        "placements": [asdict(placed) for placed in report.placements],
    }


def _show(report: Report) -> None:
    runs = []
    for run in report.runs:
        agreement = run.agreement
        runs.append(
            (
                run.inputs,
                run.provider,
                run.output,
                f"{agreement.absolute:.2g}",
                f"{agreement.bound:.2g}",
                YES if agreement.agrees else NO,
                f"{run.seconds * 1e3:.2f}",
                page.megabytes(run.peak_bytes),
            )
        )
    say_table(page.RUN_COLUMNS, runs)
    say_table(
        page.NODE_COLUMNS, [(node.node, node.op, node.provider, node.requested) for node in report.placements]
    )
    say(str(report))
