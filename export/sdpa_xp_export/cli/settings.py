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

import tomllib
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
SPECS = ("query", "key", "value", "sinks", "past_key", "past_value", "past_lengths")
NO_PART_OF_A_CALL = ("form", "opset", "runtime", "output")
"""Settings of the graph and of its file; the others are the call."""
RETYPED = ("query", "key", "value", "past_key", "past_value")
"""The specs whose dtype `dtype` replaces."""


def read(path: Path) -> dict[str, Any]:
    """Read the settings that a file holds."""
    if not path.is_file():
        raise FileNotFoundError(message("export", "`config` must be a file", {"config": path}))
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError, too
        raise ValueError(message("export", f"`config` must be TOML ({error})", {"config": path})) from error
    for name, value in settings.items():
        if name not in KINDS:
            near = get_close_matches(name, KINDS, n=1)
            hint = f"The nearest is {near[0]}." if near else f"There are {', '.join(KINDS)}."
            raise ValueError(message("export", "a key of `config` must be known", {"key": repr(name)}, hint))
        if type(value) not in KINDS[name]:
            kinds = " or ".join(kind.__name__ for kind in KINDS[name])
            rule = f"`{name}` in `config` must be of type {kinds}"
            raise TypeError(message("export", rule, {name: repr(value)}))
    return settings


def export_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `export_attention` that `settings` state."""
    arguments = {name: value for name, value in settings.items() if name != "dtype"}
    for name in ("query", "key"):
        if name not in arguments:
            hint = f"Pass --{name}, or --config with a file that has it."
            raise ValueError(
                message("export", f"`{name}` must be given", {"given": ", ".join(arguments) or "none"}, hint)
            )
    arguments.setdefault("value", arguments["key"])
    for name in SPECS:
        if name in arguments:
            arguments[name] = TensorSpec.parse(arguments[name])
    for name in ("attn_mask", "bias"):
        if name in arguments:
            arguments[name] = expressions.parse("export", name, arguments[name])
    if isinstance(arguments.get("scale"), str):
        arguments["scale"] = _number_or_spec(arguments["scale"])
    if isinstance(arguments.get("outputs"), str):
        arguments["outputs"] = [name.strip() for name in arguments["outputs"].split(",")]
    if "dtype" in settings:
        arguments |= _with_dtype(arguments, settings["dtype"])
    return arguments


def _number_or_spec(text: str) -> float | TensorSpec:
    try:
        return float(text)
    except ValueError:
        return TensorSpec.parse(text)


def _with_dtype(arguments: dict[str, Any], dtype: str) -> dict[str, TensorSpec]:
    """Return the floating specs in another dtype; the others stay, and will be refused."""
    if dtype not in FLOATING:
        rule = f"`dtype` must be one of {', '.join(FLOATING)}"
        raise ValueError(message("export", rule, {"dtype": repr(dtype)}))
    specs = {name: arguments[name] for name in RETYPED if name in arguments}
    return {name: replace(spec, dtype=dtype) for name, spec in specs.items() if spec.floating}
