"""Convert a call to the text in a model's metadata, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdpa_xp_export._call import expressions
from sdpa_xp_export._call.call import SPECS, ExportCall, ExportOptions
from sdpa_xp_export._call.checking import checked_call
from sdpa_xp_export._call.operands import Initializer
from sdpa_xp_export.spec import TensorSpec

LONGEST = 1_000_000
"""Characters of a call; a list of ids takes the most of them."""


def to_json(call: ExportCall) -> str:
    """Return the call as text."""
    written: dict[str, Any] = {name: str(spec) for name in SPECS if (spec := getattr(call, name)) is not None}
    for name in ("attn_mask", "bias", "scale", "sinks"):
        value = getattr(call, name)
        if value is not None:
            written[name] = value if isinstance(value, float) else expressions.text_of(value)
    written |= {"is_causal": call.is_causal, "softcap": call.softcap}
    defaults = ExportOptions()
    for name in ("softmax_dtype", "layout", "outputs"):
        if getattr(call, name) != getattr(defaults, name):
            written[name] = getattr(call, name)
    return json.dumps(written)


def digest(text: str, initializers: Mapping[str, Initializer]) -> str:
    """Return the SHA-256 of a call as text and of the numbers that are part of it, in hexadecimal."""
    hashed = hashlib.sha256(text.encode())
    for name, initializer in sorted(initializers.items()):
        numbers = np.ascontiguousarray(initializer.numbers)
        hashed.update(f"{name} {numbers.dtype.name} {numbers.shape}".encode())
        hashed.update(numbers.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


def from_json(
    text: str, initializers: Mapping[str, Initializer], functions: Mapping[str, object] | None = None
) -> ExportCall:
    """Return the call that `to_json` wrote; it is checked again, since a file may hold anything.

    Args:
        text: The text.
        initializers: The numbers that the model holds, by name.
        functions: The masks and biases that cannot be written as text, by argument.
    """
    if len(text) > LONGEST:
        raise ValueError(f"a call of {len(text)} characters, more than {LONGEST}")
    read = json.loads(text)
    if not isinstance(read, dict) or not {"query", "key", "value"} <= read.keys():
        raise ValueError("no call")
    for name in read.keys() - {*SPECS, *ExportOptions._fields}:
        raise ValueError(f"its call has an unknown key, {name[:40]!r}")
    specs = {name: TensorSpec.parse(read.pop(name)) for name in SPECS if name in read}
    for name in ("attn_mask", "bias"):
        if functions and name in functions:
            read[name] = functions[name]
        elif name in read:
            read[name] = expressions.parse("verify", name, read[name], initializers)
    for name in ("scale", "sinks"):
        if isinstance(read.get(name), str):
            read[name] = expressions.parse("verify", name, read[name], initializers)
    query, key, value = (specs.pop(name) for name in ("query", "key", "value"))
    return checked_call("verify", query, key, value, ExportOptions(**read | specs))
