"""The arguments of an export: refused with a message, or turned into a call."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import array_api_compat

from sdpa_xp._checks.arrays import joins_scores, refuse_other_kind, warn_if_zeros_and_ones
from sdpa_xp._checks.keywords import check_flag, check_layout
from sdpa_xp._checks.numbers import check_number, check_probability, check_softcap
from sdpa_xp._checks.shapes import HLE, LHE, Sizes, check_broadcasts, check_shapes
from sdpa_xp._libraries.dtypes import dtype_name
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import OUTPUTS, SPECS, ExportCall, ExportOptions, Layout
from sdpa_xp_export._call.length_sums import total
from sdpa_xp_export._call.operands import GraphOperand, Initializer, Input, OperandNamer, kind_of
from sdpa_xp_export._dtypes.promotion import FLOATING, INTEGERS
from sdpa_xp_export.spec import TensorSpec


def checked_call(
    function: str, query: object, key: object, value: object, options: ExportOptions
) -> ExportCall:
    """Return the call, if the library takes it and a graph can state it.

    Args:
        function: The function that messages name.
        query: A TensorSpec, like key and value.
        key: Likewise.
        value: Likewise.
        options: All other arguments, as the caller passed them.
    """
    specs = _specs(function, query, key, value, options)
    if check_probability(function, "dropout_p", options.dropout_p):
        rule = "`dropout_p` must be 0, since a graph draws no random numbers"
        raise ArgumentValueError(function, rule, {"dropout_p": options.dropout_p})
    dtype = specs["query"].dtype
    for name, spec in specs.items():
        _check_dtype(function, name, spec, dtype)
        _check_not_empty(function, name, spec)
    check_layout(function, options.layout)
    layout = cast(Layout, options.layout)
    sizes = _sizes(function, specs, layout)
    warn_of_zeros_and_ones(function, options.attn_mask)
    namer = OperandNamer(function, inputs=dict(specs))
    mask, bias = (
        namer.operand(name, _mask_or_bias(function, name, getattr(options, name)))
        for name in ("attn_mask", "bias")
    )
    wide = "float64" if "float64" in (dtype, options.softmax_dtype) else "float32"
    if options.softmax_dtype not in (None, wide):
        rule = "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores"
        raise ArgumentValueError(function, rule, {"softmax_dtype": repr(options.softmax_dtype)})
    scale = _scale(function, namer, options.scale, sizes, wide)
    sinks = _sinks(function, namer, options.sinks)
    call = ExportCall(
        query=specs["query"],
        key=specs["key"],
        value=specs["value"],
        past_key=specs.get("past_key"),
        past_value=specs.get("past_value"),
        past_lengths=specs.get("past_lengths"),
        attn_mask=mask,
        bias=bias,
        is_causal=check_flag(function, "is_causal", options.is_causal),
        scale=scale,
        softcap=check_softcap(function, options.softcap, wide),
        sinks=sinks,
        softmax_dtype=options.softmax_dtype,
        layout=layout,
        outputs=_outputs(function, options.outputs),
        inputs=namer.inputs,
        initializers=namer.initializers,
        cached="past_key" in specs or (bool(options.cached) and sizes.queries != sizes.keys),
        sizes=sizes,
    )
    _check_operands(function, call)
    return call


def _specs(
    function: str, query: object, key: object, value: object, options: ExportOptions
) -> dict[str, TensorSpec]:
    """Return the specs of query, key, value and cache by name."""
    specs = {"query": query, "key": key, "value": value}
    specs |= {name: spec for name in SPECS[3:] if (spec := getattr(options, name)) is not None}
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            rule = f"`{name}` must be a TensorSpec"
            hint = f"Write TensorSpec.parse({spec!r})." if isinstance(spec, str) else ""
            raise ArgumentTypeError(function, rule, {name: type(spec).__name__}, hint)
    return cast(dict[str, TensorSpec], specs)


def _check_dtype(function: str, name: str, spec: TensorSpec, dtype: str) -> None:
    if name == "past_lengths":
        if spec.dtype not in INTEGERS:
            rule = "`past_lengths` must hold integers"
            raise ArgumentTypeError(function, rule, {f"{name}.dtype": spec.dtype})
        return
    if not spec.floating:
        rule = f"`{name}` must have a floating dtype"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": spec.dtype})
    if spec.dtype != dtype:
        rule = f"`query` and `{name}` must have one dtype"
        raise ArgumentTypeError(function, rule, {"query.dtype": dtype, f"{name}.dtype": spec.dtype})


def _check_not_empty(function: str, name: str, operand: GraphOperand | TensorSpec) -> None:
    if 0 in operand.shape:
        rule = f"the lengths of `{name}` must be at least 1, since a graph of attention is not made for none"
        hint = "Write a name, such as 'L', for an open length."
        raise ArgumentValueError(function, rule, {f"{name}.shape": operand.shape}, hint)


def _mask_or_bias(function: str, name: str, value: object) -> object:
    if isinstance(value, TensorSpec) and value.dtype in INTEGERS:
        raise _integers_refused(function, name, value.dtype)
    if name == "bias" and isinstance(value, TensorSpec) and value.dtype == "bool":
        raise ArgumentTypeError(function, "`bias` must have a floating dtype", {"bias.dtype": "bool"})
    kind, other, hint = (Mask, Bias, "bias") if name == "attn_mask" else (Bias, Mask, "attn_mask")
    refuse_other_kind(function, name, value, other, f"Pass it as `{hint}`.")
    known = isinstance(value, kind | TensorSpec | GraphOperand) or array_api_compat.is_array_api_obj(value)
    if value is not None and not known:
        rule = f"`{name}` must be a {kind.__name__}, a TensorSpec or an array"
        raise ArgumentTypeError(function, rule, {name: repr(value)})
    return value


def warn_of_zeros_and_ones(function: str, mask: Any) -> None:
    """Warn of an array of floats as `attn_mask` that masks nothing, as the library does."""
    has_numbers = array_api_compat.is_array_api_obj(mask) and not isinstance(mask, TensorSpec | GraphOperand)
    if has_numbers and dtype_name(mask.dtype) in FLOATING:
        warn_if_zeros_and_ones(function, mask)


def _integers_refused(function: str, name: str, dtype: str) -> TypeError:
    """Return the error for a mask or a bias of integers, which may mean several things."""
    if name == "attn_mask":
        rule = "`attn_mask` must be boolean (True = may attend) or floating (added to the scores)"
        hint = "Pass `attn_mask != 0` if 1 means may attend, `== 0` if 0 does, or a spec of bool."
    else:
        rule, hint = (
            f"`{name}` must be floating",
            "Convert it with astype, or pass a spec of float32.",
        )
    return ArgumentTypeError(function, rule, {f"{name}.dtype": dtype}, hint)


def _scale(function: str, namer: OperandNamer, scale: object, sizes: Sizes, wide: str) -> float | GraphOperand:
    if scale is None:
        return 1.0 / math.sqrt(sizes.width)
    if isinstance(scale, numbers.Number):
        return check_number(function, "scale", scale, wide)
    operand = namer.operand("scale", scale)
    if isinstance(operand, Input | Initializer):
        return operand
    return check_number(function, "scale", scale, wide)


def _sinks(function: str, namer: OperandNamer, sinks: object) -> GraphOperand | None:
    operand = namer.operand("sinks", sinks)
    if operand is None or isinstance(operand, Input | Initializer):
        return operand
    rule = "`sinks` must be a TensorSpec or an array, (..., Hq)"
    raise ArgumentTypeError(function, rule, {"sinks": type(sinks).__name__})


def _outputs(function: str, outputs: object) -> tuple[str, ...]:
    names = (outputs,) if isinstance(outputs, str) else outputs
    names = tuple(names) if isinstance(names, list | tuple) else ()
    if not names or any(names.count(name) > 1 or name not in OUTPUTS for name in names):
        rule = f"`outputs` must be some of {', '.join(OUTPUTS)}, each at most once"
        raise ArgumentValueError(function, rule, {"outputs": repr(outputs)})
    return names


def _check_operands(function: str, call: ExportCall) -> None:
    """Check that the dtype and the shape of everything that joins the scores fit them."""
    joins = partial(joins_scores, query=call.query.dtype, accumulation=call.accumulation_dtype)
    pairs = call.sizes.scores_shape
    for name, operand in (("scale", call.scale), ("sinks", call.sinks)):
        if operand is None or isinstance(operand, float):
            continue
        if not joins(operand.dtype):
            rule = f"`{name}` must have the dtype of `query` or of the scores ({call.accumulation_dtype})"
            raise ArgumentTypeError(function, rule, {f"{name}.dtype": operand.dtype})
        target = (*pairs[:-1], 1) if name == "scale" else (*call.sizes.batch, call.sizes.query_heads)
        letters = "(..., Hq, L, 1)" if name == "scale" else "(..., Hq)"
        check_broadcasts(function, name, cast(tuple[int, ...], operand.shape), target, letters)
    for name in ("attn_mask", "bias"):
        for operand in _arrays(getattr(call, name)):
            if operand.dtype in INTEGERS:
                raise _integers_refused(function, name, operand.dtype)
            if (name == "bias" or operand.dtype != "bool") and not joins(operand.dtype):
                rule = f"`query` and `{name}` must have one dtype"
                got = {"query.dtype": call.query.dtype, f"{name}.dtype": operand.dtype}
                raise ArgumentTypeError(function, rule, got)
            shape = cast(tuple[int, ...], operand.shape)
            hint = _hint_for_named_lengths(name, operand, pairs)
            check_broadcasts(function, name, shape, pairs, "(..., Hq, L, S)", hint)


def _hint_for_named_lengths(name: str, operand: GraphOperand, pairs: tuple[int | str, ...]) -> str:
    """Return what to pass in place of an array, whose lengths are fixed; "" if the call's are fixed too."""
    rank = len(operand.shape)
    named = pairs[-rank:] if rank else ()
    if isinstance(operand, Input) or rank > len(pairs) or not any(isinstance(n, str) for n in named):
        return ""
    lengths = tuple(1 if fixed == 1 else n for fixed, n in zip(operand.shape, named, strict=True))
    pattern = "a mask such as masks.causal()" if name == "attn_mask" else "a bias such as biases.alibi(heads)"
    return f"An array has fixed lengths: pass {pattern}, or TensorSpec({operand.dtype!r}, {lengths})."


