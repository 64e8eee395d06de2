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
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._call import expressions
from sdpa_xp_export._dtypes.promotion import FLOATING
from sdpa_xp_export.spec import TensorSpec

TEXT, NUMBER = (str,), (int, float)
KINDS: dict[str, tuple[type, ...]] = {
    "query": TEXT,
    "key": TEXT,
    "value": TEXT,
    "attn_mask": TEXT,
    "bias": TEXT,
    "is_causal": (bool,),
    "scale": (*NUMBER, str),
    "softcap": NUMBER,
    "sinks": TEXT,
    "softmax_dtype": TEXT,
    "layout": TEXT,
    "past_key": TEXT,
    "past_value": TEXT,
    "past_lengths": TEXT,
    "outputs": (list, str),
    "dtype": TEXT,
    "form": TEXT,
    "opset": (int,),
    "runtime": TEXT,
    "output": TEXT,
}
SPECS = ("query", "key", "value", "sinks", "past_key", "past_value", "past_lengths")
NO_PART_OF_A_CALL = ("form", "opset", "runtime", "output")
"""Settings of the graph and of its file; the others are the call."""
RETYPED = ("query", "key", "value", "past_key", "past_value")
"""The specs whose dtype `dtype` replaces."""


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
        if name not in KINDS:
            near = get_close_matches(name, KINDS, n=1)
            hint = f"The nearest is {near[0]}." if near else f"There are {', '.join(KINDS)}."
            rule = f"a key of `{argument}` must be known"
            raise ArgumentValueError(function, rule, {"name": repr(name)}, hint)
        if type(value) not in KINDS[name]:
            kinds = " or ".join(kind.__name__ for kind in KINDS[name])
            rule = f"`{name}` in `{argument}` must be of type {kinds}"
            raise ArgumentValueError(function, rule, {name: repr(value)})
    return settings


def _text(path: Path) -> str:
    """Return the text of a file, which may have a byte order mark; editors of Windows write one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | NOT_WAITING)
    with os.fdopen(descriptor, "rb") as file:
        if NOT_WAITING:
            os.set_blocking(descriptor, True)
        data: bytes = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"at most {MOST_BYTES} bytes")
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def export_arguments(settings: dict[str, Any], source: Source = CONFIG) -> dict[str, Any]:
    """Return the arguments of `export_attention` that `settings` state."""
    arguments = {name: value for name, value in settings.items() if name != "dtype"}
    for name in ("query", "key"):
        if name not in arguments:
            rule, got = f"{source.named(name)} must be given", {"given": ", ".join(arguments) or "none"}
            hint = f"Pass --{name}, or --config with a file that has it." if source.keys_are_flags else ""
            raise ArgumentValueError(source.function, rule, got, hint)
    arguments.setdefault("value", arguments["key"])
    for name in SPECS:
        if name in arguments:
            arguments[name] = _spec(source, name, arguments[name])
    for name in ("attn_mask", "bias"):
        if name in arguments:
            shown = source.named(name)
            arguments[name] = expressions.parse(source.function, name, arguments[name], shown=shown)
    if isinstance(arguments.get("scale"), str):
        arguments["scale"] = _number_or_spec(source, arguments["scale"])
    if isinstance(arguments.get("outputs"), str):
        arguments["outputs"] = [name.strip() for name in arguments["outputs"].split(",")]
    if "dtype" in settings:
        arguments |= _with_dtype(source, arguments, settings["dtype"])
    return arguments


def _spec(source: Source, name: str, text: str, kind: str = "a spec") -> TensorSpec:
    try:
        return TensorSpec.parse(text)
    except (ArgumentTypeError, ArgumentValueError) as error:
        of_spec = error.rule.replace("`", "")  # `dtype` is a flag, too, but means the dtype of this spec here
        rule = f"{source.named(name)} must be {kind}, whose {of_spec}"
        raise ArgumentValueError(source.function, rule, {name: repr(text)}, error.hint) from error


def _number_or_spec(source: Source, text: str) -> float | TensorSpec:
    try:
        return float(text)
    except ValueError:
        return _spec(source, "scale", text, "a number or a spec")


def _with_dtype(source: Source, arguments: dict[str, Any], dtype: str) -> dict[str, TensorSpec]:
    """Return the floating specs in another dtype; the others stay, and will be refused."""
    if dtype not in FLOATING:
        rule = f"{source.named('dtype')} must be one of {', '.join(FLOATING)}"
        raise ArgumentValueError(source.function, rule, {"dtype": repr(dtype)})
    specs = {name: arguments[name] for name in RETYPED if name in arguments}
    return {name: replace(spec, dtype=dtype) for name, spec in specs.items() if spec.floating}
