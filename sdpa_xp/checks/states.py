"""States that are to be merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sdpa_xp import namespace as door
from sdpa_xp.checks.arrays import floating, one_device, one_dtype, one_library
from sdpa_xp.checks.messages import message, type_name
from sdpa_xp.protocols import Array, Namespace


def states(function: str, parts: Sequence[object]) -> tuple[Namespace, Sequence[tuple[Array, Array]]]:
    """One state or more, all of one library, dtype, device and shape; returns their namespace, and them."""
    if not parts:
        raise ValueError(message(function, "`states` must hold at least one state", {"states": "nothing"}))
    for index, part in enumerate(parts):
        if not (isinstance(part, tuple) and len(part) == 2):
            rule = f"`states[{index}]` must be an AttentionState, (output, lse)"
            raise TypeError(message(function, rule, {f"states[{index}]": type_name(part)}))
    pairs = cast(Sequence[tuple[Array, Array]], parts)
    outputs = {f"states[{index}].output": output for index, (output, _) in enumerate(pairs)}
    lses = {f"states[{index}].lse": lse for index, (_, lse) in enumerate(pairs)}
    xp, _ = one_library(function, outputs | lses)
    one_device(function, outputs | lses)
    for arrays in (outputs, lses):
        (first, reference), *_ = arrays.items()
        floating(function, first, reference)
        one_dtype(function, arrays)
        for name, array in arrays.items():
            if array.shape != reference.shape:
                rule = f"`{first}` and `{name}` must have one shape"
                got = {f"{first}.shape": reference.shape, f"{name}.shape": array.shape}
                raise ValueError(message(function, rule, got))
    output, lse = pairs[0]
    accumulation = door.accumulation_dtype(xp, output.dtype)
    if lse.dtype != accumulation:
        rule = (
            f"`lse` must be {door.dtype_name(accumulation)} where `output` is {door.dtype_name(output.dtype)}"
        )
        raise TypeError(message(function, rule, {"lse.dtype": lse.dtype}))
    if output.ndim < 2 or lse.shape != output.shape[:-1]:
        rule = "`lse` must have the shape of `output` without its width (axis -1, Ev)"
        raise ValueError(message(function, rule, {"output.shape": output.shape, "lse.shape": lse.shape}))
    return xp, pairs
