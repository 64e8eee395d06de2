"""The functions by which torch differentiates an operation of ours, in all of its modes.

Imported when torch first differentiates a call, as the classes derive from torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import Any

from sdpa_xp._libraries.capabilities import Operation

torch: Any = import_module("torch")
MOST_SCORES_AT_ONCE = 2**20
"""The scores of all entries of a `vmap` that plain operations compute at once; more are computed one by one."""


def apply(operation: Operation, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operation of tensors, which torch can differentiate."""
    is_transformed = torch._C._are_functorch_transforms_active()
    results: tuple[Any, ...] = (Transformed if is_transformed else Differentiable).apply(operation, *arrays)
    return results


class Derivatives(torch.autograd.Function):  # type: ignore[misc]
    """The derivatives of an `Operation`."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        saved, operation = ctx.saved_tensors, ctx.operation
        arrays, results, of_results = saved[: ctx.count], saved[ctx.count :], cotangents[: operation.returned]
        gradients = None
        # `is_grads_batched` of torch.autograd.grad has a vmap of its own, which knows no rule of a function.
        if not _is_batched(of_results):
            gradients = operation.pull(arrays, results, of_results, ctx.needs_input_grad[1:])
        if gradients is None:
            gradients = _pull_through(operation, arrays, of_results)
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:
        saved, operation = ctx.saved_tensors, ctx.operation
        arrays, results = saved[: ctx.count], saved[ctx.count :]
        computed = operation.push(arrays, results, tangents)
        if computed is None:
            computed = _push_through(operation, arrays, tangents)[: operation.returned]
        return *computed, *[None] * (ctx.results - operation.returned)


class Differentiable(Derivatives):
    """An operation outside of torch.func."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *arrays: Any) -> tuple[Any, ...]:
        results = operation.run(arrays)
        _keep(ctx, operation, arrays, results)
        return results


class Transformed(Derivatives):
    """An operation inside of torch.func, which takes 30 us more for each call, to bind arguments by name."""

    @staticmethod
    def forward(operation: Operation, *arrays: Any) -> tuple[Any, ...]:
        return operation.run(arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        operation, *arrays = inputs
        _keep(ctx, operation, arrays, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operation: Operation, *arrays: Any) -> tuple[Any, Any]:
        _, *axes = in_dims
        entries = info.batch_size
        if entries * operation.scores <= MOST_SCORES_AT_ONCE:
            results = torch.func.vmap(lambda *parts: operation.run(parts), tuple(axes))(*arrays)
        else:
            parts = [
                [x if axis is None else x.select(axis, n) for x, axis in zip(arrays, axes, strict=True)]
                for n in range(entries)
            ]
            of_entries = [apply(operation, part) for part in parts]
            results = tuple(torch.stack(of_result) for of_result in zip(*of_entries, strict=True))
        return results, (0,) * len(results)


class DifferentiableAgain(torch.autograd.Function):  # type: ignore[misc]
    """The output of a kernel of torch, which has first derivatives only."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, output: Any, *arrays: Any) -> Any:
        ctx.operation = operation
        ctx.save_for_backward(*arrays)
        return output.detach()  # an input that is returned as it is could not be written to

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple[Any, ...]:
        arrays, operation = ctx.saved_tensors, ctx.operation
        if not torch.is_grad_enabled() and (_is_batched([cotangent]) or operation.trusts_library(cotangent)):
            return None, cotangent, *[None] * len(arrays)
        if _is_batched([cotangent]):
            return None, None, *_pull_through(operation, arrays, [cotangent])
        return None, None, *operation.pull(arrays, (), [cotangent], ctx.needs_input_grad[2:])


def _keep(ctx: Any, operation: Operation, arrays: Sequence[Any], results: Sequence[Any]) -> None:
    """Keep what the derivatives of an operation read."""
    ctx.operation, ctx.count, ctx.results = operation, len(arrays), len(results)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*results[operation.returned :])
    kept = (*arrays, *results) if operation.keeps_results else arrays
    ctx.save_for_backward(*kept)
    ctx.save_for_forward(*kept)


def _is_batched(tensors: Sequence[Any]) -> bool:
    return any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors if x is not None)


def _of_floating(operation: Operation, arrays: Sequence[Any]) -> tuple[list[int], Callable[..., Any]]:
    """Return the places of the floating arrays, and what the operation makes of these arrays."""
    places = [n for n, x in enumerate(arrays) if x.is_floating_point()]

    def run(*floating: Any) -> Any:
        changed = dict(zip(places, floating, strict=True))
        return operation.run([changed.get(n, x) for n, x in enumerate(arrays)])

    return places, run


def _pull_through(operation: Operation, arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Return the gradients of an operation by those of the operations of torch that it consists of."""
    places, run = _of_floating(operation, arrays)
    results, pull = torch.func.vjp(run, *(arrays[n] for n in places))
    filled = tuple(torch.zeros_like(x) if c is None else c for x, c in zip_longest(results, cotangents))
    gradients = dict(zip(places, pull(filled), strict=True))
    return [gradients.get(n) for n in range(len(arrays))]


def _push_through(operation: Operation, arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the tangents of an operation by those of the operations of torch that it consists of."""
    places, run = _of_floating(operation, arrays)
    moved = tuple(torch.zeros_like(arrays[n]) if tangents[n] is None else tangents[n] for n in places)
    return torch.func.jvp(run, tuple(arrays[n] for n in places), moved)[1]
