"""A session of onnxruntime: on which provider, and where each node really ran."""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp.checks import message
from sdpa_xp_export._dtypes.conversion import RUNTIME_DTYPES
from sdpa_xp_export._files.model_files import write_model
from sdpa_xp_export._model.external_data import EXTERNAL_ABOVE, initializer_bytes
from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._runtime.releases import PROVIDERS
from sdpa_xp_export.report import Placement


def installed_runtime() -> Any:
    """onnxruntime, which is imported when a model is run."""
    try:
        import onnxruntime
    except ImportError as error:
        rule, hint = "onnxruntime must be installed", "`pip install 'sdpa_xp[export]'` brings it."
        text = message("verify", rule, {"its error": error}, hint)
        raise ModuleNotFoundError(text, name="onnxruntime") from error
    return onnxruntime


def open_session(model: Model, provider: str, profile: Path | None = None) -> Any:
    """An onnxruntime session of `model` on `provider`, which must really start there."""
    onnxruntime = installed_runtime()
    if provider == PROVIDERS["cuda"] and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    wanted = list(dict.fromkeys([provider, PROVIDERS["cpu"]]))
    with tempfile.TemporaryDirectory() as folder:  # bytes where they fit: a path could refer to more files
        if isinstance(model, onnx.ModelProto) and initializer_bytes(model) <= EXTERNAL_ABOVE:
            source: bytes | Path = model.SerializeToString()
        else:
            path = Path(folder) / "model.onnx"
            source = write_model(model, path, overwrite=False, external_above=EXTERNAL_ABOVE)
        with _errors_as_one("load"):
            session = onnxruntime.InferenceSession(source, options, providers=wanted)
    if provider not in session.get_providers():  # an absent provider is no more than a warning there
        rule = f"onnxruntime could not start {provider}"
        raise ValueError(message("verify", rule, {"providers": session.get_providers()}))
    return session


def run(session: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The outputs of `session` by their names."""
    names = [each.name for each in session.get_outputs()]
    with _errors_as_one("run"):
        if any("bfloat16" in each.type for each in (*session.get_inputs(), *session.get_outputs())):
            return _run_bound(session, feeds)
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _run_bound(session: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Likewise where some are bfloat16, which NumPy has not: inputs share their memory, outputs are copied."""
    binding = session.io_binding()
    shared = []  # the binding does not keep memory alive
    for each in session.get_inputs():
        shared.append(_shared(np.asarray(feeds[each.name], order="C")))
        binding.bind_ortvalue_input(each.name, shared[-1])
    for each in session.get_outputs():
        binding.bind_output(each.name, "cpu")
    session.run_with_iobinding(binding)
    values = zip(session.get_outputs(), binding.get_outputs(), strict=True)
    return {each.name: _copied(value, RUNTIME_DTYPES[each.type]) for each, value in values}


def _copied(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array that a value of onnxruntime holds, in memory of its own."""
    shape = value.shape()
    held = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(held, dtype).reshape(shape).copy()


def _shared(array: NDArray[Any]) -> Any:
    """A value of onnxruntime in the memory of `array`."""
    values = installed_runtime().OrtValue
    if array.dtype != ml_dtypes.bfloat16:
        return values.ortvalue_from_numpy(array)
    return values.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


@contextmanager
def _errors_as_one(what: str) -> Iterator[None]:
    """Errors of onnxruntime, which have no common base, as a ValueError of one line."""
    try:
        yield
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = message("verify", f"onnxruntime must {what} `model`", {"its error": reason})
        raise ValueError(text) from error


def version() -> str:
    """The release of onnxruntime that is installed."""
    return str(installed_runtime().__version__)


def placements(profile: Path, asked: str) -> list[Placement]:
    """Each node that ran, once, in order; from the profile that the runtime wrote."""
    events = json.loads(profile.read_text())
    seen: dict[Placement, None] = {}
    for event in events:
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details:
            name = event["name"].removesuffix("_kernel_time")
            seen[Placement(name, details["op_name"], details["provider"], asked)] = None
    return list(seen)


def providers(asked: str | None = None) -> list[str]:
    """The execution providers to run on: the one asked for, or CUDA where offered and the CPU."""
    offered = installed_runtime().get_available_providers()
    if asked is None:
        return [name for name in (PROVIDERS["cuda"], PROVIDERS["cpu"]) if name in offered]
    if asked not in PROVIDERS or PROVIDERS[asked] not in offered:
        rule = "`provider` must be one that onnxruntime offers here"
        raise ValueError(message("verify", rule, {"provider": repr(asked), "offered": offered}))
    return [PROVIDERS[asked]]
