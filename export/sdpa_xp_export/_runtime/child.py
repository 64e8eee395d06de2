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
import types
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

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
    from sdpa_xp_export._runtime import engine, frames, worker

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
    work = worker.Worker()
    while True:
        facts, arrays = waiting.get()
        try:
            said, results = getattr(work, facts.pop("do"))(arrays=arrays, **facts)
            frames.send(answers, said, results)
        except Exception as error:  # onnxruntime's errors have no other base
            reason = engine.first_line(error)
            if isinstance(error, ImportError | MemoryError) and str(error):
                reason = f"{type(error).__name__}: {reason}"
            over = any(word in f"{type(error).__name__} {error}" for word in MEMORY_WORDS)
            number = error.errno if isinstance(error, OSError) else None
            frames.send(answers, {"error": reason[:LONGEST_REASON], "over_memory": over, "errno": number})


if __name__ == "__main__":
    main()
