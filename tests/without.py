"""A Python in which some packages are not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

PROGRAM = """
import sys
blocked = {blocked}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""The beginning of a program: from here on, no finder has the packages in `blocked`."""


def run_without(
    blocked: Iterable[str], code: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run code of Python in an interpreter that finds none of these packages."""
    command = [sys.executable, "-c", PROGRAM.format(blocked={*blocked}) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
