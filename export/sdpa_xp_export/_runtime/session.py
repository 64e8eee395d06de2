"""A session of onnxruntime: the provider that it runs on, and where each node really ran."""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp._checks import install_hint, message
from sdpa_xp_export._dtypes.conversion import RUNTIME_DTYPES
from sdpa_xp_export._files.model_files import write_model
from sdpa_xp_export._model.external_data import EXTERNAL_ABOVE, initializer_bytes
from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._runtime.failure import ModelFailedError
from sdpa_xp_export._runtime.memory import peak_above
from sdpa_xp_export._runtime.releases import PROVIDERS, Runtime, newer_note, short_provider
from sdpa_xp_export.report import Placement

LONG_RUN = 0.05
"""Seconds; in a run of this length, the additional time of a first run is small."""
SILENT = 4
"""The level of onnxruntime's log: only what ends the process is written to the terminal. Errors are raised, and
the log would repeat them with the names that a file gives its nodes."""


def installed_runtime() -> Any:
    """Return the module onnxruntime, which is imported when a model is run."""
    try:
        import onnxruntime
    except ImportError as error:
        rule, hint = "onnxruntime must be installed", install_hint("export")
        text = message("verify", rule, {"its error": error}, hint)
        raise ModuleNotFoundError(text, name="onnxruntime") from error
    return onnxruntime


def open_session(model: Model, provider: str, profile: Path | None = None) -> Any:
    """Open an onnxruntime session of `model` on `provider`, which must really start there."""
    onnxruntime = installed_runtime()
    if provider == PROVIDERS["cuda"] and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    # Threads that spin while they wait take the processor from what is computed between short runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    wanted = list(dict.fromkeys([provider, PROVIDERS["cpu"]]))
    with tempfile.TemporaryDirectory() as folder:
        # The runtime gets bytes if they fit: a model in a file could refer to other files.
        if isinstance(model, onnx.ModelProto) and initializer_bytes(model) <= EXTERNAL_ABOVE:
            source: bytes | Path = model.SerializeToString()
        else:
            path = Path(folder) / "model.onnx"
            source = write_model(model, path, overwrite=False, external_above=EXTERNAL_ABOVE)
        with _errors_reworded("load"):
            session = onnxruntime.InferenceSession(source, options, providers=wanted)
    if provider not in session.get_providers():  # onnxruntime only warns of a provider that is absent
        rule = f"onnxruntime could not start {provider}"
        raise ValueError(message("verify", rule, {"providers": session.get_providers()}))
    return session


