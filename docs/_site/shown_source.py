"""The source of a function below its description, without the docstring, which stands above it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

from griffe import Extension, Function

ROOT = Path(__file__).parents[2]


class ShownSource(Extension):
    """Give the templates the file, the first line and the code of each function."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        if func.lines and isinstance(func.filepath, Path) and func.filepath.is_relative_to(ROOT):
            func.extra["source"] |= {
                "file": func.filepath.relative_to(ROOT).as_posix(),
                "line": func.lineno,
                "code": code(func),
            }


def code(func: Function) -> str:
    """Return the lines of a function without its docstring."""
    lines = func.lines
    if func.docstring and func.docstring.lineno and func.docstring.endlineno:
        start, stop = (line - (func.lineno or 0) for line in (func.docstring.lineno, func.docstring.endlineno))
        lines = lines[:start] + lines[stop + 1 :]
    return dedent("\n".join(lines))
