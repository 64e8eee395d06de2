"""onnxruntime-web, which browsers have: sessions on WebAssembly, in a process of Node.js (browsers.cjs).

It has no more imports than the process of a model needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import engine
from .frames import Frame, receive, send

WASM = "wasm"
"""onnxruntime-web's own name of the provider."""
SCRIPT = Path(__file__).with_suffix(".cjs")


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
            facts["why_not"] = engine.first_line(error)
        return facts

    def run(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> dict[str, NDArray[Any]]:
        """Return the outputs by their names. Node.js keeps the memory of a run."""
        del frees
        outputs = node().ask("run", feeds).arrays
        return {name: outputs[name] for name in self._outputs}

    def nodes(self) -> list[engine.Node]:
        """Return the nodes that ran."""
        profile = str(node().ask("profile").facts["profile"])
        # WebAssembly has the kernels of the CPU, and their provider is called so there.
        return [(name, op, WASM) for name, op, _ in engine.nodes_of_profile(profile)]
