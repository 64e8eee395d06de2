"""The process that loads and runs a model for another one: a file that anyone wrote may hang, or crash.

It reads requests from its standard input, and answers each on its standard output. It ends when its input ends,
so it does not outlive the process that started it, whatever a model does meanwhile.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

OVER_MEMORY = 77
"""The exit code of a process that took more memory than it may."""
MEMORY_WORDS = (
    "bad_alloc",
    "bad allocation",
    "Failed to allocate",
    "MemoryError",
    "out of memory",
    "Unable to allocate",
    "Cannot allocate",
    "Resource temporarily unavailable",
)
"""What errors of onnxruntime and NumPy say if the system refuses memory."""
LONGEST_REASON = 1000
"""Characters of an error's first line; a file may choose some of them."""


def main() -> None:
    """Answer requests until there are no more."""
    answers, requests = _own_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process gets the same Ctrl-C, and ends this one
    _end_without_a_trace()
    # Before all else is imported, from where the other process would.
    sys.path[:] = json.loads(requests.readline())
    # The package itself would import onnx, which takes longer than all else here.
    package = types.ModuleType("sdpa_xp_export")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["sdpa_xp_export"] = package
    serve(requests, answers)


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return where answers go, and where requests come from; what a kernel prints goes to neither."""
    answers = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return answers, requests


def _end_without_a_trace() -> None:
    """Write no core if a kernel crashes. On Linux, end with the process that started this one.

    If memory is short, Linux then also ends this process before others.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has none

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, see prctl(2)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Read the requests in a thread: the input ends even while a run does not."""
    from sdpa_xp_export._runtime import engine, frames, readers

    waiting: queue.SimpleQueue[frames.Frame] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                waiting.put(frames.receive(requests))
        except EOFError:
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    worker = _Worker(engine, readers)
    while True:
        facts, arrays = waiting.get()
        try:
            said, results = getattr(worker, facts.pop("do"))(arrays=arrays, **facts)
            frames.send(answers, said, results)
        except Exception as error:  # onnxruntime's errors have no other base
            text = str(error).splitlines()[0] if str(error) else ""
            if isinstance(error, ImportError | MemoryError):
                text = f"{type(error).__name__}: {text}" if text else type(error).__name__
            reason = (text or type(error).__name__)[:LONGEST_REASON]
            over = any(word in f"{type(error).__name__} {error}" for word in MEMORY_WORDS)
            number = error.errno if isinstance(error, OSError) else None
            frames.send(answers, {"error": reason, "over_memory": over, "errno": number})


class _Worker:
    """What the other process can ask for. Each request returns facts and arrays."""

    def __init__(self, engine: Any, readers: Any) -> None:
        self.engine, self.readers = engine, readers.READERS
        self.reader: Any = None
        """The class of the sessions, if they are not of onnxruntime."""
        self.session: Any = None
        self.limited = False

    def start(self, engine: str, wanted: list[str], arrays: Any) -> tuple[dict[str, Any], Any]:
        """Import the engine; say its release, which providers it offers, and which that are wanted start."""
        self.reader = self.readers.get(engine)
        if self.reader is not None:
            offered = [self.reader.label]
            return {"version": self.reader.version(), "offered": offered, "started": offered}, None
        return self.engine.about(wanted, arrays["probe"].tobytes()), None

    def load(
        self,
        provider: str,
        fallback: str,
        memory: int,
        hard: bool,
        file: str | None,
        profile: str | None,
        outputs: list[str],
        arrays: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Start a session of the model in a file, or of the bytes in `arrays`."""
        self._limit(memory, hard)
        self.engine.limit_memory(provider, memory)
        self.session = None
        source = arrays["model"].tobytes() if file is None else file
        if self.reader is not None:
            self.session = self.reader(source, outputs)
            return {"providers": [self.reader.label], "math_mode": self.session.math_mode}, None
        started = self.engine.start_session(source, provider, fallback, Path(profile) if profile else None)
        self.session = started
        return {"providers": started.get_providers(), "math_mode": self.engine.math_mode(started)}, None

    def element_types(self, memory: int, hard: bool, arrays: Any) -> tuple[dict[str, Any], Any]:
        """Infer the dtypes of a model's values."""
        import onnx

        self._limit(memory, hard)
        model = onnx.load_model_from_string(arrays["model"].tobytes())
        return {"types": self.engine.element_types(model)}, None

    def run(self, frees: bool, arrays: Any) -> tuple[dict[str, Any], Any]:
        """Run the model."""
        if self.reader is not None:
            timed = self.engine.timed_twice(*[lambda: self.session.run(arrays)] * 2)
        else:
            timed = self.engine.timed(self.session, arrays, frees=frees)
        return {"seconds": timed.seconds, "peak_bytes": timed.peak_bytes}, timed.outputs

    def placements(self, **_: Any) -> tuple[dict[str, Any], Any]:
        """End the session; return where its nodes ran."""
        if self.reader is not None:
            nodes, self.session = self.session.nodes(), None
            return {"nodes": nodes[: self.engine.MOST_NODES]}, None
        profile = Path(self.session.end_profiling())
        self.session = None
        try:
            return {"nodes": self.engine.nodes_of_profile(profile)}, None
        except (OSError, ValueError):
            # onnxruntime does not say that it wrote a part, or nothing: one more write gets the system's error.
            profile.write_bytes(bytes(2**16))
            raise

    def _limit(self, memory: int, hard: bool) -> None:
        """Limit the memory from now on; `hard` if the system may do it, which also counts what a GPU maps."""
        if not self.limited and not (hard and _limit_memory(memory)):
            threading.Thread(target=_watch_memory, args=(memory,), daemon=True).start()
        self.limited = True


def _limit_memory(most: int) -> bool:
    """Let Linux refuse memory beyond what this process has and that. Return whether it will."""
    if sys.platform != "linux":
        return False
    import resource

    from sdpa_xp_export._runtime.engine import kilobytes

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most += kilobytes("VmData") * 1024
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:  # not RLIMIT_AS: a thread reserves addresses that it never uses
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    except (OSError, ValueError):
        return False
    return True


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
        from sdpa_xp_export._runtime.engine import kilobytes

        return kilobytes("VmHWM") * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
