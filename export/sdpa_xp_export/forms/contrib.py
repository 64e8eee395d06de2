"""Parts that the fused operators of com.microsoft share: heads side by side in one axis."""

from __future__ import annotations

from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._graph.graph import GraphValue

RANK = 4


def unsupported_reason(call: ExportCall) -> str | None:
    """Return what no such operator can state; None if it is for the operator to say."""
    specs = (call.query, call.key, call.value)
    if any(spec.ndim != RANK for spec in specs) or len({spec.shape[0] for spec in specs}) > 1:
        return "com.microsoft operators take 4 axes with one batch"
    if call.accumulation_dtype == "float64":
        return "com.microsoft operators do not take float64"
    if call.outputs != ("output",):
        return "com.microsoft operators return only the output"
    if call.biases:
        return "com.microsoft operators give NaN for a row that a bias masks"
    if not isinstance(call.scale, float):
        return "com.microsoft operators take a scale that is a number"
    if call.scale == 0:
        return "com.microsoft operators read a scale of 0 as no scale"
    return None


def packed(value: GraphValue) -> GraphValue:
    """(B, H, L, E) -> (B, L, H * E)."""
    heads, width = value.dims[-3], value.dims[-1]
    assert isinstance(heads, int)
    assert isinstance(width, int)
    swapped = xp.moveaxis(value, -2, -3)
    return xp.reshape(swapped, [0, 0, heads * width], dims=(*swapped.dims[:2], heads * width))


def unpacked(value: GraphValue, heads: int) -> GraphValue:
    """(B, L, H * Ev) -> (B, H, L, Ev)."""
    batch, length, width = value.dims
    assert isinstance(width, int)
    split = xp.reshape(value, [0, 0, heads, width // heads], dims=(batch, length, heads, width // heads))
    return xp.moveaxis(split, -2, -3)