def _arrays(value: object) -> Iterator[GraphOperand]:
    """Yield the arrays over all pairs that a mask or a bias is, or is made of."""
    if isinstance(value, Input | Initializer):
        yield value
    elif isinstance(value, Mask | Bias):
        for part in value.arguments.values() if kind_of(value) == "from_array" else value.parts:
            yield from _arrays(part)


def _sizes(function: str, specs: Mapping[str, TensorSpec], layout: Layout) -> Sizes:
    """Return the lengths of the call. Heads and widths must be ints, since the graph is written for them."""
    heads, length = (-3, -2) if layout == HLE else (-2, -3)
    for name in ("query", "key", "value"):
        shape = specs[name].shape
        axes = {-1: "the width"} | ({heads: "the heads"} if len(shape) > 2 else {})
        for axis, what in axes.items():
            if shape and isinstance(shape[axis], str):
                rule = f"{what} of `{name}` (axis {axis}) must be an int"
                is_swapped = axis == heads and isinstance(shape[length], int)
                other = LHE if layout == HLE else HLE
                hint = f"If heads are axis {length}, pass layout={other!r}." if is_swapped else ""
                raise ArgumentValueError(function, rule, {f"{name}.shape": shape}, hint)
    shapes = {name: specs[name].shape for name in ("query", "key", "value")}
    # The rules compare lengths and never count with them, so a name serves where the type says int.
    new = check_shapes(function, *(cast(tuple[int, ...], shape) for shape in shapes.values()), layout=layout)
    if not {"past_key", "past_value", "past_lengths"} & specs.keys():
        return new
    return new._replace(keys=cast(int, _cached_keys(function, specs, length)))


