"""Compare attention on every installed array library, and export it to ONNX graphs that onnxruntime runs.

The exit code is 0 on success, 1 if a result disagrees, onnxruntime fails to run a model, a node did not run on
the required provider, or the installed onnxruntime is older than required, 2 if an argument is wrong, a file is
missing, or the provider is not offered, and 130 if interrupted. An error is one line on standard error.
"""

from __future__ import annotations

import os
import sys

from sdpa_xp import __version__
from sdpa_xp._checks import install_hint
from sdpa_xp_export._interrupts import INTERRUPTED, raise_again
from sdpa_xp_export._runtime.failure import ModelFailedError

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


def _code(arguments: list[str]) -> int:
    """Run the command; an error is one line on standard error."""
    if arguments in (["--version"], ["-V"]):  # this works without typer, too
        print(f"sdpa-xp {__version__}")
        return 0
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads it when it is imported
    try:
        raise_again()
        from sdpa_xp_export.cli.app import run  # imported here: an interrupt while it loads is one line, too

        code = run(arguments)
        failure = "interrupted" if code == INTERRUPTED else ""
    except KeyboardInterrupt:
        code, failure = INTERRUPTED, "interrupted"
    except ImportError as error:
        extra = "demo" if arguments[:1] == ["demo"] else "cli,export"
        missing = error.__cause__ or error  # the error itself has a hint for those who import the package
        code, failure = BAD_ARGUMENTS, f"{missing}. {install_hint(extra)}"
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
