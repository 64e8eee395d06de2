"""What computes as a browser does: onnxruntime-web on WebAssembly, and onnxruntime's plugin for WebGPU.

WebAssembly runs in a process of Node.js, as browsers.cjs. The plugin runs in this one.

It has no more imports than the process of a model needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .frames import Frame, receive, send

WASM = "wasm"
"""onnxruntime-web's own name of the provider."""
WEBGPU = "WebGpuExecutionProvider"
SCRIPT = Path(__file__).with_suffix(".cjs")
_AS_ON_CPU, _AS_WASM = '"provider" : "CPUExecutionProvider"', f'"provider" : "{WASM}"'


class Stated(NamedTuple):
    """An input or an output of a session."""

    name: str
    type: str = ""


class Node:
    """A process of Node.js with onnxruntime-web.

    Raises:
        OSError: There is no `node` on the path.
        ValueError: Node.js finds no onnxruntime-web.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.version = str(self.ask("start").facts["version"])

    def ask(self, what: str, arrays: Mapping[str, Any] | None = None, **facts: object) -> Frame:
        """Return an answer; a ValueError if onnxruntime-web has none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, {"do": what, **facts}, arrays)
            answer = receive(self._process.stdout)
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise ValueError(f"Node.js ended with the code {code}") from error
        if "error" in answer.facts:
            raise ValueError(answer.facts["error"].partition("\n")[0])
        return answer

    def limit_memory(self, most: int) -> None:
        """Let Linux refuse memory beyond what the process has now and that."""
        if sys.platform != "linux":
            return  # WebAssembly has at most 4 GiB
        import resource

        status = Path(f"/proc/{self._process.pid}/status").read_text()
        kilobytes = int(status.partition("VmData:")[2].split()[0])
        limit = kilobytes * 1024 + most
        with suppress(OSError, ValueError):
            resource.prlimit(self._process.pid, resource.RLIMIT_DATA, (limit, limit))


@cache
def node() -> Node:
    """Return the process of all sessions, which starts with the first call."""
    return Node()


class WasmSession:
    """A session in Node.js, with the methods of `onnxruntime.InferenceSession` that engine.py calls."""

    def __init__(self, source: bytes | str, profile: Path | None = None) -> None:
        self._profile = profile
        arrays = {"model": np.frombuffer(source, np.uint8)} if isinstance(source, bytes) else {}
        file = source if isinstance(source, str) else None
        self._stated = node().ask("load", arrays, file=file, profile=profile is not None).facts

    def get_inputs(self) -> list[Stated]:
        return [Stated(name) for name in self._stated["inputs"]]

    def get_outputs(self) -> list[Stated]:
        return [Stated(name) for name in self._stated["outputs"]]

    def get_providers(self) -> list[str]:
        return [WASM]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {}

    def run(
        self, names: Sequence[str], feeds: Mapping[str, NDArray[Any]], _options: Any = None
    ) -> list[NDArray[Any]]:
        outputs = node().ask("run", feeds).arrays
        return [outputs[name] for name in names]

    def end_profiling(self) -> str:
        """Write where the nodes ran, and return the path of this file."""
        assert self._profile is not None
        # WebAssembly has the kernels of the CPU, and their provider is called so there.
        text = str(node().ask("profile").facts["profile"]).replace(_AS_ON_CPU, _AS_WASM)
        self._profile.write_text(text)
        return str(self._profile)


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
