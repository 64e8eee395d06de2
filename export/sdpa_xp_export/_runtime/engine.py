"""What all engines have: a session of a model, and the time, the memory and the nodes of its runs.

It has no more imports than the process of a model needs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

LONG_RUN = 0.05
"""Seconds; in a run of this length, the additional time of a first run is small."""
MOST_NODES = 100_000
"""The nodes that are read from a profile; a loop may run as many as it likes."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_NAME_OF_EVENT = re.compile(r'(?<="name" :)".*?"(?=,"args" : \{)', re.DOTALL)

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


def kilobytes(name: str) -> int:
    """Return a number of the process' status, see proc(5)."""
    line = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"no {name} in {_STATUS}")
    return int(line[1])


def first_line(error: Exception) -> str:
    """Return what an error says in its first line; the name of its class if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def element_types(model: bytes) -> dict[str, int]:
    """Return the dtype of each value of a graph, as far as onnx infers it, by its number in ONNX."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
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
