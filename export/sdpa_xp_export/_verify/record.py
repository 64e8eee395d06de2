"""Write the verdict of a verification into the model, for whoever reads the file; `verify` never trusts it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import sdpa_xp
from sdpa_xp.errors import ArgumentValueError

from .._files.loading import data_files, load
from .._files.metadata import graph_digest, record_verdict
from .._files.model import EXTERNAL_ABOVE, Model
from ..report import LayerReport, Report
from ..save import save


def write_verdict(model: Model | str | os.PathLike[str], verified: Model, report: LayerReport) -> None:
    """Write the verdict of a report into a model, or into its file, which holds the model that was verified."""
    worst = report.worst.agreement
    verdict = {
        "agrees": report.agrees,
        "error": worst.absolute,
        "bound": worst.bound,
        "runs": len(report.runs),
        "engine": report.engine,
        "providers": ", ".join(sorted({run.provider for run in report.runs})),
        "seed": report.seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": sdpa_xp.__version__,
    }
    if isinstance(report, Report):
        verdict["call_from_metadata"] = report.from_metadata
    if not isinstance(model, str | os.PathLike):
        record_verdict(verified, verdict)
        return
    in_file = load("verify", model)
    if graph_digest(in_file) != graph_digest(verified):
        rule = "`model` must not change while it is verified; its verdict was not recorded"
        raise ArgumentValueError("verify", rule, {"model": model})
    record_verdict(in_file, verdict)
    save(in_file, model, overwrite=True, external_above=0 if data_files(Path(model)) else EXTERNAL_ABOVE)
