"""onnxruntime's plugin for WebGPU, in the process that runs a model.

It has no more imports than that process needs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

WEBGPU = "WebGpuExecutionProvider"


@cache
def device() -> Any:
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


def note() -> str:
    """Return which plugin computes, if it does so on the CPU; empty on a GPU."""
    if "CPU" not in str(device().device.type):
        return ""
    version = device().ep_metadata["version"]
    return f"onnxruntime-ep-webgpu {version} computed WebGPU on a software adapter, not on a GPU"
