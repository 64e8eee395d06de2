"""A session of onnxruntime: on which provider, and where each node really ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from sdpa_xp.checks import message
from sdpa_xp_export.runtime import PROVIDERS


@dataclass(frozen=True, slots=True)
class Placement:
    """A node that ran, after the runtime's own optimisation, and the provider that it ran on."""

    node: str
    op: str
    provider: str
    asked: str
    """The provider that the session was to run on; a node of another has fallen back."""

    @property
    def fell_back(self) -> bool:
        return self.provider != self.asked


def open_session(model: onnx.ModelProto, provider: str, profile: Path | None = None) -> Any:
    """An onnxruntime session of `model` on `provider`, which must really start there."""
    import onnxruntime

    if provider == PROVIDERS["cuda"] and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    wanted = list(dict.fromkeys([provider, PROVIDERS["cpu"]]))
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=wanted)
    except Exception as error:  # its errors have no common base
        raise ValueError(_refused("load", error)) from error
    if provider not in session.get_providers():  # an absent provider is no more than a warning there
        rule = f"onnxruntime could not start {provider}"
        raise ValueError(message("verify", rule, {"providers": session.get_providers()}))
    return session


def run(session: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The outputs of `session` by their names."""
    names = [each.name for each in session.get_outputs()]
    try:
        outputs = session.run(names, dict(feeds))
    except Exception as error:  # its errors have no common base
        raise ValueError(_refused("run", error)) from error
    return dict(zip(names, outputs, strict=True))


def _refused(what: str, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return message("verify", f"onnxruntime must {what} `model`", {"its error": reason})


def version() -> str:
    """The release of onnxruntime that is installed."""
    import onnxruntime

    return str(onnxruntime.__version__)


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
    import onnxruntime

    offered = onnxruntime.get_available_providers()
    if asked is None:
        return [name for name in (PROVIDERS["cuda"], PROVIDERS["cpu"]) if name in offered]
    if asked not in PROVIDERS or PROVIDERS[asked] not in offered:
        rule = "`provider` must be one that onnxruntime offers here"
        raise ValueError(message("verify", rule, {"provider": repr(asked), "offered": offered}))
    return [PROVIDERS[asked]]
