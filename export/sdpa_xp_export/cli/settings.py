"""The settings of an export from a TOML file, and what they are as arguments.

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

from sdpa_xp.checks import message
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
OF_THE_CALL = ("query", "key", "value", "past_key", "past_value")
"""Whose dtype `dtype` replaces."""


def read(path: Path) -> dict[str, Any]:
    """The settings that a file holds."""
    if not path.is_file():
        raise FileNotFoundError(message("export", "`config` must be a file", {"config": path}))
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of its encoding
        raise ValueError(message("export", f"`config` must be TOML ({error})", {"config": path})) from error
    for name, value in found.items():
        if name not in KINDS:
            near = get_close_matches(name, KINDS, n=1)
            hint = f"The nearest is {near[0]}." if near else f"There are {', '.join(KINDS)}."
            raise ValueError(message("export", "a key of `config` must be known", {"key": repr(name)}, hint))
        if type(value) not in KINDS[name]:
            kinds = " or ".join(kind.__name__ for kind in KINDS[name])
            rule = f"`{name}` in `config` must be of type {kinds}"
            raise TypeError(message("export", rule, {name: repr(value)}))
    return found


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `export_attention` that `settings` state."""
    made = {name: value for name, value in settings.items() if name != "dtype"}
    for name in ("query", "key"):
        if name not in made:
            hint = f"Pass --{name}, or --config with a file that has it."
            raise ValueError(
                message("export", f"`{name}` must be given", {"given": ", ".join(made) or "none"}, hint)
            )
    made.setdefault("value", made["key"])
    for name in SPECS:
        if name in made:
            made[name] = TensorSpec.parse(made[name])
    for name in ("attn_mask", "bias"):
        if name in made:
            made[name] = expressions.parse("export", name, made[name])
    if isinstance(made.get("scale"), str):
        made["scale"] = _number_or_spec(made["scale"])
    if isinstance(made.get("outputs"), str):
        made["outputs"] = [name.strip() for name in made["outputs"].split(",")]
    if "dtype" in settings:
        made |= _with_dtype(made, settings["dtype"])
    return made


def _number_or_spec(text: str) -> float | TensorSpec:
    try:
        return float(text)
    except ValueError:
        return TensorSpec.parse(text)


def _with_dtype(made: dict[str, Any], dtype: str) -> dict[str, TensorSpec]:
    """The specs of the call in another floating dtype; those that are not floating stay, to be refused."""
    if dtype not in FLOATING:
        rule = f"`dtype` must be one of {', '.join(FLOATING)}"
        raise ValueError(message("export", rule, {"dtype": repr(dtype)}))
    specs = {name: made[name] for name in OF_THE_CALL if name in made}
    return {name: replace(spec, dtype=dtype) for name, spec in specs.items() if spec.floating}
