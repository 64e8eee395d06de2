"""The arguments of a call: each is refused with a message, or turned into what the call holds."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any, cast

import array_api_compat

from sdpa_xp._checks.arrays import HLE, LHE, Sizes, check_shapes
from sdpa_xp._checks.keywords import (
    check_layout,
    check_number,
    check_probability,
    check_softcap,
    refuse_other_kind,
)
from sdpa_xp._checks.score_arrays import check_broadcasts, joins_scores, warn_if_zeros_and_ones
from sdpa_xp._libraries import dtype_name
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp.masks import Mask

from .._dtypes.dtype import FLOATING, INTEGERS
from ..spec import SymbolicShape, TensorSpec, as_lengths, spec_hint, total
from .operands import AXES, OUTPUTS, GraphOperand, Input, OperandNamer, kind_of

SPECS = ("query", "key", "value", "past_key", "past_value", "past_lengths")


class Arguments:
    """What a caller passed, of which specs and layout are checked, and what a check needs of other arguments.

    Each function below checks one argument, and returns what the call holds instead.
    """

    def __init__(self, function: str, passed: Mapping[str, object]) -> None:
        self.function = function
        self.passed = passed
        self.specs = _specs(function, passed)
        dtype = self.specs["query"].dtype
        for name, spec in self.specs.items():
            _check_dtype(function, name, spec, dtype)
            _check_not_empty(function, name, spec)
        check_layout(function, passed["layout"])
        self.layout = cast(str, passed["layout"])
        self.sizes = _sizes(function, self.specs, self.layout)
        # A wrong `softmax_dtype` is refused in its turn: it changes nothing here.
        dtype_of_scores: Any = passed["softmax_dtype"]  # of any library, or its name
        is_name = dtype_of_scores is None or isinstance(dtype_of_scores, str)
        self.softmax_dtype = dtype_of_scores if is_name else dtype_name(dtype_of_scores)
        self.accumulation_dtype = "float64" if "float64" in (dtype, self.softmax_dtype) else "float32"
        self.namer = OperandNamer(function, inputs=dict(self.specs))

    def joining(self, name: str, operand: GraphOperand, target: SymbolicShape, letters: str) -> GraphOperand:
        """Return an operand of the scores whose dtype and shape are checked."""
        if not self._joins(operand):
            rule = f"`{name}` must have the dtype of `query` or of the scores ({self.accumulation_dtype})"
            raise ArgumentTypeError(self.function, rule, {f"{name}.dtype": operand.dtype})
        check_broadcasts(self.function, name, as_lengths(operand.shape), as_lengths(target), letters)
        return operand

    def check_pairs(self, name: str, operand: GraphOperand) -> None:
        """Check an array over all pairs, which a mask or a bias is or holds."""
        if operand.dtype in INTEGERS:
            # They may mean several things.
            rule, hint = f"`{name}` must be floating", "Convert it with astype, or pass a spec of float32."
            if name == "attn_mask":
                rule = "`attn_mask` must be boolean (True = may attend) or floating (added to the scores)"
                hint = "Pass `attn_mask != 0` if 1 means may attend, `== 0` if 0 does, or a spec of bool."
            raise ArgumentTypeError(self.function, rule, {f"{name}.dtype": operand.dtype}, hint)
        query = self.specs["query"].dtype
        if (name == "bias" or operand.dtype != "bool") and not self._joins(operand):
            got = {"query.dtype": query, f"{name}.dtype": operand.dtype}
            raise ArgumentTypeError(self.function, f"`query` and `{name}` must have one dtype", got)
        pairs = self.sizes.scores_shape
        hint = _hint_for_named_lengths(name, operand, pairs)
        check_broadcasts(self.function, name, as_lengths(operand.shape), pairs, "(..., Hq, L, S)", hint)

    def _joins(self, operand: GraphOperand) -> bool:
        query, accumulation = self.specs["query"].dtype, self.accumulation_dtype
        return joins_scores(operand.dtype, query=query, accumulation=accumulation)


def mask_or_bias(arguments: Arguments, name: str) -> Any:
    """Return a mask or a bias with operands of the graph, or such an operand."""
    function, value = arguments.function, arguments.passed[name]
    if name == "bias" and isinstance(value, TensorSpec) and value.dtype == "bool":
        raise ArgumentTypeError(function, "`bias` must have a floating dtype", {"bias.dtype": "bool"})
    kind, other, hint = (Mask, Bias, "bias") if name == "attn_mask" else (Bias, Mask, "attn_mask")
    refuse_other_kind(function, name, value, other, f"Pass it as `{hint}`.")
    known = isinstance(value, kind | TensorSpec | GraphOperand) or array_api_compat.is_array_api_obj(value)
    if value is not None and not known:
        rule = f"`{name}` must be a {kind.__name__}, a TensorSpec or an array"
        raise ArgumentTypeError(function, rule, {name: repr(value)})
    if name == "attn_mask":  # before its numbers become an initializer, which has no library to read them by
        warn_of_zeros_and_ones(function, value)
    operand = arguments.namer.operand(name, value)
    # What masks and biases other than arrays hold is checked by their lowering, which knows what it means.
    for array in _arrays(operand):
        arguments.check_pairs(name, array)
    return operand


def scale(arguments: Arguments, name: str) -> float | GraphOperand:
    """Return a number, 1 / sqrt(E) if there is none, or an operand (..., Hq, L, 1)."""
    value = arguments.passed[name]
    if value is None:
        return 1.0 / math.sqrt(arguments.sizes.width)
    # A scalar of NumPy is an array to array-api-compat, but here a number that a node has as an attribute.
    operand = value if isinstance(value, numbers.Number) else arguments.namer.operand(name, value)
    if isinstance(operand, GraphOperand):
        target = (*arguments.sizes.scores_shape[:-1], 1)
        return arguments.joining(name, operand, target, "(..., Hq, L, 1)")
    return check_number(arguments.function, name, value, arguments.accumulation_dtype)


def softcap(arguments: Arguments, name: str) -> float | None:
    return check_softcap(arguments.function, arguments.passed[name], arguments.accumulation_dtype)


def sinks(arguments: Arguments, name: str) -> GraphOperand | None:
    operand = arguments.namer.operand(name, arguments.passed[name])
    if operand is None:
        return None
    if not isinstance(operand, GraphOperand):
        rule = f"`{name}` must be a TensorSpec or an array, (..., Hq)"
        raise ArgumentTypeError(arguments.function, rule, {name: type(operand).__name__})
    sizes = arguments.sizes
    return arguments.joining(name, operand, (*sizes.batch, sizes.query_heads), "(..., Hq)")


def no_dropout(arguments: Arguments, name: str) -> float:
    value = arguments.passed[name]
    if check_probability(arguments.function, name, value):
        rule = f"`{name}` must be 0, since a graph draws no random numbers"
        raise ArgumentValueError(arguments.function, rule, {name: value})
    return 0.0


def softmax_dtype(arguments: Arguments, name: str) -> Any:
    if arguments.softmax_dtype not in (None, arguments.accumulation_dtype):
        rule = f"`{name}` must be None, or float32 or float64 and no narrower than the scores"
        raise ArgumentValueError(arguments.function, rule, {name: repr(arguments.passed[name])})
    return arguments.softmax_dtype


def outputs(arguments: Arguments, name: str) -> tuple[str, ...]:
    value = arguments.passed[name]
    names = (value,) if isinstance(value, str) else value
    names = tuple(names) if isinstance(names, list | tuple) else ()
    known = AXES if arguments.passed["top_k"] or arguments.passed["block_size"] else OUTPUTS
    if not names or any(names.count(name) > 1 or name not in known for name in names):
        rule = f"`{name}` must be some of {', '.join(OUTPUTS)}, each at most once"
        is_other_statistic = any(name in ("top_keys", "block_sums") for name in names)
        hint = "`to_onnx` traces attention_statistics, which has the others." if is_other_statistic else ""
        raise ArgumentValueError(arguments.function, rule, {name: repr(value)}, hint)
    return names


def as_passed(arguments: Arguments, name: str) -> Any:
    return arguments.passed[name]  # the library has checked it, or the lengths were read with it


def cached(arguments: Arguments, name: str) -> bool:
    """Return whether the queries are the last of more tokens."""
    sizes = arguments.sizes
    # With as many queries as keys a cache was empty before this call, so the first query is the first token.
    return "past_key" in arguments.specs or (bool(arguments.passed[name]) and sizes.queries != sizes.keys)


def warn_of_zeros_and_ones(function: str, mask: Any) -> None:
    """Warn of an array of floats as `attn_mask` that masks nothing, as the library does."""
    has_numbers = array_api_compat.is_array_api_obj(mask) and not isinstance(mask, TensorSpec | GraphOperand)
    if has_numbers and dtype_name(mask.dtype) in FLOATING:
        warn_if_zeros_and_ones(function, mask)


def _specs(function: str, passed: Mapping[str, object]) -> dict[str, TensorSpec]:
    """Return the specs of query, key, value and cache by name."""
    specs = {name: passed[name] for name in SPECS[:3]}
    specs |= {name: spec for name in SPECS[3:] if (spec := passed[name]) is not None}
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            rule = f"`{name}` must be a TensorSpec"
            raise ArgumentTypeError(function, rule, {name: type(spec).__name__}, spec_hint(spec))
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
    if isinstance(value, GraphOperand):
        yield value
    elif isinstance(value, Mask | Bias):
        for part in value.arguments.values() if kind_of(value) == "from_array" else value.parts:
            yield from _arrays(part)


def _sizes(function: str, specs: Mapping[str, TensorSpec], layout: str) -> Sizes:
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
                hint = f"If heads are axis {length}, pass `layout={other!r}`." if is_swapped else ""
                raise ArgumentValueError(function, rule, {f"{name}.shape": shape}, hint)
    shapes = {name: specs[name].shape for name in ("query", "key", "value")}
    new = check_shapes(function, *map(as_lengths, shapes.values()), layout=layout)
    if not {"past_key", "past_value", "past_lengths"} & specs.keys():
        return new
    return new._replace(keys=cast(int, _cached_keys(function, specs, length)))  # or a name, as in `as_lengths`


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
