"""Shapes whose lengths may be names."""

from __future__ import annotations

from typing import cast

from sdpa_xp._checks.shapes import broadcast
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export.spec import SymbolicShape


def joint_shape(*shapes: SymbolicShape) -> SymbolicShape:
    """Return the shape that `shapes` broadcast to."""
    # `broadcast` compares lengths and never counts with them, so a name may stand where its type says int.
    joint = broadcast(*(cast(tuple[int, ...], shape) for shape in shapes))
    if joint is None:
        rule = "shapes must broadcast; a name broadcasts only with itself and with 1"
        raise ArgumentValueError("to_onnx", rule, {"shapes": ", ".join(map(str, shapes))})
    return joint


def broadcasts_to(shape: SymbolicShape, target: SymbolicShape) -> bool:
    """Return whether an array of `shape` broadcasts to `target` without making it larger."""
    return broadcast(*(cast(tuple[int, ...], lengths) for lengths in (shape, target))) == target
