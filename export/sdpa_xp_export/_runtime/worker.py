"""What the process of a model does for another one: load the model, run it, and say where its nodes ran."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .engine import MOST_NODES, OnnxruntimeSession, Session, element_types, kilobytes, limit_memory, timed
from .readers import READERS, WASM, WasmSession, node

OVER_MEMORY = 77
"""The exit code of a process that took more memory than it may."""
SESSIONS: dict[str, type[Session]] = {"onnxruntime": OnnxruntimeSession, WASM: WasmSession, **READERS}
"""The sessions of each engine; onnxruntime has others on WebAssembly."""


class Worker:
    """What the other process can ask for. Each request returns facts and arrays."""

    def __init__(self) -> None:
        self.engine = "onnxruntime"
        self.session: Session | None = None
        self.limited = False

    def start(self, engine: str, wanted: list[str], arrays: Any) -> tuple[dict[str, Any], Any]:
        """Import the engine; say its release, which providers it offers, and which that are wanted start."""
        self.engine = engine
        return SESSIONS[WASM if WASM in wanted else engine].about(wanted, arrays["probe"].tobytes()), None

    def load(
        self,
        provider: str,
        memory: int,
        hard: bool,
        file: str | None,
        profile: str,
        outputs: list[str],
        arrays: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Start a session of the model in a file, or of the bytes in `arrays`."""
        self._limit(memory, hard)
        if provider == WASM:
            node().limit_memory(memory)
        self.session = None
        source = arrays["model"].tobytes() if file is None else file
        load = SESSIONS[WASM if provider == WASM else self.engine]
        self.session = loaded = load(source, outputs, provider, Path(profile))
        return {"providers": [*loaded.providers], "math_mode": loaded.math_mode}, None

    def element_types(self, memory: int, hard: bool, arrays: Any) -> tuple[dict[str, Any], Any]:
        """Infer the dtypes of a model's values."""
        import onnx

        self._limit(memory, hard)
        return {"types": element_types(onnx.load_model_from_string(arrays["model"].tobytes()))}, None

    def run(self, frees: bool, arrays: Any) -> tuple[dict[str, Any], Any]:
        """Run the model."""
        assert self.session is not None
        done = timed(self.session, arrays, frees=frees)
        return {"seconds": done.seconds, "peak_bytes": done.peak_bytes}, done.outputs

    def placements(self, **_: Any) -> tuple[dict[str, Any], Any]:
        """End the session; return where its nodes ran."""
        assert self.session is not None
        session, self.session = self.session, None
        return {"nodes": session.nodes()[:MOST_NODES]}, None

    def _limit(self, memory: int, hard: bool) -> None:
        """Limit the memory from now on; `hard` if the system may do it, which also counts what a GPU maps."""
        if not self.limited and not (hard and limit_memory(memory)):
            threading.Thread(target=_watch_memory, args=(memory,), daemon=True).start()
        self.limited = True


def _watch_memory(most: int) -> None:
    """End the process when it has taken more memory than that, where the system sets no limit."""
    most += _peak_bytes()
    while _peak_bytes() <= most:
        time.sleep(0.02)
    os._exit(OVER_MEMORY)


def _peak_bytes() -> int:
    """Return the most memory that this process has had; 0 if the system does not tell."""
    if sys.platform == "win32":
        import ctypes
        from ctypes import wintypes

        class Counters(ctypes.Structure):
            _fields_ = (
                ("cb", wintypes.DWORD),
                ("PageFaultCount", wintypes.DWORD),
                ("PeakWorkingSetSize", ctypes.c_size_t),
                ("rest", ctypes.c_size_t * 7),
            )

        counters = Counters()
        counters.cb = ctypes.sizeof(counters)
        process = ctypes.c_void_p(-1)  # the pseudo handle of this process
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.cb)
        return int(counters.PeakWorkingSetSize)
    if sys.platform == "linux":  # its getrusage(2) begins with the peak of the process that started this one
        return kilobytes("VmHWM") * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
