"""Which inputs of a graph its values have their numbers from."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand")
"""Operators that change no integer but its dtype."""


def moved_inputs(nodes: Iterable[onnx.NodeProto], inputs: Iterable[str]) -> dict[str, str]:
    """Return the input that each value has its numbers from; computed values have none.

    Reshape(Cast(lengths)) has its numbers from lengths.
    """
    sources = {name: name for name in inputs}
    for node in nodes:
        if node.op_type in _MOVING and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
    return sources