def _cached_keys(function: str, specs: Mapping[str, TensorSpec], axis: int) -> int | str:
    """Return the length of a cache with the new tokens in it."""
    if not {"past_key", "past_value"} & specs.keys():
        rule = "`past_lengths` needs `past_key` and `past_value`"
        raise ArgumentValueError(function, rule, {"past_lengths": specs["past_lengths"]})
    if not {"past_key", "past_value"} <= specs.keys():
        rule = "`past_key` and `past_value` must be given together"
        raise ArgumentValueError(function, rule, {name: str(spec) for name, spec in specs.items()})
    lengths = []
    for name in ("key", "value"):
        past, new = specs[f"past_{name}"].shape, specs[name].shape
        if len(new) < 3 or len(past) != len(new) or _without(past, axis) != _without(new, axis):
            rule = f"`past_{name}` must have at least 3 axes, and the shape of `{name}` except for axis {axis}"
            raise ArgumentValueError(function, rule, {f"past_{name}.shape": past, f"{name}.shape": new})
        lengths.append(past[axis])
    if lengths[0] != lengths[1]:
        rule = "`past_key` and `past_value` must have the same length"
        raise ArgumentValueError(function, rule, {"past_key": lengths[0], "past_value": lengths[1]})
    if "past_lengths" not in specs:
        return total(lengths[0], specs["key"].shape[axis])
    batch = specs["key"].shape[:-3]
    if specs["past_lengths"].shape != batch or len(batch) != 1:
        rule = "`past_lengths` must have one integer per batch entry, (B,)"
        got = {"past_lengths.shape": specs["past_lengths"].shape, "batch": batch}
        raise ArgumentValueError(function, rule, got)
    return lengths[0]


def _without(shape: tuple[int | str, ...], axis: int) -> tuple[int | str, ...]:
    """Return the lengths of all axes but one."""
    return tuple(length for index, length in enumerate(shape) if index != len(shape) + axis)
