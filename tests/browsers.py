"""What runs graphs as a browser does, without one, where it is installed.

`make test` installs onnxruntime's plugin for WebGPU, and onnxruntime-web where there is npm. Chromium of Debian
has SwiftShader, which computes WebGPU on the CPU, and the library that loads it.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MODULES = Path(sys.prefix) / "site" / "node_modules"
PLUGIN = Path(sys.prefix) / "webgpu"
CHROMIUM = Path("/usr/lib/chromium")
DRIVER = CHROMIUM / "vk_swiftshader_icd.json"


def use_wasm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Node.js find onnxruntime-web; skip the test if it is not installed."""
    if shutil.which("node") is None or not (MODULES / "onnxruntime-web").is_dir():
        pytest.skip("needs Node.js, and onnxruntime-web, which make installs where there is npm")
    monkeypatch.setenv("NODE_PATH", str(MODULES))


def use_webgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugin find SwiftShader; skip the test if one of them is not installed."""
    if PLUGIN.is_dir():
        monkeypatch.syspath_prepend(str(PLUGIN))
    if find_spec("onnxruntime_ep_webgpu") is None or not DRIVER.is_file():
        pytest.skip("needs onnxruntime-ep-webgpu, which make installs, and Debian's chromium")
    for name, value in adapter().items():
        monkeypatch.setenv(name, value)


def adapter() -> dict[str, str]:
    """The environment of a process in which WebGPU computes on the CPU."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders += [] if str(CHROMIUM) in folders else [str(CHROMIUM)]
    return {
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "VK_ICD_FILENAMES": str(DRIVER),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
    }
