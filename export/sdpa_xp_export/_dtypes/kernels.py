"""Operators without a kernel for a dtype on onnxruntime's CPU provider, and the dtype to compute in instead.

Measured on the releases 1.23 to 1.31 at opsets 17 to 24: an entry lacks a kernel in at least one of them.
"""

from __future__ import annotations

from sdpa_xp_export._dtypes.promotion import UNSIGNED

_MOVING = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that only move elements: they have kernels for every dtype."""

_MISSING = {
    "Where": ("bool", "int8", "int16", "uint16", "uint32", "uint64"),
    "Max": ("int8", "int16", "uint8", "uint16"),
    "Min": ("int8", "int16", "uint8", "uint16"),
    "MatMul": ("int8", "int16", "uint8", "uint16"),
    "Neg": UNSIGNED,
    "ReduceMax": ("int16", "uint16", "uint32"),
    "ReduceMin": ("int16", "uint16", "uint32"),
    "Erf": ("float64",),
}

_WIDER = {
    "bool": ("uint8",),
    "int8": ("int32",),
    "int16": ("int32",),
    "uint8": ("int32",),
    "uint16": ("int32",),
    "uint32": ("int64",),
    "uint64": ("int64",),  # the same bits: sums, products and choices stay right, an order would not
    "bfloat16": ("float32",),
}


def computable_dtype(op: str, dtype: str, *, bfloat16: bool = False) -> str | None:
    """Return the dtype to compute `op` in for inputs of `dtype`: the same, a wider one, or None.

    A Cast to the wider dtype and back loses nothing: integers wrap in both, and a result in bfloat16 is the
    result in float32 rounded once.

    Args:
        op: An operator whose data inputs have one dtype.
        dtype: That dtype.
        bfloat16: Whether the target computes in bfloat16 itself, as CUDA does.
    """
    if dtype == "bfloat16":
        return dtype if bfloat16 or op in _MOVING else "float32"
    if dtype not in _MISSING.get(op, ()):
        return dtype
    return next((wider for wider in _WIDER.get(dtype, ()) if wider not in _MISSING[op]), None)
