"""The functions of the array API that `to_onnx` traces, by the files of the code that write them."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

from evidence import table
from internals import graph_namespace


def page() -> str:
    """The table: what a file is about, which its first line says, and its functions."""
    files = [file for file in vars(graph_namespace).values() if isinstance(file, ModuleType)]
    listed = {file: sorted(file.__all__) for file in files if hasattr(file, "__all__")}
    rows = [
        [_subject(file), ", ".join(f"`{name}`" for name in names)]
        for file, names in sorted(listed.items(), key=lambda pair: pair[0].__name__)
    ]
    return table(["the functions", "their names"], rows)


def _subject(file: ModuleType) -> str:
    """The first line of the file."""
    words = ast.get_docstring(ast.parse(inspect.getsource(file))) or ""
    return words.partition("\n\n")[0].replace("\n", " ").rstrip(".")
