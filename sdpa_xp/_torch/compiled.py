"""Attention inside torch.compile, which keeps it as one operator of torch: `operation.py`, of a call as text.

The compiled program calls the operator with the text. The operator computes the operation as if there were no
compiler: memory grows with L + S, and NaN can be looked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .._call import PreparedCall, prepare
from .._call.options import CallOptions, arrays_of
from .._checks.arrays import HLE, broadcast
from .._libraries import FLOATING, accumulation_dtype, dtype_name
from .._libraries.protocols import Array
from .._libraries.torch import TORCH
from ..errors import PACKAGE
from .description import Description, count_arrays, describe, options_of
from .operation import INPUTS, AttentionOperation, RecordedCall, recorded

torch: Any = import_module("torch")
SCHEMA = (
    "(str derivative, str function, bool queries_at_end, str options, SymInt[] integers, float[] numbers, "
    "Tensor[] arrays) -> Tensor[]"
)
"""The names and the directions of an operation, as JSON; the public function that was called, and whether its
queries are the last tokens of the keys; what `describe` makes of its options; and all arrays."""


def run(call: PreparedCall) -> tuple[Array, ...]:
    """Return the results of the operation of a call that torch.compile traces."""
    checked = {name: value for name, value in call.options._asdict().items() if name in CallOptions._fields}
    is_causal = bool(call.call_options.is_causal)
    options = call.call_options._replace(**checked, is_causal=is_causal, layout=HLE, implementation="xp")
    description, arrays = describe(options)
    of_call = call.grid.function, call.grid.function.startswith("KVCache."), *description
    return tuple(OPERATOR("[[], []]", *of_call, [*call.arrays.values(), *arrays]))


def _operation_of(derivative: str, function: str, at_end: bool, *described: Any) -> tuple[Any, list[Any]]:
    """Return the operation of the inputs of the operator, and its arrays."""
    # The library is not looked up: the compiler guards what knows the types of arrays, and these may be fake.
    *values, arrays = described
    description = Description(*values)
    of_call = arrays[len(arrays) - len(INPUTS) - count_arrays(description) :]
    options = options_of(description, of_call[len(INPUTS) :], TORCH.namespace(of_call[0]))
    named: Any = arrays_of(options)
    names = [name if dtype_name(x.dtype) in FLOATING else None for name, x in named]

    def with_arrays(arrays: Sequence[Array]) -> PreparedCall:
        inputs = dict(zip(INPUTS, arrays, strict=False))
        return recorded(prepare(function, inputs, options, queries_at_end=at_end)).with_arrays(arrays)

    def apply(operation: AttentionOperation, arrays: Sequence[Array]) -> Sequence[Array]:
        derivative = json.dumps([operation.names, operation.directions])
        results: Sequence[Array] = OPERATOR(derivative, function, at_end, *values, arrays)
        return results

    call = RecordedCall(options, (*INPUTS, *names), with_arrays, apply=apply)
    return AttentionOperation(call, *json.loads(derivative)), arrays


def _compute(*inputs: Any) -> list[Any]:
    *text, arrays = inputs
    with torch.no_grad():
        operation, arrays = _operation_of(*text, [x.detach() for x in arrays])
        return [x.contiguous() for x in operation.run(arrays)]  # as those of `_trace`


def _trace(*inputs: Any) -> list[Any]:
    """Return arrays of the shapes and dtypes of the results of an operation."""
    operation, arrays = _operation_of(*inputs)
    _, of_call = operation.split(arrays)
    query, key, value, *_ = of_call
    named = operation.call.by_name(of_call)
    orders = 2 if operation.directions else 1
    gradients = [named[name].new_empty(named[name].shape) for _ in range(orders) for name in operation.names]
    if gradients and not operation.directions:
        return gradients
    leading = broadcast(*(x.shape[:-3] for x in (query, key, value))) or ()
    dtype = operation.call.options.softmax_dtype or accumulation_dtype(torch, query.dtype)
    rows = *leading, *query.shape[-3:-1]
    output = query.new_empty((*rows, value.shape[-1]), dtype=dtype)
    if operation.keeps_results:
        return [output, query.new_empty((*rows, 2), dtype=dtype)]
    return [output, *gradients]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Any]) -> None:
    operation, arrays = _operation_of(*inputs)
    *ctx.text, _ = inputs
    ctx.count = len(arrays)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays, *(output if operation.keeps_results else []))


def _backward(ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad[-1]
    operation, arrays = _operation_of(*ctx.text, saved[: ctx.count])
    gradients = operation.pull(arrays, saved[ctx.count :], cotangents, needed)
    if gradients is None:
        raise NotImplementedError("inside torch.compile, attention has first and second derivatives only")
    # torch takes an empty list for a list of tensors.
    return *([] if x == [] else None for x in ctx.text), [*gradients]


OPERATOR: Any = torch.library.custom_op(
    f"{PACKAGE.replace('.', '_')}::attention", _compute, mutates_args=(), schema=SCHEMA
)
OPERATOR.register_fake(_trace)
OPERATOR.register_autograd(_backward, setup_context=_keep)
