"""What CuPy says of itself, in rules.json: its names, signatures, and the type loops of its ufuncs.

tests/standins/write_cupy_rules.py writes that file from an installed CuPy.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RULES: dict[str, Any] = json.loads(Path(__file__).with_name("rules.json").read_text())
VERSION: str = _RULES["version"]
SIGNATURES: dict[str, str] = _RULES["signatures"]
"""The parameters of the functions that the stand-in has, without their types and defaults."""
LOOPS: dict[str, list[str]] = {
    name: loops.split() for loops, names in _RULES["ufuncs"].items() for name in names.split()
}
"""The type loops of each ufunc, in the order in which CuPy tries them: ee->e, ff->f, ..."""
NAMES = frozenset(_RULES["names"].split())
"""The public names of the module."""
ATTRIBUTES = frozenset(_RULES["attributes"].split())
"""The names that an array has."""


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses arguments that CuPy's function of that name does not take."""
    signature = inspect.signature(eval(f"lambda {SIGNATURES[name][1:-1]}: None"))

    @functools.cache
    def check(count: int, keywords: tuple[str, ...]) -> None:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))

    @functools.wraps(function)
    def checked_function(*arguments: Any, **keywords: Any) -> Any:
        check(len(arguments), (*keywords,))
        return function(*arguments, **keywords)

    return checked_function
