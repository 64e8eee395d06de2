"""A session of a model, which each engine has, and that of onnxruntime: its runs, their time and their memory.

It has no more imports than the process of a model needs.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LONG_RUN = 0.05
"""Seconds; in a run of this length, the additional time of a first run is small."""
MOST_NODES = 100_000
"""The nodes that are read from a profile; a loop may run as many as it likes."""
_RESET = Path("/proc/self/clear_refs")
_NAME_OF_EVENT = re.compile(r'(?<="name" :)".*?"(?=,"args" : \{)', re.DOTALL)

SILENT, WARNING = 4, 2
"""Two levels of onnxruntime's log; the second is the default. With the first, only what ends the process is
written to the terminal. Errors are raised, and the log would repeat them with the names of a file's nodes."""
CPU, CUDA, WEBGPU = "CPUExecutionProvider", "CUDAExecutionProvider", "WebGpuExecutionProvider"
PROVIDER_OPTIONS = {CUDA: {"use_tf32": "0"}}
"""The options that a session needs for the numbers that are promised. By itself, onnxruntime rounds the factors
of float32 products on CUDA to TF32, which has 10 bits."""
BFLOAT16 = 16
"""The number of the dtype in ONNX."""

Node = tuple[str, str, str]
"""The name and the operator of a node that ran, and the provider that it ran on."""
T = TypeVar("T")


