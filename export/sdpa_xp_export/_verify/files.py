"""The files of a verification: the golden file of a layer, and the verdict in the file of a model.

A golden file has inputs of a layer and what it returned, to verify its model where its code is not. It is an
.npz without pickles. Its `facts` are JSON: which model it is of, and what a report says of each run. Run 3 has
the arrays `3/inputs/x`, `3/exact/output`, the reference, and `3/direct/output`, the layer in its own dtype.
Anyone may have written the file, so nothing in it is taken as true.

A verdict is for whoever reads the file of the model; `verify` never trusts it.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import sdpa_xp
from sdpa_xp.errors import ArgumentValueError

from .._dtypes.dtype import numpy_dtype
from .._files.loading import LARGEST, UnfitError, load, read_file
from .._files.model import Model, graph_digest, record_verdict
from .._files.paths import PathArgument, free_target, publish
from ..report import LayerReport
from ..spec import evaluated
from .cases import Case
from .judging import EPS
from .layer import BothLayers, with_results
from .model import input_specs, shown_type

BFLOAT16 = numpy_dtype("bfloat16")
MOST = 2**24
"""Bytes of the arrays of a run; a file has some 60 runs, most of them small."""
LONGEST = 500
"""Characters of the file that a message shows."""
ARGUMENT = PathArgument("verify", "model")
PARTS = ("inputs", "exact", "direct")
"""The attributes of a case that the arrays of its run hold."""


def golden_file(model: Model, both: BothLayers, cases: Sequence[Case], report: Sequence[object]) -> bytes:
    """Return a golden file; `report` has the seed, the dtype of the reference, and what was left out."""
    runs, left_out = list[dict[str, object]](), list[str]()
    arrays = dict[str, NDArray[Any]]()
    for case in cases:
        named = {f"{part}/{name}": x for part in PARTS for name, x in getattr(case, part).items()}
        if sum(x.nbytes for x in named.values()) > MOST:
            left_out.append(f"{case.shown}: more than {MOST >> 20} MiB, too large for a golden file")
            continue
        # Where the file is read, the layer cannot be called again if a bound is small by luck.
        named |= {f"direct/{name}": x for name, x in both.with_more_errors(case).direct.items()}
        arrays |= {f"{len(runs)}/{name}": x for name, x in named.items()}
        runs.append({"lengths": case.lengths, "kind": case.special, "is_own": case.is_own})
    facts = {"model": _identity(model), "report": [*report, *left_out], "runs": runs}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, facts=np.array(json.dumps(facts)), **arrays)
    return file.getvalue()


def _identity(model: Model) -> dict[str, str]:
    """Return the inputs, the outputs and the digest of a model."""
    sides = {"inputs": model.graph.input, "outputs": model.graph.output}
    shown = {side: ", ".join(f"{x.name}: {shown_type(x)}" for x in values) for side, values in sides.items()}
    return shown | {"digest of nodes and weights": graph_digest(model)}


def read_golden(path: Path, model: Model) -> tuple[list[Case], partial[LayerReport]]:
    """Return the cases in the golden file of a model, and the report with its fields in the file."""
    return read_file(PathArgument("verify", "golden"), path, lambda file: _parsed(file, model))


def _parsed(file: Path, model: Model) -> tuple[list[Case], partial[LayerReport]]:
    size = file.stat().st_size
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            # Then no array is larger than the file, whatever its header says.
            if size > LARGEST or sum(entry.file_size for entry in stored.zip.infolist()) > size:
                raise UnfitError(f"have at most {LARGEST} bytes, without compression", {"bytes": size})
            # NumPy knows no bfloat16, and reads two bytes of no kind.
            arrays = {key: x.view(BFLOAT16) if x.dtype == "V2" else x for key, x in stored.items()}
        facts = json.loads(str(arrays["facts"]))
        for what, expected in _identity(model).items():
            if (stated := str(facts["model"][what])) != expected:
                got = {"golden file": stated[:LONGEST], "model": expected[:LONGEST]}
                raise UnfitError(f"be of a model with the {what} of this one", got)
        (seed, reference, *left_out), (first, *others) = facts["report"], facts["runs"]  # at least one run
        cases = [_case(run, f"{number}/", arrays, model) for number, run in enumerate((first, *others))]
        report = partial(LayerReport, seed=int(seed), reference=str(reference), left_out=(*map(str, left_out),))
    except UnfitError:
        raise
    except KeyError as error:
        raise UnfitError("hold all that verify_layer wrote", {"missing": str(error)[:LONGEST]}) from error
    except Exception as error:  # NumPy, zipfile and JSON raise errors of many classes
        raise UnfitError("be a golden file of verify_layer (it is cut short, or of another format)") from error
    return cases, report


def _case(run: Mapping[str, Any], start: str, arrays: Mapping[str, NDArray[Any]], model: Model) -> Case:
    """Return a run whose arrays fit the model and each other."""
    specs, outputs = input_specs(model), [value.name for value in model.graph.output]
    lengths = {str(name): int(length) for name, length in run["lengths"].items()}
    inputs, exact, direct = (
        {name: arrays[f"{start}{part}/{name}"] for name in names}
        for part, names in zip(PARTS, (specs, outputs, outputs), strict=True)
    )
    wanted = [(spec.dtype, tuple(evaluated(n, lengths) for n in spec.shape)) for spec in specs.values()]
    wanted += [("float64" if x.dtype.name in EPS else x.dtype.name, x.shape) for x in direct.values()]
    for (name, x), (dtype, shape) in zip([*inputs.items(), *exact.items()], wanted, strict=True):
        if x.dtype != numpy_dtype(dtype) or x.shape != shape:
            got = {f"{start}{name}": f"{x.dtype}{list(x.shape)}", "must be": f"{dtype}{list(shape)}"}
            raise UnfitError("hold arrays that fit the model and each other", got)
    case = Case(lengths, extreme=str(run["kind"]).removeprefix(", "), inputs=inputs)
    return with_results(case, exact, direct, is_own=bool(run["is_own"]))


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
