"""A process of its own for a model, with a limit of time and of memory: see child.py for what runs there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp.errors import Message

from .._files.model import Model, initializer_bytes
from .._files.paths import temporary
from ..report import Placement
from . import child
from .engine import TimedRun
from .frames import Frame, TooLargeError, receive, send
from .limits import TIMEOUT, ModelFailedError, failed, shown_limit, time_left
from .releases import ENGINES, PLUGINS, PROVIDERS, EngineName, short_provider
from .session import check_installed, check_started, chosen_providers, not_installed, probe, source_of, wanted
from .worker import OVER_MEMORY

MEMORY = 2**33
"""Bytes. The largest run of `verify(thorough=True)` has a few arrays of 151 million scores."""
TIMES_MODEL = 4
"""Beyond `MEMORY`, a process may hold the model this many times: as it came, parsed, and packed for kernels."""
OUTPUTS = 4
"""The outputs of a run may take this part of the memory: the process that asked for them holds them, too."""
FOR_A_SCORE = 64
"""Bytes of a run for each score: a graph may hold eight arrays of them, in float64."""
START = 120.0
"""Seconds that the engine may take to be imported."""
POLL = 0.1
"""Seconds. A wait without an end cannot be interrupted on Windows."""


def default_memory(model: Model, scores: int) -> int:
    """Return more bytes than an honest model takes. Scores beyond `MEMORY` count up to that of the machine."""
    of_model = TIMES_MODEL * initializer_bytes(model)
    least, wanted = MEMORY + of_model, 2**30 + FOR_A_SCORE * scores + of_model
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows
        return max(least, wanted)
    return max(least, min(wanted, machine * 9 // 10))


class RuntimeProcess:
    """The process; it starts at once, and can be asked when the engine is there."""

    def __init__(self, timeout: float, memory: int, folder: Path, engine: EngineName = "onnxruntime") -> None:
        self._timeout, self._memory, self._folder = timeout, memory, folder
        self.engine: EngineName = engine
        self._shown = ENGINES[engine]
        self._left = timeout
        # A thread of its own reads the pipe, since a read cannot be given up when the time is over.
        self._talk = futures.ThreadPoolExecutor(1)
        with temporary():
            self._errors = (self._folder / "errors").open("w+b")
        # In this process, which is ours, onnxruntime sends no telemetry unless a user asks for it.
        self._process = subprocess.Popen(
            # -P and -s: Python itself puts no folder in front of `sys.path`, where a file could shadow a module
            # before the path of this process arrives.
            [sys.executable, "-P", "-s", child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"ORT_DISABLE_TELEMETRY": "1"} | dict(os.environ),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._requests.write(json.dumps(list(map(str, sys.path))).encode() + b"\n")
        self._requests.flush()
        self._hello: dict[str, Any] | None = None
        self._chosen: list[str] = []
        self.notes: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The release of the engine."""
        return str(self._about()["version"])

    def providers(self, requested: str | None) -> list[str]:
        """Return the providers to run on: the one asked for, or CUDA if it starts here and the CPU."""
        about = self._about(requested)
        if self.engine != "onnxruntime":
            self._chosen = about["offered"]
            return self._chosen
        self._chosen = chosen_providers(requested, about)
        if requested is not None:
            self.notes = (about["note"],) if about["note"] else ()
            return self._chosen
        self.notes = tuple(
            f"onnxruntime offers {name}, but could not start it, which needs a GPU and CUDA's libraries: "
            "the model ran on the CPU alone"
            for name in PROVIDERS.values()
            if name in about["offered"] and name not in about["started"]
        )
        return self._chosen

    def _about(self, requested: str | None = None) -> dict[str, Any]:
        if self._hello is None:
            try:
                arrays = {"probe": np.frombuffer(probe(), np.uint8)}
                answer = self._answer(
                    {"do": "start", "engine": self.engine, "wanted": wanted(requested)}, arrays, START
                )
            except (EOFError, TimeoutError, ValueError) as error:
                self._errors.seek(0)  # before it loads a model, Python writes an error there
                words = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                rule = f"Python must start another process, in which {self._shown} runs"
                raise RuntimeError(Message("verify", rule, {"it": self._end()}, words)) from error
            if reason := answer.facts.get("error"):
                raise not_installed(reason.partition(": ")[2] or reason, engine=self.engine)
            self._hello = answer.facts
            loaded = sys.modules.get("onnxruntime") if self.engine == "onnxruntime" else None
            if loaded and short_provider(requested) not in PLUGINS:  # where this process has it, it is the same
                offered = loaded.get_available_providers()
                self._hello |= {"version": loaded.__version__, "offered": offered}
        return self._hello

    def element_types(self, model: onnx.ModelProto) -> dict[str, int]:
        """Return the dtype of each value of a graph: see `engine.element_types`."""
        arrays = {"model": np.frombuffer(model.SerializeToString(), np.uint8)}
        types = self.ask("load", "element_types", self._limiting(), arrays).facts["types"]
        return {str(name): int(number) for name, number in types.items()}

    def _limiting(self) -> dict[str, object]:
        return {
            "memory": self._memory,
            "hard": self._chosen == [PROVIDERS["cpu"]] or self.engine != "onnxruntime",
        }

    @contextmanager
    def session(self, model: Model, provider: str) -> Iterator[RemoteSession]:
        """Load `model` on `provider`; when the block ends, the session knows where its nodes ran."""
        with temporary():
            source = source_of(model, Path(tempfile.mkdtemp(dir=self._folder)))
        load = {
            "provider": provider,
            "profile": str(self._folder / "profile"),
            "outputs": [output.name for output in model.graph.output],
            "file": source if isinstance(source, str) else None,
        }
        arrays = {"model": np.frombuffer(source, np.uint8)} if isinstance(source, bytes) else {}
        facts = self.ask("load", "load", load | self._limiting(), arrays).facts
        check_started(provider, facts["providers"])
        remote = RemoteSession(self, facts["math_mode"])
        yield remote
        nodes = self.ask("run", "placements", {}, {}).facts["nodes"]
        remote.placements += [
            Placement(str(name), str(op), str(ran_on), provider) for name, op, ran_on in nodes
        ]

    def ask(
        self, doing: str, what: str, facts: Mapping[str, object], arrays: Mapping[str, NDArray[Any]]
    ) -> Frame:
        """Return an answer. A ModelFailedError says that the model, its process or a limit ended it."""
        start = time.monotonic()
        try:
            answer = self._answer({"do": what, **facts}, arrays, min(self._left, time_left()))
        except TimeoutError:
            self.close()
            raise self._met(doing, "time", {"timeout": shown_limit(self._timeout)}) from None
        except TooLargeError:
            self.close()
            raise self._met(doing, "memory", {"memory": self._memory}) from None
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            raise self._ended(doing) from error
        finally:
            self._left -= time.monotonic() - start
        if reason := answer.facts.get("error"):
            if answer.facts.get("over_memory"):
                raise self._met(doing, "memory", {"memory": self._memory})
            with temporary():  # of files, the process has no others
                if number := answer.facts.get("errno"):
                    raise OSError(number, os.strerror(number))
            raise failed(doing, reason, engine=self._shown)
        return answer

    def _answer(self, facts: Mapping[str, object], arrays: Mapping[str, Any], seconds: float) -> Frame:
        """Send a request and wait for its answer, so that Ctrl-C is noticed at once."""

        def exchange() -> Frame:
            send(self._requests, facts, arrays)
            return receive(self._answers, self._memory / OUTPUTS)

        answer = self._talk.submit(exchange)
        until = time.monotonic() + seconds
        while not answer.done():
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            futures.wait([answer], timeout=min(left, POLL))
        return answer.result()

    def _ended(self, doing: str) -> ModelFailedError:
        """Return the error of a process that ended by itself."""
        how = self._end()
        if self._process.returncode == OVER_MEMORY:
            return self._met(doing, "memory", {"memory": self._memory})
        hint = ""
        if how.endswith(("SIGKILL", "SIGABRT")):
            hint = f"So it may end when memory is short; its limit was {self._memory} bytes."
        rule = f"{self._shown} must {doing} `model` to the end"
        return ModelFailedError(Message("verify", rule, {"its process": how}, hint))

    def _met(self, doing: str, limit: str, got: Mapping[str, object]) -> ModelFailedError:
        """Return the error of a model that met a limit."""
        (name,) = got
        rule = f"{self._shown} must {doing} `model` within the limit of {limit}"
        return ModelFailedError(
            Message("verify", rule, got, f"If you trust the model, pass a larger `{name}`.")
        )

    def _end(self) -> str:
        """End the process; return how it had ended, if it had."""
        with suppress(subprocess.TimeoutExpired):  # its pipes are closed before it has ended
            self._process.wait(1.0)
        code = self._process.poll()
        self.close()
        if code is None:
            return "gave no answer"
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"ended by {known.get(-code, -code)}"
        return f"ended with the code {code:#x}" if code > 255 else f"ended with the code {code}"

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._talk.shutdown()  # the process has closed its side, so nothing is waited for
        self._errors.close()
        for stream in (self._requests, self._answers):
            with suppress(OSError):  # what was not sent yet
                stream.close()


class RemoteSession:
    """A session in the other process."""

    def __init__(self, process: RuntimeProcess, math_mode: str) -> None:
        self._process, self.math_mode = process, math_mode
        self.placements: list[Placement] = []

    def timed(self, feeds: Mapping[str, NDArray[Any]], *, frees: bool = False) -> TimedRun:
        """Run the model twice, unless a run is long: see `engine.timed`."""
        facts, arrays = self._process.ask("run", "run", {"frees": frees}, feeds)
        return TimedRun(arrays, float(facts["seconds"]), facts["peak_bytes"])


@contextmanager
def runtime_process(
    model: Model,
    timeout: float = TIMEOUT,
    memory: int | None = None,
    *,
    scores: int = 0,
    engine: EngineName = "onnxruntime",
) -> Iterator[RuntimeProcess]:
    """Start a process for a model, and end it when the block ends. The largest run has that many `scores`."""
    most = default_memory(model, scores) if memory is None else int(memory)
    check_installed(engine)
    with temporary():
        temporary_folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary_folder as folder:
        process = RuntimeProcess(float(timeout), most, Path(folder), engine)
        try:
            yield process
        finally:
            process.close()
