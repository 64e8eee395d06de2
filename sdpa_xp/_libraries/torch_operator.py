"""An operation of ours as an operator of torch, which torch.compile keeps in its graph as it is.

Imported when torch.compile first traces a call that is differentiated, as torch defines it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..errors import PACKAGE
from .capabilities import Operation, OperationText

torch: Any = import_module("torch")
SCHEMA = (
    "(str operation, str function, bool queries_at_end, str options, SymInt[] integers, float[] numbers, "
    "Tensor[] arrays) -> Tensor[]"
)
"""The fields of `OperationText`, and all arrays."""


def define(
    restore: Callable[[OperationText, Sequence[Any]], Any],
    empty_results: Callable[[Any, Sequence[Any]], list[Any]],
) -> None:
    """Define the operator `torch.ops.sdpa_xp.attention`.

    `restore` returns the operation of a text for its arrays, and `empty_results` the results without values.
    """

    def restored(inputs: Sequence[Any]) -> tuple[Operation, list[Any]]:
        *text, arrays = inputs
        return restore(OperationText(*text), arrays), arrays

    def compute(*inputs: Any) -> list[Any]:
        *text, arrays = inputs
        with torch.no_grad():
            operation, arrays = restored((*text, [x.detach() for x in arrays]))
            results: Sequence[Any] = operation.run(arrays)
            return [x.contiguous() for x in results]  # as those of `trace`

    def trace(*inputs: Any) -> list[Any]:
        return empty_results(*restored(inputs))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Any]) -> None:
        operation, arrays = restored(inputs)
        *ctx.text, _ = inputs
        ctx.count = len(arrays)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, *(output if operation.keeps_results else []))

    def backward(ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[-1]
        operation, arrays = restored((*ctx.text, saved[: ctx.count]))
        gradients = operation.pull(arrays, saved[ctx.count :], cotangents, needed)
        if gradients is None:
            raise NotImplementedError("inside torch.compile, attention has first and second derivatives only")
        # torch takes an empty list for a list of tensors.
        return *([] if x == [] else None for x in ctx.text), [*gradients]

    operator = torch.library.custom_op(
        f"{PACKAGE.replace('.', '_')}::attention", compute, mutates_args=(), schema=SCHEMA
    )
    operator.register_fake(trace)
    operator.register_autograd(backward, setup_context=keep)
