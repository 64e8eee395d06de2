"""Sessions of onnxruntime, their time and their memory in the process that has them.

It has no more imports than that process needs.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import browsers
from .browsers import WASM, WEBGPU

LONG_RUN = 0.05
"""Seconds; in a run of this length, the additional time of a first run is small."""
SILENT, WARNING = 4, 2
"""Two levels of onnxruntime's log; the second is the default. With the first, only what ends the process is
written to the terminal. Errors are raised, and the log would repeat them with the names of a file's nodes."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PROVIDER_OPTIONS = {CUDA: {"use_tf32": "0"}}
"""The options that a session needs for the numbers that are promised. By itself, onnxruntime rounds the factors
of float32 products on CUDA to TF32, which has 10 bits."""
BFLOAT16 = 16
"""The number of the dtype in ONNX."""
MOST_NODES = 100_000
"""The nodes that are read from a profile; a loop may run as many as it likes."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_NAME_OF_EVENT = re.compile(r'(?<="name" :)".*?"(?=,"args" : \{)', re.DOTALL)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The outputs of a run, the time it took, and the peak of memory of the first run with these inputs.

    The peak is None on another provider than the CPU, and where the system does not tell.
    """

    outputs: dict[str, NDArray[Any]]
    seconds: float
    peak_bytes: int | None


def start_session(
    source: bytes | str, provider: str, fallback: str, profile: Path | None = None, *, spins: bool = False
) -> Any:
    """Start a session of a model, which is bytes or in a file, on `provider`."""
    if provider == WASM:
        return browsers.WasmSession(source, profile)
    import onnxruntime

    if provider == CUDA and hasattr(onnxruntime, "preload_dlls"):
        with redirect_stdout(StringIO()):  # it prints what it does not find
            onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    # Threads that spin while they wait take the processor from what is computed between short runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    if spins:  # within a run, and not after it
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if provider == WEBGPU:  # the CPU computes nodes without a kernel there
        options.add_provider_for_devices([browsers.webgpu_device()], {})
        return onnxruntime.InferenceSession(source, options)
    wanted = [
        (name, PROVIDER_OPTIONS[name]) if name in PROVIDER_OPTIONS else name
        for name in dict.fromkeys([provider, fallback])  # no provider twice, of which onnxruntime warns
    ]
    return onnxruntime.InferenceSession(source, options, providers=wanted)


def started(offered: Sequence[str], probe: bytes) -> list[str]:
    """Return the providers that start here: the CPU, and others on which a session of the model `probe` starts.

    The wheel for GPUs offers CUDA on every machine.
    """
    others = (CUDA, WASM, WEBGPU)
    return [name for name in offered if name == CPU or (name in others and _starts(name, probe))]


def about(wanted: Sequence[str], probe: bytes) -> dict[str, Any]:
    """Return the release of onnxruntime, what it offers, which of the providers `wanted` start, and why not."""
    import onnxruntime

    facts: dict[str, Any] = {"version": str(onnxruntime.__version__), "note": "", "why_not": ""}
    facts["offered"] = list(onnxruntime.get_available_providers())
    try:
        if WASM in wanted:
            facts["version"] = browsers.node().version
            facts["offered"] = [WASM]
        if WEBGPU in wanted:
            facts["note"] = browsers.webgpu_note()
            facts["offered"].append(WEBGPU)
    except Exception as error:  # onnxruntime's errors have no other base
        facts["why_not"] = (str(error) or type(error).__name__).splitlines()[0]
    facts["started"] = started([name for name in facts["offered"] if name in wanted], probe)
    return facts


