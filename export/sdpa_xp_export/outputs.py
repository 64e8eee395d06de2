"""What a layer returns, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def named_outputs(result: Any) -> dict[str, Any]:
    """A mapping's and a NamedTuple's names; else `output`, or `output_0` and on."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple | list):
        fields = getattr(result, "_fields", [f"output_{n}" for n in range(len(result))])
        return dict(zip(fields, result, strict=True))
    return {"output": result}
