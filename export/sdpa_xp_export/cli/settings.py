"""The settings of an export from a TOML file, and the arguments that they stand for.

    query = "float32[B,8,L,64]"
    key = "float32[B,2,S,64]"
    attn_mask = "causal('lower_right') & padding(int64[B])"
    outputs = ["output", "lse"]
    output = "attention.onnx"

The keys are the flags of `sdpa-xp export`, with underscores. As with flags, a path is relative to the working
directory, not to the file. Whether another file may be replaced is for the command line alone to say.
"""

from __future__ import annotations

import codecs
import os
import tomllib
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._call.call import OPTIONS, OptionKind
from sdpa_xp_export._call.text import Expression, parse
from sdpa_xp_export._dtypes.dtype import FLOATING
from sdpa_xp_export.spec import TensorSpec

TYPES: dict[OptionKind | None, tuple[type, ...]] = {
    "number": (int, float),
    "number or array": (int, float, str),
    "flag": (bool,),
    "names": (list, str),
}
"""The types of an option in TOML if it is not a text alone; the last one is that of its flag."""
CALL_KEYS = {name: TYPES.get(option.kind, (str,)) for name, option in OPTIONS.items() if option.kind}
KEYS: dict[str, tuple[type, ...]] = CALL_KEYS | {
    "dtype": (str,),
    "form": (str,),
    "opset": (int,),
    "runtime": (str,),
    "output": (str,),
}
"""The types of each setting. The last five are no options of a call, but of its graph and file."""


MOST_BYTES = 2**24
NOT_WAITING = getattr(os, "O_NONBLOCK", 0)
"""A pipe that nobody writes to is empty; to open it must not wait for somebody."""


class Source(NamedTuple):
    """The command that reads settings from a file, and the argument that names the file: for messages."""

    function: str
    argument: str
    keys_are_flags: bool
    """Whether each setting is a flag of the command, too."""

    def named(self, setting: str) -> str:
        """Return how a message names a setting."""
        return f"`{setting}`" if self.keys_are_flags else f"`{setting}` in `{self.argument}`"


CONFIG = Source("export", "config", keys_are_flags=True)
CALL = Source("verify", "call", keys_are_flags=False)


def read(path: Path, source: Source = CONFIG) -> dict[str, Any]:
    """Read the settings that a file holds."""
    function, argument, _ = source
    if not path.is_file() and not path.is_fifo():  # a pipe is <(command) in a shell
        raise ArgumentValueError(function, f"`{argument}` must be a file", {argument: path})
    try:
        settings = tomllib.loads(_text(path))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError, too
        raise ArgumentValueError(function, f"`{argument}` must be TOML ({error})", {argument: path}) from error
    for name, value in settings.items():
        if name not in KEYS:
            near = get_close_matches(name, KEYS, n=1)
            hint = f"The nearest is {near[0]}." if near else f"There are {', '.join(KEYS)}."
            rule = f"a key of `{argument}` must be known"
            raise ArgumentValueError(function, rule, {"name": repr(name)}, hint)
        if type(value) not in KEYS[name]:  # to isinstance, True is an int
            kinds = " or ".join(kind.__name__ for kind in KEYS[name])
            rule = f"{name} in `{argument}` must be of type {kinds}"  # the key of the file, not the flag
            raise ArgumentValueError(function, rule, {"setting": repr(value)})
    return settings


def _text(path: Path) -> str:
    """Return the text of a file, which may have a byte order mark; editors of Windows write one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | NOT_WAITING)
    with os.fdopen(descriptor, "rb") as file:
        if NOT_WAITING:
            os.set_blocking(descriptor, True)
        data: bytes = file.read(MOST_BYTES + 1)  # nobody knows before how much a pipe has
    if len(data) > MOST_BYTES:
        raise ValueError(f"at most {MOST_BYTES} bytes")
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    # As Python reads text files: tomllib refuses a carriage return alone.
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def export_arguments(settings: dict[str, Any], source: Source = CONFIG) -> dict[str, Any]:
    """Return the arguments of `export_attention` that `settings` state."""
    arguments = {name: value for name, value in settings.items() if name != "dtype"}
    for name in ("query", "key"):
        if name not in arguments:
            rule, got = f"{source.named(name)} must be given", {"given": ", ".join(arguments) or "none"}
            hint = f"Pass --{name}, or --config with a file that has it." if source.keys_are_flags else ""
            raise ArgumentValueError(source.function, rule, got, hint)
    arguments.setdefault("value", arguments["key"])  # most calls have keys and values of one shape
    for name, option in OPTIONS.items():
        if isinstance(arguments.get(name), str) and option.kind in _READERS:
            arguments[name] = _READERS[option.kind](source, name, arguments[name])
    if "dtype" in settings:
        arguments |= _with_dtype(source, arguments, settings["dtype"])
    return arguments


def _spec(source: Source, name: str, text: str, kind: str = "a spec") -> TensorSpec:
    try:
        return TensorSpec.parse(text)
    except (ArgumentTypeError, ArgumentValueError) as error:
        # In its own words the spec is `text`, and its dtype and shape have names that flags have, too.
        of_spec = error.rule.replace("`text` must be ", "").replace("`shape`", "its shape")
        of_spec = of_spec.replace("`dtype`", "its dtype")
        rule = f"{source.named(name)} must be {kind}: {of_spec}"
        raise ArgumentValueError(source.function, rule, {name: repr(text)}, error.hint) from error


def _number_or_spec(source: Source, name: str, text: str) -> float | TensorSpec:
    try:
        return float(text)
    except ValueError:
        return _spec(source, name, text, "a number or a spec")


def _modifier(source: Source, name: str, text: str) -> Expression:
    return parse(source.function, name, text, shown=source.named(name))


def _names(_source: Source, _name: str, text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


_READERS: dict[OptionKind | None, Callable[[Source, str, str], object]] = {
    "spec": _spec,
    "array": _spec,
    "number or array": _number_or_spec,
    "modifier": _modifier,
    "names": _names,
}
"""What reads the text of an option, by its kind; others are as they stand in TOML."""


def _with_dtype(source: Source, arguments: dict[str, Any], dtype: str) -> dict[str, TensorSpec]:
    """Return the floating specs of tokens in another dtype; the others stay, and will be refused."""
    if dtype not in FLOATING:
        rule = f"{source.named('dtype')} must be one of {', '.join(FLOATING)}"
        raise ArgumentValueError(source.function, rule, {"dtype": repr(dtype)})
    specs = {
        name: arguments[name] for name, option in OPTIONS.items() if option.kind == "spec" and name in arguments
    }
    return {name: replace(spec, dtype=dtype) for name, spec in specs.items() if spec.floating}