def run(session: Any, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
    """Return the outputs of `session` by their names; `frees` the memory that it would keep."""
    names = [output.name for output in session.get_outputs()]
    options = installed_runtime().RunOptions()
    if frees:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with _errors_reworded("run"):
        if any("bfloat16" in value.type for value in (*session.get_inputs(), *session.get_outputs())):
            return _run_bound(session, feeds, options)
        return dict(zip(names, session.run(names, dict(feeds), options), strict=True))


def _run_bound(session: Any, feeds: Mapping[str, NDArray[Any]], options: Any) -> dict[str, NDArray[Any]]:
    """Run with arrays bound by their memory, since NumPy has no bfloat16; outputs are copied."""
    binding = session.io_binding()
    shared = []  # the binding does not keep memory alive
    for stated in session.get_inputs():
        shared.append(_shared(np.asarray(feeds[stated.name], order="C")))
        binding.bind_ortvalue_input(stated.name, shared[-1])
    for stated in session.get_outputs():
        binding.bind_output(stated.name, "cpu")
    session.run_with_iobinding(binding, options)
    values = zip(session.get_outputs(), binding.get_outputs(), strict=True)
    return {stated.name: _copied(value, RUNTIME_DTYPES[stated.type]) for stated, value in values}


def _copied(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the array that a value of onnxruntime holds, as a copy."""
    shape = value.shape()
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _shared(array: NDArray[Any]) -> Any:
    """Return a value of onnxruntime in the memory of `array`."""
    values = installed_runtime().OrtValue
    if array.dtype != ml_dtypes.bfloat16:
        return values.ortvalue_from_numpy(array)
    return values.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


@contextmanager
def _errors_reworded(what: str) -> Iterator[None]:
    """Raise errors of onnxruntime, which have no common base, as a ModelFailedError of one line."""
    try:
        yield
    except Exception as error:  # onnxruntime's errors have no other base
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = message("verify", f"onnxruntime must {what} `model`", {"its error": reason})
        raise ModelFailedError(text) from error


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The outputs of a run, the time it took, and the peak of memory of the first run with these inputs."""

    outputs: dict[str, NDArray[Any]]
    seconds: float
    peak_bytes: int | None


@dataclass(slots=True)
class ProfiledSession:
    """A session whose profile says, when it ends, where each node ran."""

    session: Any
    placements: list[Placement] = field(default_factory=list)

    def timed(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> TimedRun:
        """Run twice, unless a run is long: the first run shows the peak of memory, the second the time.

        A session keeps the memory of each length for the next run. `frees` gives it back, so that runs of many
        long lengths take no more memory than the longest; the next run takes longer.
        """
        start = time.perf_counter()
        outputs, peak = peak_above(partial(run, self.session, feeds, frees=frees))
        seconds = time.perf_counter() - start
        if seconds < LONG_RUN:
            start = time.perf_counter()
            outputs = run(self.session, feeds)
            seconds = time.perf_counter() - start
        return TimedRun(outputs, seconds, peak)


@contextmanager
def profiled_session(model: Model, provider: str) -> Iterator[ProfiledSession]:
    """Open a session of `model`, and read from its profile where the nodes ran when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            profiled = ProfiledSession(open_session(model, provider, Path(folder) / "profile"))
            yield profiled
        except ModelFailedError as error:
            if notes := release_notes(model):
                raise ModelFailedError(f"{error} {'; '.join(notes)}.") from error
            raise
        profiled.placements += placements(Path(profiled.session.end_profiling()), provider)


def version() -> str:
    """Return the release of onnxruntime that is installed."""
    return str(installed_runtime().__version__)


def stated_runtime(model: Model) -> Runtime | None:
    """Return the runtime that a model was written for; None if its metadata have none."""
    stated = {entry.key: entry.value for entry in model.metadata_props}.get("sdpa_xp.runtime", "")
    try:
        return Runtime.parse("verify", stated)
    except ValueError:  # anyone may have written the file
        return None


def release_notes(model: Model) -> tuple[str, ...]:
    """Return that the installed release is older than the model's, or newer than all that were tried."""
    stated, installed = stated_runtime(model), version()
    notes = (stated.older_note(installed) if stated else "", newer_note(installed))
    return tuple(filter(None, notes))


def placements(profile: Path, requested: str) -> list[Placement]:
    """Return each node that ran, once, in order; from the profile that the runtime wrote."""
    events = json.loads(profile.read_text())
    ran: dict[Placement, None] = {}
    for event in events:
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details:
            name = event["name"].removesuffix("_kernel_time")
            ran[Placement(name, details["op_name"], details["provider"], requested)] = None
    return list(ran)


def providers(requested: str | None = None) -> list[str]:
    """Return the execution providers to run on: the one asked for, or CUDA if offered and the CPU."""
    offered = installed_runtime().get_available_providers()
    if requested is None:
        return [name for name in (PROVIDERS["cuda"], PROVIDERS["cpu"]) if name in offered]
    short = short_provider(requested)
    if short is None or PROVIDERS[short] not in offered:
        rule = "`provider` must be one that onnxruntime offers here"
        known = [f"{name} ({full})" for name, full in PROVIDERS.items() if full in offered]
        hint = "It may be cpu or cuda."
        if short == "cuda":
            hint = f"onnxruntime-gpu offers cuda: pip uninstall onnxruntime. {install_hint('export-gpu')}"
        got = {"provider": repr(requested), "offered": ", ".join(known)}
        raise ValueError(message("verify", rule, got, hint))
    return [PROVIDERS[short]]
