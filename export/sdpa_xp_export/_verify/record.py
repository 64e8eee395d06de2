"""Write the verdict of a verification into the model, for whoever reads the file; `verify` never trusts it."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime
from pathlib import Path

import onnx

import sdpa_xp
from sdpa_xp.errors import ArgumentValueError

from .._files.loading import load
from .._files.metadata import graph_digest, record_verdict
from .._files.model import Model
from .._files.paths import PathArgument, free_target, publish
from ..report import LayerReport

ARGUMENT = PathArgument("verify", "model")


def check_recordable(model: Model | str | os.PathLike[str]) -> None:
    """Refuse a file that a verdict cannot be written into, before the model is run."""
    if isinstance(model, str | os.PathLike) and Path(model).exists():
        target = free_target(model, ARGUMENT, overwrite=True)
        if not (os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)):
            raise PermissionError(
                ARGUMENT.message("must be writable, with its folder, to record a verdict", model)
            )


def write_verdict(
    model: Model | str | os.PathLike[str],
    verified: Model,
    report: LayerReport,
    *,
    call_from_metadata: bool | None = None,
) -> None:
    """Write the verdict of a report into a model, or into its file, which holds the model that was verified.

    Numbers beside the file stay as they are.
    """
    worst, graph = report.worst.agreement, graph_digest(verified)
    verdict = {
        "agrees": report.agrees,
        "error": worst.absolute if math.isfinite(worst.absolute) else None,  # JSON has no infinity
        "bound": worst.bound if math.isfinite(worst.bound) else None,
        "runs": len(report.runs),
        "engine": report.engine,
        "providers": ", ".join(sorted({run.provider for run in report.runs})),
        "seed": report.seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": sdpa_xp.__version__,
        "graph": graph,
    }
    if call_from_metadata is not None:
        verdict["call_from_metadata"] = call_from_metadata
    if not isinstance(model, str | os.PathLike):
        record_verdict(verified, verdict)
        return
    if graph_digest(load("verify", model)) != graph:
        rule = "`model` must not change while it is verified; its verdict was not recorded"
        raise ArgumentValueError("verify", rule, {"model": model})
    proto = onnx.load(model, load_external_data=False)
    record_verdict(proto, verdict)
    publish(proto.SerializeToString(), Path(model), ARGUMENT, overwrite=True)
