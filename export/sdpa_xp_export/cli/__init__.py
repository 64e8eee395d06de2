"""Export attention to ONNX graphs that onnxruntime runs, verify them, and judge attention functions.

Exit codes:
  0    success
  1    a result disagrees, a function is judged wrong, the engine fails to run
       a model, a node did not run on the required provider, or the engine is
       another one or older than required
  2    an argument is wrong, a file is missing or cannot be written, or the
       provider is not offered
  130  interrupted
An error is one line on standard error.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any

from sdpa_xp import __version__
from sdpa_xp._checks import install_hint

from .._interrupts import INTERRUPTED, raise_again
from .._runtime.limits import ModelFailedError

DISAGREES = 1
BAD_ARGUMENTS = 2


def main() -> None:
    """Run the console script."""
    _open_streams()
    sys.exit(_code(sys.argv[1:]))


def _open_streams() -> None:
    """Give the command streams that lead nowhere where a shell closed its own, as with 2>&-.

    A file that is opened later could get the number of a closed one, and whatever is written to that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the lowest number first
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(getattr(stream, "buffer", None), io.BufferedWriter | io.FileIO) and _is_pipe(stream):
            setattr(sys, name, _to_a_reader_who_may_leave(stream))


def _is_pipe(stream: io.TextIOWrapper) -> bool:
    mode = os.fstat(stream.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _to_a_reader_who_may_leave(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    pipe = _Pipe(stream.fileno(), "w", closefd=False)
    buffer: Any = pipe if stream.write_through else io.BufferedWriter(pipe)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A pipe that drops what its reader does not take, as in `sdpa-xp verify model.onnx | head -1`.

    The exit code stays that of the command, whenever the reader leaves. With the code of SIGPIPE, 141, a model
    that agrees would fail in a shell with `pipefail` or not, by chance.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _code(arguments: list[str]) -> int:
    """Run the command; an error is one line on standard error."""
    if arguments in (["--version"], ["-V"]):  # this works without typer, too
        print(f"sdpa-xp {__version__}")
        return 0
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads it when it is imported
    try:
        raise_again()
        from .app import run  # imported here: an interrupt while it loads is one line, too

        code = run(arguments)
        failure = "interrupted" if code == INTERRUPTED else ""
    except KeyboardInterrupt:
        code, failure = INTERRUPTED, "interrupted"
    except ImportError as error:
        extra = "demo" if arguments[:1] == ["demo"] else "cli,export"
        missing = error.__cause__ or error  # the error itself has a hint for those who import the package
        names_extras = install_hint("").partition("[")[0] in str(missing)
        hint = "" if names_extras else f". {install_hint(extra)}"
        code, failure = BAD_ARGUMENTS, f"{missing}{hint}"
    except ModelFailedError as error:
        code, failure = DISAGREES, str(error)
    except (ValueError, TypeError, OSError) as error:
        code, failure = BAD_ARGUMENTS, str(error)
    if failure:
        print(f"sdpa-xp: {plain(' '.join(failure.splitlines()))}", file=sys.stderr)
    return code


def plain(text: str) -> str:
    """Return `text` with control characters spelt out, so that metadata of a model cannot steer a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
