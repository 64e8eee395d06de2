"""An exception at any line of some files, or at any step of Python in them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted:
    """Raises an exception at one step of a call within `files`; counts the steps.

    The first two visits of a line, or of an opcode, count: a loop may have thousands.
    """

    def __init__(
        self, step: int, *files: str, opcodes: bool = False, exception: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.step, self.files, self.opcodes, self.exception = step, files, opcodes, exception
        self.steps, self.came = 0, ""
        self.visits: Counter[tuple[object, ...]] = Counter()

    def __call__(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()  # that of a debugger, or of what records lines
        sys.settrace(self._trace)
        try:
            call()
        except self.exception:
            if not self.came:
                raise
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if self.opcodes:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        place = (frame.f_code, frame.f_lasti if self.opcodes else frame.f_lineno, event)
        self.visits[place] += 1
        if event in ("line", "opcode", "return") and self.visits[place] <= 2:
            self.steps += 1
            if self.steps == self.step:
                sys.settrace(None)
                self.came = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {event}"
                raise self.exception
        return self._trace
