"""Attention inside a compiler, which keeps it as one operation: `_operations.py`, of a call described as text.

The compiled program calls `restore_operation` with the text, and computes the operation from arrays as if there
were no compiler. So memory grows with L + S, and NaN can be looked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from . import _operations
from ._call.description import Description, count_arrays, describe, restore
from ._call.options import CallOptions, arrays_of
from ._call.prepared_call import PreparedCall, prepare
from ._checks.arrays import HLE, broadcast
from ._libraries import FLOATING, accumulation_dtype, dtype_name, libraries
from ._libraries.base import Library
from ._libraries.capabilities import Autograd, OperationText
from ._libraries.protocols import Array, Shape
from ._operations import INPUTS, RepeatedCall


def run(call: PreparedCall, options: CallOptions) -> Sequence[Array]:
    """Return the results of `OutputOperation` of a call that a compiler traces."""
    checked = call.options
    options = options._replace(
        is_causal=bool(options.is_causal),
        scale=checked.scale,
        softcap=checked.softcap,
        sinks=checked.sinks,
        layout=HLE,
        implementation="xp",
    )
    description, arrays = describe(options)
    text = OperationText('["OutputOperation"]', call.grid.function, call.grid.position != 0, *description)
    autograd = cast(Autograd, call.grid.library.autograd)
    return autograd.compiled(text, [*call.arrays.values(), *arrays])


@dataclass(frozen=True, slots=True)
class DescribedCall(RepeatedCall):
    """A call that is prepared when it is computed."""

    library: Library
    text: OperationText
    options: CallOptions
    names: tuple[str | None, ...]

    def with_arrays(self, arrays: Sequence[Array]) -> tuple[PreparedCall, dict[str, Array]]:
        inputs = dict(zip(INPUTS, arrays, strict=False))
        at_end = self.text.queries_at_end
        call = prepare(self.text.function, inputs, self.options, queries_at_end=at_end)
        return _operations.recorded(call, self.options).with_arrays(arrays)

    def apply(self, operation: _operations.CallOperation, arrays: Sequence[Array]) -> Sequence[Array]:
        kind = json.dumps([type(operation).__name__, *operation.arguments])
        autograd = cast(Autograd, self.library.autograd)
        return autograd.compiled(self.text._replace(operation=kind), arrays)


def restore_operation(
    library: Library, text: OperationText, arrays: Sequence[Array]
) -> _operations.CallOperation:
    """Return the operation of a text, of which `arrays` are all arrays."""
    # The library is not looked up: the compiler guards what knows the types of arrays, and these may be fake.
    description = Description(text.options, text.integers, text.numbers)
    inputs = len(INPUTS)
    of_call = arrays[len(arrays) - inputs - count_arrays(description) :]
    options = restore(description, of_call[inputs:], library.namespace(of_call[0]))
    names = [name if dtype_name(cast(Array, x).dtype) in FLOATING else None for name, x in arrays_of(options)]
    kind, *arguments = json.loads(text.operation)
    call = DescribedCall(library, text, options, (*INPUTS, *names))
    operation: _operations.CallOperation = getattr(_operations, kind)(call, *map(_frozen, arguments))
    return operation


def empty_results(
    library: Library, operation: _operations.CallOperation, arrays: Sequence[Array]
) -> list[Array]:
    """Return arrays of the shapes and dtypes of the results of an operation."""
    _, of_call = operation.split(arrays)
    query, key, value, *_ = of_call
    xp, device = library.namespace(query), library.device(query)

    def empty(shape: Shape, dtype: Any) -> Array:
        return xp.empty(shape, dtype=dtype, device=device)

    if isinstance(operation, _operations.GradientsOperation | _operations.SecondOperation):
        named = operation.recorded.by_name(of_call)
        gradients = [named[name] for name in operation.names]
        return [empty(x.shape, x.dtype) for x in gradients * (operation.returned // len(gradients))]
    leading = broadcast(*(x.shape[:-3] for x in (query, key, value))) or ()
    dtype = operation.recorded.options.softmax_dtype or accumulation_dtype(xp, query.dtype)
    rows = *leading, *query.shape[-3:-1]
    output = empty((*rows, value.shape[-1]), dtype)
    return [output, empty((*rows, 2), dtype)] if operation.keeps_results else [output]


def _frozen(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


for _library in libraries():
    # When this file is imported, since a compiler does not trace that, and takes only what is defined.
    if _library.autograd is not None:
        functions = partial(restore_operation, _library), partial(empty_results, _library)
        _library.autograd.define_operator(*functions)
