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
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from sdpa_xp._checks import message
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
FLAGS = {name: "--" + name.replace("_", "-") for name in KINDS}
SPECS = ("query", "key", "value", "sinks", "past_key", "past_value", "past_lengths")
NO_PART_OF_A_CALL = ("form", "opset", "runtime", "output")
"""Settings of the graph and of its file; the others are the call."""
RETYPED = ("query", "key", "value", "past_key", "past_value")
"""The specs whose dtype `dtype` replaces."""


MOST_BYTES = 2**24
NOT_WAITING = getattr(os, "O_NONBLOCK", 0)
"""A pipe that nobody writes to is empty; to open it must not wait for somebody."""


class Source(NamedTuple):
    """The command that reads settings, and its flag for a file of them: for messages."""

    function: str
    flag: str
    has_flags: bool
    """Whether each setting is a flag of the command, too."""

    def key(self, setting: str) -> str:
        """Return the flag of a setting, or its key in the file."""
        return FLAGS[setting] if self.has_flags else setting

    def named(self, setting: str) -> str:
        """Return the flag of a setting, or its key and the flag of the file."""
        return f"`{self.key(setting)}`" + ("" if self.has_flags else f" in `{self.flag}`")

    def message(self, rule: str, got: Mapping[str, object], hint: str = "") -> str:
        """Return the message that says what must hold."""
        return message(self.function, rule, got, hint)


CONFIG = Source("export", "--config", has_flags=True)
CALL = Source("verify", "--call", has_flags=False)


class SettingsError(ValueError):
    """A setting cannot be read. The message names flags, and the keys of a file as they stand in it."""


def read(path: Path, source: Source = CONFIG) -> dict[str, Any]:
    """Read the settings that a file holds."""
    if not path.is_file() and not path.is_fifo():  # a pipe is <(command) in a shell
        rule = f"`{source.flag}` must be a file"
        raise SettingsError(source.message(rule, {source.flag: path}))
    try:
        settings = tomllib.loads(_text(path))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError, too
        rule = f"`{source.flag}` must be TOML ({error})"
        raise SettingsError(source.message(rule, {source.flag: path})) from error
    for name, value in settings.items():
        if name not in KINDS:
            near = get_close_matches(name, KINDS, n=1)
            hint = f"The nearest is {near[0]}." if near else f"There are {', '.join(KINDS)}."
            rule = f"a key of `{source.flag}` must be known"
            raise SettingsError(source.message(rule, {"key": repr(name)}, hint))
        if type(value) not in KINDS[name]:
            kinds = " or ".join(kind.__name__ for kind in KINDS[name])
            rule = f"`{name}` in `{source.flag}` must be of type {kinds}"
            raise SettingsError(source.message(rule, {name: repr(value)}))
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
            hint = f"Pass --{name}, or --config with a file that has it." if source.has_flags else ""
            rule, got = f"{source.named(name)} must be given", {"given": ", ".join(arguments) or "none"}
            raise SettingsError(source.message(rule, got, hint))
    arguments.setdefault("value", arguments["key"])
    for name in SPECS:
        if name in arguments:
            arguments[name] = _spec(source, name, arguments[name])
    for name in ("attn_mask", "bias"):
        if name in arguments:
            arguments[name] = _expression(source, name, arguments[name])
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
    except (ValueError, TypeError) as error:
        why = (
            str(error)
            .removeprefix("TensorSpec: ")
            .replace("`text` must be ", "")
            .replace("got text=", "got ")
            .replace("`dtype`", "its dtype")
            .replace("`shape`", "its shape")
        )
        raise SettingsError(f"{source.function}: {source.named(name)} must be {kind}: {why}") from error


def _expression(source: Source, name: str, text: str) -> Any:
    try:
        return expressions.parse(source.function, name, text)
    except ValueError as error:
        words = str(error).replace(f"`{name}`", source.named(name), 1)
        raise SettingsError(words.replace(f"got {name}=", f"got {source.key(name)}=", 1)) from error


def _number_or_spec(source: Source, text: str) -> float | TensorSpec:
    try:
        return float(text)
    except ValueError:
        return _spec(source, "scale", text, "a number or a spec")


def _with_dtype(source: Source, arguments: dict[str, Any], dtype: str) -> dict[str, TensorSpec]:
    """Return the floating specs in another dtype; the others stay, and will be refused."""
    if dtype not in FLOATING:
        rule = f"{source.named('dtype')} must be one of {', '.join(FLOATING)}"
        raise SettingsError(source.message(rule, {source.key("dtype"): repr(dtype)}))
    specs = {name: arguments[name] for name in RETYPED if name in arguments}
    return {name: replace(spec, dtype=dtype) for name, spec in specs.items() if spec.floating}
