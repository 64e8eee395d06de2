"""Sessions of onnxruntime in the process that has them. It has no more imports than that process needs."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import browsers
from .browsers import WEBGPU
from .engine import Node, first_line, nodes_of_profile

SILENT, WARNING = 4, 2
"""Two levels of onnxruntime's log; the second is the default. With the first, only what ends the process is
written to the terminal. Errors are raised, and the log would repeat them with the names of a file's nodes."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PROVIDER_OPTIONS = {CUDA: {"use_tf32": "0"}}
"""The options that a session needs for the numbers that are promised. By itself, onnxruntime rounds the factors
of float32 products on CUDA to TF32, which has 10 bits."""
BFLOAT16 = 16
"""The number of the dtype in ONNX."""


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
            options.add_provider_for_devices([browsers.webgpu_device()], {})
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
                facts["note"] = browsers.webgpu_note()
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
