"""Ctrl-C while Python still imports what the command needs: one line and exit code 130, as it is later."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

COMMAND, INTERRUPTED = "sdpa-xp", 130


def end_at_once() -> None:
    """Let Ctrl-C end this process, if it is the command and not a program that imports the package."""
    as_module = sys.argv[:1] == ["-m"] and "sdpa_xp_export" in sys.orig_argv
    if not as_module and Path(sys.argv[0] if sys.argv else "").stem != COMMAND:
        return
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    with suppress(OSError):  # nobody may read it
        os.write(2, f"{COMMAND}: interrupted\n".encode())
    os._exit(INTERRUPTED)