def _starts(provider: str, probe: bytes) -> bool:
    """Return whether a session starts on a provider; what onnxruntime says if it does not is not written."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(SILENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return provider in start_session(probe, provider, CPU).get_providers()
    except Exception:  # onnxruntime's errors have no other base
        return False
    finally:
        onnxruntime.set_default_logger_severity(WARNING)


def math_mode(session: Any) -> str:
    """Return how float32 products are computed: "no TF32", or "TF32", which rounds their factors to 10 bits."""
    options = session.get_provider_options().get(CUDA)
    return "no TF32" if options is None or options.get("use_tf32") == "0" else "TF32"


def run(session: Any, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
    """Return the outputs of `session` by their names; `frees` the memory that it would keep."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    if frees:
        arenas = "cpu:0;gpu:0" if CUDA in session.get_providers() else "cpu:0"
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arenas)
    if any("bfloat16" in value.type for value in (*session.get_inputs(), *session.get_outputs())):
        return _run_bound(session, feeds, options)
    names = [output.name for output in session.get_outputs()]
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
    return {
        stated.name: _copied(value)
        for stated, value in zip(session.get_outputs(), binding.get_outputs(), strict=True)
    }


def _copied(value: Any) -> NDArray[Any]:
    """Return the array that a value of onnxruntime holds, as a copy."""
    if "bfloat16" not in value.data_type():
        return np.array(value.numpy())
    shape, dtype = value.shape(), np.dtype(ml_dtypes.bfloat16)
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _shared(array: NDArray[Any]) -> Any:
    """Return a value of onnxruntime in the memory of `array`."""
    from onnxruntime import OrtValue

    if array.dtype != ml_dtypes.bfloat16:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)


def timed(session: Any, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> TimedRun:
    """Run twice, unless a run is long: the first run shows the peak of memory, the second the time.

    A session keeps the memory of each length for the next run. `frees` gives it back, so that runs of many
    long lengths take no more memory than the longest; the next run takes longer.
    """
    measured = timed_twice(partial(run, session, feeds, frees=frees), partial(run, session, feeds))
    return measured if session.get_providers() == [CPU] else replace(measured, peak_bytes=None)


def timed_twice(
    first: Callable[[], dict[str, NDArray[Any]]], again: Callable[[], dict[str, NDArray[Any]]]
) -> TimedRun:
    """Return the outputs and the peak of memory of `first`, and the time of `again`, or of a long `first`."""
    start = time.perf_counter()
    outputs, peak = peak_above(first)
    seconds = time.perf_counter() - start
    if seconds < LONG_RUN:
        start = time.perf_counter()
        outputs = again()
        seconds = time.perf_counter() - start
    return TimedRun(outputs, seconds, peak)


def peak_above(run: Callable[[], T]) -> tuple[T, int | None]:
    """Return what `run` returns, and by how many bytes the process grew at most while it ran.

    The bytes are None if the system cannot tell; Linux can.
    """
    try:
        _RESET.write_text("5")  # resets the peak to the present size, see proc(5)
        start = kilobytes("VmRSS")
    except OSError:
        return run(), None
    result = run()
    return result, max(0, kilobytes("VmHWM") - start) * 1024


def kilobytes(name: str) -> int:
    """Return a number of the process' status, see proc(5)."""
    line = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"no {name} in {_STATUS}")
    return int(line[1])


def limit_memory(provider: str, most: int) -> None:
    """Limit the memory of a process beside this one that runs the models of a provider."""
    if provider == WASM:
        browsers.node().limit_memory(most)


def element_types(model: Any) -> dict[str, int]:
    """Return the dtype of each value of a graph, as far as onnx infers it, by its number in ONNX."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model)
    values = [*inferred.graph.input, *inferred.graph.value_info]
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _events(text: str) -> list[dict[str, Any]]:
    """Read a profile, also of onnxruntime before 1.31, which does not escape the names that it quotes."""
    try:
        events: list[dict[str, Any]] = json.loads(text)
    except json.JSONDecodeError:
        events = json.loads(_NAME_OF_EVENT.sub(lambda name: json.dumps(name[0][1:-1]), text))
    return events


def nodes_of_profile(profile: Path) -> list[tuple[str, str, str]]:
    """Return the name, the operator and the provider of each node that ran, once, in order."""
    ran: dict[tuple[str, str, str], None] = {}
    for event in _events(profile.read_text()):
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details and len(ran) < MOST_NODES:
            ran[event["name"].removesuffix("_kernel_time"), details["op_name"], details["provider"]] = None
    return list(ran)
