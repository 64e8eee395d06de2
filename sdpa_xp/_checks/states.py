"""Checks of states that are merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from sdpa_xp._checks.arrays import check_floating, check_one_device, check_one_dtype, check_one_library
from sdpa_xp._checks.messages import shown
from sdpa_xp._checks.shapes import HLE, check_known, headed
from sdpa_xp._libraries import accumulation_dtype, dtype_name
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def check_states(function: str, value: object, layout: str) -> tuple[Namespace, Sequence[tuple[Array, Array]]]:
    """Check states of one library, dtype, device and shape, and return their namespace and arrays."""
    if not isinstance(value, Iterable):
        rule = "`states` must be the states to merge, each an AttentionState"
        raise ArgumentTypeError(function, rule, {"states": shown(value)})
    parts = list(value)
    if not parts:
        raise ArgumentValueError(function, "`states` must hold at least one state", {"states": "nothing"})
    for index, part in enumerate(parts):
        if not (isinstance(part, tuple) and len(part) == 2):
            rule = f"`states[{index}]` must be an AttentionState, (output, lse)"
            raise ArgumentTypeError(function, rule, {f"states[{index}]": shown(part)})
    pairs = cast(Sequence[tuple[Array, Array]], parts)
    outputs = {f"states[{index}].output": output for index, (output, _) in enumerate(pairs)}
    lses = {f"states[{index}].lse": lse for index, (_, lse) in enumerate(pairs)}
    xp, arrays = check_one_library(function, outputs | lses)
    outputs, lses = ({name: arrays[name] for name in named} for named in (outputs, lses))
    check_one_device(function, arrays)
    for arrays in (outputs, lses):
        (first, reference), *_ = arrays.items()
        check_floating(function, first, reference)
        check_one_dtype(function, arrays)
        for name, array in arrays.items():
            check_known(function, name, array.shape)
            if array.shape != reference.shape:
                rule = f"`{first}` and `{name}` must have one shape"
                got = {f"{first}.shape": reference.shape, f"{name}.shape": array.shape}
                raise ArgumentValueError(function, rule, got)
    pairs = list(zip(outputs.values(), lses.values(), strict=True))
    output, lse = pairs[0]
    least = dtype_name(accumulation_dtype(xp, output.dtype))
    if dtype_name(lse.dtype) not in (least, "float64"):  # float64 comes from `softmax_dtype`
        rule = f"`lse` must be {least} if `output` is {dtype_name(output.dtype)}"
        raise ArgumentTypeError(function, rule, {"lse.dtype": lse.dtype})
    rows = output.shape if output.ndim < 3 else headed(output.shape, layout)
    if output.ndim < 2 or lse.shape != rows[:-1]:
        rule = "`lse` must have the shape of `output` without its width (axis -1, Ev)"
        rule += "" if layout == HLE else " and with the heads first"
        raise ArgumentValueError(function, rule, {"output.shape": output.shape, "lse.shape": lse.shape})
    return xp, pairs
