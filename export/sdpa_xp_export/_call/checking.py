"""The arguments of an export: refused with a message, or turned into a call."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any, cast

import array_api_compat

from sdpa_xp import checks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import OUTPUTS, SPECS, ExportCall, ExportOptions
from sdpa_xp_export._call.operands import GraphOperand, Initializer, Input, OperandNamer
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export.spec import TensorSpec, total


def checked_call(function: str, query: object, key: object, value: object, given: ExportOptions) -> ExportCall:
    """The call, when it is one that the library takes and a graph can state."""
    specs: dict[str, Any] = {"query": query, "key": key, "value": value}
    specs |= {name: given._asdict()[name] for name in SPECS[3:] if given._asdict()[name] is not None}
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(
                checks.message(function, f"`{name}` must be a TensorSpec", {name: type(spec).__name__})
            )
    if checks.probability(function, "dropout_p", given.dropout_p):
        rule = "`dropout_p` must be 0, since a graph draws no random numbers"
        raise ValueError(checks.message(function, rule, {"dropout_p": given.dropout_p}))
    names = OperandNamer(function, inputs=dict(specs))
    dtype = specs["query"].dtype
    for name, spec in specs.items():
        _fitting_dtype(function, name, spec, dtype)
    checks.named(function, "layout", given.layout, checks.LAYOUTS)
    sizes = _sizes(function, specs, str(given.layout))
    mask, bias = (
        names.operand(name, _mask_or_bias(function, name, getattr(given, name)))
        for name in ("attn_mask", "bias")
    )
    held = "float64" if "float64" in (dtype, given.softmax_dtype) else "float32"
    if given.softmax_dtype not in (None, held):
        rule = "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores"
        raise ValueError(checks.message(function, rule, {"softmax_dtype": repr(given.softmax_dtype)}))
    scale, sinks = _scale(function, names, given.scale, sizes, held), _sinks(function, names, given.sinks)
    call = ExportCall(
        query=specs["query"],
        key=specs["key"],
        value=specs["value"],
        past_key=specs.get("past_key"),
        past_value=specs.get("past_value"),
        past_lengths=specs.get("past_lengths"),
        attn_mask=mask,
        bias=bias,
        is_causal=checks.flag(function, "is_causal", given.is_causal),
        scale=scale,
        softcap=checks.softcap(function, given.softcap, held),
        sinks=sinks,
        softmax_dtype=given.softmax_dtype,
        layout=str(given.layout),
        outputs=_outputs(function, given.outputs),
        inputs=names.inputs,
        initializers=names.initializers,
        cached="past_key" in specs or (bool(given.cached) and sizes.queries != sizes.keys),
        sizes=sizes,
    )
    _fitting_operands(function, call)
    return call


def _fitting_dtype(function: str, name: str, spec: TensorSpec, dtype: str) -> None:
    if name == "past_lengths":
        if spec.dtype not in INTEGERS:
            rule = "`past_lengths` must hold integers"
            raise TypeError(checks.message(function, rule, {f"{name}.dtype": spec.dtype}))
        return
    if not spec.floating:
        raise TypeError(
            checks.message(function, f"`{name}` must have a floating dtype", {f"{name}.dtype": spec.dtype})
        )
    if spec.dtype != dtype:
        rule = f"`query` and `{name}` must have one dtype"
        raise TypeError(checks.message(function, rule, {"query.dtype": dtype, f"{name}.dtype": spec.dtype}))


def _mask_or_bias(function: str, name: str, value: object) -> object:
    if isinstance(value, TensorSpec) and value.dtype in INTEGERS:
        rule = f"`{name}` must be " + ("boolean or floating" if name == "attn_mask" else "floating")
        raise TypeError(checks.message(function, rule, {f"{name}.dtype": value.dtype}))
    if name == "bias" and isinstance(value, TensorSpec) and value.dtype == "bool":
        raise TypeError(checks.message(function, "`bias` must have a floating dtype", {"bias.dtype": "bool"}))
    own, other, hint = (Mask, Bias, "bias") if name == "attn_mask" else (Bias, Mask, "attn_mask")
    checks.mask_or_bias(function, name, value, other, f"Pass it as `{hint}`.")
    known = isinstance(value, own | TensorSpec | GraphOperand) or array_api_compat.is_array_api_obj(value)
    if value is not None and not known:
        rule = f"`{name}` must be a {own.__name__}, a TensorSpec or an array"
        raise TypeError(checks.message(function, rule, {name: repr(value)}))
    return value


def _scale(
    function: str, names: OperandNamer, scale: object, sizes: checks.Sizes, held: str
) -> float | GraphOperand:
    if scale is None:
        return 1.0 / math.sqrt(sizes.width)
    if isinstance(scale, numbers.Number):
        return checks.number(function, "scale", scale, held)
    operand = names.operand("scale", scale)
    return (
        operand if isinstance(operand, Input | Initializer) else checks.number(function, "scale", scale, held)
    )


def _sinks(function: str, names: OperandNamer, sinks: object) -> GraphOperand | None:
    operand = names.operand("sinks", sinks)
    if operand is None or isinstance(operand, Input | Initializer):
        return operand
    rule = "`sinks` must be a TensorSpec or an array, (..., Hq)"
    raise TypeError(checks.message(function, rule, {"sinks": type(sinks).__name__}))


def _outputs(function: str, outputs: object) -> tuple[str, ...]:
    given = (outputs,) if isinstance(outputs, str) else outputs
    given = tuple(given) if isinstance(given, list | tuple) else ()
    if not given or any(given.count(name) > 1 or name not in OUTPUTS for name in given):
        rule = f"`outputs` must be of {', '.join(OUTPUTS)}, each once"
        raise ValueError(checks.message(function, rule, {"outputs": repr(outputs)}))
    return given


def _fitting_operands(function: str, call: ExportCall) -> None:
    """What joins the scores has a dtype and a shape that fit them."""
    pairs = call.sizes.pairs
    fitting = {call.query.dtype, "float32", call.held}
    floats = {
        name: each
        for name, each in (("scale", call.scale), ("sinks", call.sinks))
        if not isinstance(each, float)
    }
    for name, each in floats.items():
        if each is None:
            continue
        if each.dtype not in fitting:
            rule = f"`{name}` must have the dtype of `query` or of the scores ({call.held})"
            raise TypeError(checks.message(function, rule, {f"{name}.dtype": each.dtype}))
        target = (*pairs[:-1], 1) if name == "scale" else (*call.sizes.batch, call.sizes.query_heads)
        letters = "(..., Hq, L, 1)" if name == "scale" else "(..., Hq)"
        checks.broadcasts(function, name, cast(tuple[int, ...], each.shape), target, letters)
    for name in ("attn_mask", "bias"):
        for each in _arrays(getattr(call, name)):
            if (name == "bias" or each.dtype != "bool") and each.dtype not in fitting:
                rule = f"`query` and `{name}` must have one dtype"
                got = {"query.dtype": call.query.dtype, f"{name}.dtype": each.dtype}
                raise TypeError(checks.message(function, rule, got))
            checks.broadcasts(function, name, cast(tuple[int, ...], each.shape), pairs, "(..., Hq, L, S)")


def _arrays(value: object) -> Iterator[GraphOperand]:
    """The arrays of pairs that a mask or a bias is or is made of."""
    if isinstance(value, Input | Initializer):
        yield value
    elif isinstance(value, Mask | Bias):
        for each in value.arguments.values() if value.name == "from_array" else value.parts:
            yield from _arrays(each)


def _sizes(function: str, specs: Mapping[str, TensorSpec], layout: str) -> checks.Sizes:
    """The lengths of the call, whose heads and widths are ints: the graph is written for them."""
    heads, length = (-3, -2) if layout == checks.HLE else (-2, -3)
    for name in ("query", "key", "value"):
        shape = specs[name].shape
        axes = {-1: "the width"} | ({heads: "the heads"} if len(shape) > 2 else {})
        for axis, what in axes.items():
            if shape and isinstance(shape[axis], str):
                rule = f"{what} of `{name}` (axis {axis}) must be an int"
                raise ValueError(checks.message(function, rule, {f"{name}.shape": shape}))
    shapes = {name: specs[name].shape for name in ("query", "key", "value")}
    # The rules compare lengths and never count with them, so a name serves where the type says int.
    new = checks.shapes(function, *(cast(tuple[int, ...], shape) for shape in shapes.values()), layout=layout)
    if not {"past_key", "past_value", "past_lengths"} & specs.keys():
        return new
    keys = _past(function, specs, length)
    return new._replace(keys=cast(int, keys))


def _past(function: str, specs: Mapping[str, TensorSpec], axis: int) -> int | str:
    """The length of a cache with the new tokens in it."""
    if not {"past_key", "past_value"} <= specs.keys():
        rule = "`past_key` and `past_value` must be given together"
        raise ValueError(checks.message(function, rule, {name: str(spec) for name, spec in specs.items()}))
    lengths = []
    for name in ("key", "value"):
        past, new = specs[f"past_{name}"].shape, specs[name].shape
        if (
            len(new) < 3
            or len(past) != len(new)
            or any(
                one != other
                for at, (one, other) in enumerate(zip(past, new, strict=True))
                if at != len(new) + axis
            )
        ):
            rule = f"`past_{name}` must have 3 axes or more, and those of `{name}` but for axis {axis}"
            raise ValueError(checks.message(function, rule, {f"past_{name}.shape": past, f"{name}.shape": new}))
        lengths.append(past[axis])
    if lengths[0] != lengths[1]:
        rule = "`past_key` and `past_value` must be equally long"
        raise ValueError(checks.message(function, rule, {"past_key": lengths[0], "past_value": lengths[1]}))
    if "past_lengths" not in specs:
        return total(lengths[0], specs["key"].shape[axis])
    batch = specs["key"].shape[:-3]
    if specs["past_lengths"].shape != batch or len(batch) != 1:
        rule = "`past_lengths` must have one integer a batch entry, (B,)"
        got = {"past_lengths.shape": specs["past_lengths"].shape, "batch": batch}
        raise ValueError(checks.message(function, rule, got))
    return lengths[0]