class Session(Protocol):
    """A model that an engine has loaded."""

    @property
    def providers(self) -> Sequence[str]:
        """What the session runs on; another program than onnxruntime has its own name here."""

    @property
    def math_mode(self) -> str:
        """How products of float32 are computed."""

    @property
    def takes_memory_here(self) -> bool:
        """Whether all memory of a run is that of this process."""

    def __init__(
        self, source: bytes | str, outputs: Sequence[str], provider: str = "", profile: Path | None = None
    ) -> None:
        """Load a model, which is bytes or in a file, with outputs of these names; the profile is a new file."""

    @classmethod
    def about(cls, wanted: Sequence[str], probe: bytes) -> dict[str, Any]:
        """Import the engine; return its version, and which providers are `offered` and `started`.

        Of the providers `wanted`, those are started on which a session of the model `probe` runs.
        """

    def run(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
        """Return the outputs by their names; `frees` the memory that the session would keep."""

    def nodes(self) -> list[Node]:
        """End the session; return the nodes that ran."""


class OnnxruntimeSession:
    """A model that onnxruntime has loaded in this process; `inner` is its own session."""

    def __init__(
        self,
        source: bytes | str,
        _outputs: Sequence[str] = (),
        provider: str = CPU,
        profile: Path | None = None,
        *,
        spins: bool = False,
    ) -> None:
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
            options.add_provider_for_devices([webgpu_device()], {})
            self.inner = onnxruntime.InferenceSession(source, options)
        else:
            wanted = [
                (name, PROVIDER_OPTIONS[name]) if name in PROVIDER_OPTIONS else name
                for name in dict.fromkeys([provider, CPU])  # no provider twice, of which onnxruntime warns
            ]
            self.inner = onnxruntime.InferenceSession(source, options, providers=wanted)

    @property
    def providers(self) -> list[str]:
        return [*self.inner.get_providers()]

    @property
    def math_mode(self) -> str:
        """How products of float32 are computed; "TF32" rounds their factors to 10 bits."""
        on_cuda = self.inner.get_provider_options().get(CUDA)
        return "no TF32" if on_cuda is None or on_cuda.get("use_tf32") == "0" else "TF32"

    @property
    def takes_memory_here(self) -> bool:
        return self.providers == [CPU]

    @cached_property
    def has_bfloat16(self) -> bool:
        """Whether an input or an output has a dtype that NumPy lacks."""
        return any("bfloat16" in value.type for value in (*self.inner.get_inputs(), *self.inner.get_outputs()))

    @staticmethod
    def about(wanted: Sequence[str], probe: bytes) -> dict[str, Any]:
        """Return the release of onnxruntime, what it offers, which of the `wanted` start, and why not.

        The wheel for GPUs offers CUDA on every machine.
        """
        import onnxruntime

        facts: dict[str, Any] = {"version": str(onnxruntime.__version__), "note": "", "why_not": ""}
        facts["offered"] = list(onnxruntime.get_available_providers())
        try:
            if WEBGPU in wanted:
                facts["note"] = webgpu_note()
                facts["offered"].append(WEBGPU)
        except Exception as error:  # onnxruntime's errors have no other base
            facts["why_not"] = first_line(error)
        offered = [name for name in facts["offered"] if name in wanted]
        facts["started"] = [
            name for name in offered if name == CPU or (name in (CUDA, WEBGPU) and _starts(name, probe))
        ]
        return facts

    def run(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
        """Return the outputs by their names; `frees` the memory that the session would keep."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        if frees:
            arenas = "cpu:0;gpu:0" if CUDA in self.providers else "cpu:0"
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arenas)
        names = [output.name for output in self.inner.get_outputs()]
        if not self.has_bfloat16:
            return dict(zip(names, self.inner.run(names, dict(feeds), options), strict=True))
        # Arrays are bound by their memory, since NumPy has no bfloat16; outputs are copied.
        binding = self.inner.io_binding()
        shared = []  # the binding does not keep memory alive
        for stated in self.inner.get_inputs():
            shared.append(_shared(np.asarray(feeds[stated.name], order="C")))
            binding.bind_ortvalue_input(stated.name, shared[-1])
        for name in names:
            binding.bind_output(name, "cpu")
        self.inner.run_with_iobinding(binding, options)
        return dict(zip(names, map(_copied, binding.get_outputs()), strict=True))

    def nodes(self) -> list[Node]:
        """End the session; return the nodes that ran."""
        profile = Path(self.inner.end_profiling())
        try:
            return nodes_of_profile(profile.read_text())
        except (OSError, ValueError):
            # onnxruntime does not say that it wrote a part, or nothing: one more write gets the system's error.
            profile.write_bytes(bytes(2**16))
            raise


def _starts(provider: str, probe: bytes) -> bool:
    """Return whether a session starts on a provider; what onnxruntime says if it does not is not written."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(SILENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return provider in OnnxruntimeSession(probe, provider=provider).providers
    except Exception:  # onnxruntime's errors have no other base
        return False
    finally:
        onnxruntime.set_default_logger_severity(WARNING)


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


@cache
def webgpu_device() -> Any:
    """Register the plugin, and return what it computes on.

    Raises:
        ImportError: The plugin is not installed, or this onnxruntime takes none.
        ValueError: It finds no adapter. It has others if its library does not load.
    """
    import onnxruntime
    import onnxruntime_ep_webgpu

    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise ImportError(f"onnxruntime {onnxruntime.__version__} takes no plugins")
    onnxruntime.register_execution_provider_library(WEBGPU, onnxruntime_ep_webgpu.get_library_path())
    devices = [entry for entry in onnxruntime.get_ep_devices() if entry.ep_name == WEBGPU]
    if not devices:
        raise ValueError("the plugin finds no GPU")
    return devices[0]


def webgpu_note() -> str:
    """Return which plugin computes, if it does so on the CPU; empty on a GPU."""
    if "CPU" not in str(webgpu_device().device.type):
        return ""
    version = webgpu_device().ep_metadata["version"]
    return f"onnxruntime-ep-webgpu {version} computed WebGPU on a software adapter, not on a GPU"


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The outputs of a run, the time it took, and the peak of memory of the first run with these inputs.

    The peak is None if another process or a device takes memory too, and where the system does not tell.
    """

    outputs: dict[str, NDArray[Any]]
    seconds: float
    peak_bytes: int | None


def timed(session: Session, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> TimedRun:
    """Run twice, unless a run is long: the first run shows the peak of memory, the second the time.

    A session keeps the memory of each length for the next run. `frees` gives it back, so that runs of many
    long lengths take no more memory than the longest; the next run takes longer.
    """
    start = time.perf_counter()
    outputs, peak = peak_above(lambda: session.run(feeds, frees=frees))
    seconds = time.perf_counter() - start
    if seconds < LONG_RUN:
        start = time.perf_counter()
        outputs = session.run(feeds)
        seconds = time.perf_counter() - start
    return TimedRun(outputs, seconds, peak if session.takes_memory_here else None)


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


def kilobytes(name: str, process: int = 0) -> int:
    """Return a number of the status of a process, see proc(5); 0 is this process."""
    status = Path(f"/proc/{process or 'self'}/status")
    line = re.search(rf"^{name}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"no {name} in {status}")
    return int(line[1])


def limit_memory(most: int, process: int = 0) -> bool:
    """Let Linux refuse memory beyond what a process has and that. Return whether it will; 0 is this process."""
    if sys.platform != "linux":
        return False
    import resource

    try:  # not RLIMIT_AS: a thread reserves addresses that it never uses
        _, hard = resource.prlimit(process, resource.RLIMIT_DATA)
        most += kilobytes("VmData", process) * 1024
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.prlimit(process, resource.RLIMIT_DATA, (most, most))
    except (OSError, ValueError):
        return False
    return True


def first_line(error: Exception) -> str:
    """Return what an error says in its first line; the name of its class if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def element_types(model: Any) -> dict[str, int]:
    """Return the dtype of each value of a graph, as far as onnx infers it, by its number in ONNX."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model)
    values = [*inferred.graph.input, *inferred.graph.value_info]
    return {value.name: value.type.tensor_type.elem_type for value in values}


def nodes_of_profile(text: str) -> list[Node]:
    """Return each node that ran by a profile of onnxruntime, once, in order."""
    try:
        events: list[dict[str, Any]] = json.loads(text)
    except json.JSONDecodeError:  # onnxruntime before 1.31 does not escape the names that it quotes
        events = json.loads(_NAME_OF_EVENT.sub(lambda name: json.dumps(name[0][1:-1]), text))
    ran: dict[Node, None] = {}
    for event in events:
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details and len(ran) < MOST_NODES:
            ran[event["name"].removesuffix("_kernel_time"), details["op_name"], details["provider"]] = None
    return list(ran)
