"""What the process of a model does for another one: load the model, run it, and say where its nodes ran.

Beside onnxruntime there are sessions of OpenVINO, of ONNX's own evaluator, and of onnxruntime-web, which
browsers have: it computes on WebAssembly, in a process of Node.js (browsers.cjs). It has no more imports than
the process needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .engine import (
    MOST_NODES,
    Node,
    OnnxruntimeSession,
    Session,
    element_types,
    first_line,
    kilobytes,
    limit_memory,
    nodes_of_profile,
    timed,
)
from .frames import Frame, receive, send

WASM = "wasm"
"""onnxruntime-web's own name of the provider."""
SCRIPT = Path(__file__).with_name("browsers.cjs")


class Reader:
    """What sessions of both programs have, which compute on the CPU, in this process."""

    label: ClassVar[str]
    """What stands where onnxruntime has a provider."""
    version: ClassVar[Callable[[], str]]
    """Imports the program; returns its release."""
    takes_memory_here = True

    @classmethod
    def about(cls, _wanted: Sequence[str], _probe: bytes) -> dict[str, Any]:
        """Import the program; return its release, and what it offers."""
        return {"version": cls.version(), "offered": [cls.label], "started": [cls.label]}

    @property
    def providers(self) -> list[str]:
        return [self.label]


class OpenVinoReader(Reader):
    """A model that OpenVINO has compiled for the CPU."""

    label = "OpenVINO"

    def __init__(self, source: bytes | str, outputs: Sequence[str], *_: object) -> None:
        import openvino

        core = openvino.Core()
        default = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        # By default, float32 is computed in bfloat16 on a CPU that has it (7e-4 off), or in float16.
        try:
            model = core.read_model(source)
            self._compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except RuntimeError as error:
            raise ValueError(_reason(str(error))) from error
        self._request = self._compiled.create_infer_request()
        self._outputs = outputs
        self.math_mode = f"float32 (OpenVINO: INFERENCE_PRECISION_HINT=f32, its default here is {default})"

    @staticmethod
    def version() -> str:
        import openvino

        return str(openvino.__version__).partition("-")[0]  # behind it stands the commit

    def run(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
        del frees  # it keeps the memory of a run
        self._request.infer({name: _as_tensor(np.asarray(array, order="C")) for name, array in feeds.items()})
        return {name: _as_array(self._request.get_tensor(name)) for name in self._outputs}

    def nodes(self) -> list[Node]:
        # The graph after the optimisation; of a Loop, it has no body.
        operators = self._compiled.get_runtime_model().get_ordered_ops()
        return [
            (op.get_friendly_name(), op.get_rt_info()["layerType"].astype(str), self.label) for op in operators
        ]


def _reason(text: str) -> str:
    """Return the line of an error that says what is wrong; before it stand places in the source of OpenVINO."""
    lines = [line.removeprefix("-- ") for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception from", "Check '"))] or lines
    summary = said.index("Summary:") + 1 if "Summary:" in said[:-1] else 0
    return said[summary] if said else "RuntimeError"


def _as_tensor(array: NDArray[Any]) -> Any:
    """Return an array as OpenVINO takes it, which does not know the dtype bfloat16 of ml_dtypes."""
    import openvino

    if array.dtype != ml_dtypes.bfloat16:
        return array
    return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)


def _as_array(tensor: Any) -> NDArray[Any]:
    """Return a copy of a tensor, whose memory the next run writes to. bfloat16 looks like float16 in NumPy."""
    import openvino

    array = np.array(tensor.data)
    return array.view(ml_dtypes.bfloat16) if tensor.element_type == openvino.Type.bf16 else array


class ReferenceReader(Reader):
    """A model in ONNX's ReferenceEvaluator, which computes each operator in NumPy as the standard says."""

    label = "reference"

    def __init__(self, source: bytes | str, outputs: Sequence[str], *_: object) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        model = onnx.load_model_from_string(source) if isinstance(source, bytes) else onnx.load(source)
        self._nodes = [(node.name, node.op_type, self.label) for node in model.graph.node]
        self._evaluator = ReferenceEvaluator(model)
        self._outputs = list(outputs)
        self.math_mode = "NumPy's"

    @staticmethod
    def version() -> str:
        import onnx

        return str(onnx.__version__)

    def run(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
        del frees  # NumPy keeps no memory
        with np.errstate(all="ignore"):  # it warns of each row without a key
            results = self._evaluator.run(self._outputs, dict(feeds))
        return dict(zip(self._outputs, map(np.asarray, results), strict=True))

    def nodes(self) -> list[Node]:
        return self._nodes


READERS: dict[str, type[OpenVinoReader | ReferenceReader]] = {
    "openvino": OpenVinoReader,
    "reference": ReferenceReader,
}


class NodeProcess:
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
        """Let Linux refuse memory beyond what the process has now and that; WebAssembly has at most 4 GiB."""
        limit_memory(most, self._process.pid)


@cache
def node() -> NodeProcess:
    """Return the process of all sessions, which starts with the first call."""
    return NodeProcess()


class WasmSession:
    """A model in Node.js."""

    providers, math_mode, takes_memory_here = (WASM,), "no TF32", False

    def __init__(
        self, source: bytes | str, outputs: Sequence[str], _provider: str = WASM, profile: Path | None = None
    ) -> None:
        arrays = {"model": np.frombuffer(source, np.uint8)} if isinstance(source, bytes) else {}
        file = source if isinstance(source, str) else None
        node().ask("load", arrays, file=file, profile=profile is not None)
        self._outputs = outputs

    @classmethod
    def about(cls, _wanted: Sequence[str], probe: bytes) -> dict[str, Any]:
        """Return the release of onnxruntime-web, and whether a session starts, or why not."""
        facts: dict[str, Any] = {"version": "", "offered": [], "started": [], "note": "", "why_not": ""}
        try:
            facts |= {"version": node().version, "offered": [WASM]}
            cls(probe, ["y"])
            facts["started"] = [WASM]
        except (OSError, ValueError) as error:
            facts["why_not"] = first_line(error)
        return facts

    def run(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
        """Return the outputs by their names. Node.js keeps the memory of a run."""
        del frees
        outputs = node().ask("run", feeds).arrays
        return {name: outputs[name] for name in self._outputs}

    def nodes(self) -> list[Node]:
        """Return the nodes that ran."""
        profile = str(node().ask("profile").facts["profile"])
        # WebAssembly has the kernels of the CPU, and their provider is called so there.
        return [(name, op, WASM) for name, op, _ in nodes_of_profile(profile)]


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
