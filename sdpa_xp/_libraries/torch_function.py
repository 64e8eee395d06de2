"""The functions by which torch differentiates an operation of ours, in all of its modes.

Imported when torch first differentiates a call, as the classes derive from torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import Any

from .capabilities import KernelOperation, Operation
from .torch_entries import by_new_vmap, map_entries, without_old_vmap

torch: Any = import_module("torch")
MOST_SCORES_AT_ONCE = 2**20
"""The scores of all entries of a `vmap` that are computed at once; more are computed one by one."""


def apply(operation: Operation, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operation of tensors, which torch can differentiate."""
    is_transformed = torch._C._are_functorch_transforms_active()
    results: tuple[Any, ...] = (Transformed if is_transformed else Differentiable).apply(operation, *arrays)
    return results


class Derivatives(torch.autograd.Function):  # type: ignore[misc]
    """The derivatives of an `Operation`."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        operation, needed = ctx.operation, ctx.needs_input_grad[1:]

        def pull(arrays: Sequence[Any], results: Sequence[Any], of_results: Sequence[Any]) -> Sequence[Any]:
            gradients = operation.pull(arrays, results, of_results, needed)
            return _pull_through(operation, arrays, of_results) if gradients is None else gradients

        # A cotangent or a tangent may be of the older vmap, which knows no rule of a function.
        return None, *by_new_vmap(pull, *_kept(ctx), cotangents[: operation.returned])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:
        operation = ctx.operation

        def push(arrays: Sequence[Any], results: Sequence[Any], of_arrays: Sequence[Any]) -> Sequence[Any]:
            computed = operation.push(arrays, results, of_arrays)
            return _push_through(operation, arrays, of_arrays) if computed is None else computed

        # torch turns forward mode off here. Then each torch.func.jvp around this one would get tangents of 0,
        # without an error. The arrays that are kept must lack the tangents of this one.
        forward_ad = torch.autograd.forward_ad
        with forward_ad._set_fwd_grad_enabled(True):
            kept = [[forward_ad.unpack_dual(x).primal for x in group] for group in _kept(ctx)]
            computed = by_new_vmap(push, *kept, tangents)
        return *computed[: operation.returned], *[None] * (ctx.results - operation.returned)


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
            results = apply(OfEntries(operation, axes, entries), arrays)
        else:
            parts = [
                [x if axis is None else x.select(axis, n) for x, axis in zip(arrays, axes, strict=True)]
                for n in range(entries)
            ]
            of_entries = [apply(operation, part) for part in parts]
            results = tuple(torch.stack(of_result) for of_result in zip(*of_entries, strict=True))
        return results, (0,) * len(results)


class OfTangent:
    """An operation with one result, whose tangent is `tangent(arrays, result, tangents)`, which is linear."""

    scores, returned, keeps_results = 0, 1, True

    def __init__(self, compute: Callable[..., Any], tangent: Callable[..., Any]) -> None:
        self.compute, self.tangent = compute, tangent

    def run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return (self.compute(*arrays),)

    def pull(
        self, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], needed: Sequence[bool]
    ) -> Sequence[Any]:
        places = [n for n, is_needed in enumerate(needed) if is_needed]

        def of_needed(*tangents: Any) -> Any:
            by_place = dict(zip(places, tangents, strict=True))
            return self.tangent(arrays, results[0], [by_place.get(n) for n in range(len(arrays))])

        if cotangents[0] is None or not places:
            return [None] * len(arrays)
        _, pull = torch.func.vjp(of_needed, *(torch.zeros_like(arrays[n]) for n in places))
        gradients = dict(zip(places, pull(cotangents[0]), strict=True))
        return [gradients.get(n) for n in range(len(arrays))]

    def push(self, arrays: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        return [self.tangent(arrays, results[0], tangents)]


class OfEntries:
    """An operation of the entries of a batch, all at once.

    Its derivatives are those of the operation. Those of the operations of torch that compute it multiply the
    NaN of a masked key with 0.
    """

    def __init__(self, operation: Operation, axes: Sequence[int | None], entries: int) -> None:
        self.operation, self.axes = operation, axes
        self.scores = entries * operation.scores
        self.returned, self.keeps_results = operation.returned, operation.keeps_results

    def run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return (*(map_entries(self.operation.run, [self.axes], arrays) or ()),)

    def pull(
        self, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], needed: Sequence[bool]
    ) -> Sequence[Any] | None:
        axes = [self.axes, [0] * len(results), [0] * len(cotangents)]

        def pull(
            arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]
        ) -> Sequence[Any] | None:
            return self.operation.pull(arrays, results, cotangents, needed)

        gradients = map_entries(pull, axes, arrays, results, cotangents)
        if gradients is None:
            return None
        return [
            x if x is None else x.sum(0) if axis is None else x.movedim(0, axis)
            for x, axis in zip(gradients, self.axes, strict=True)
        ]

    def push(
        self, arrays: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]
    ) -> Sequence[Any] | None:
        axes = [self.axes, [0] * len(results), self.axes]
        return map_entries(self.operation.push, axes, arrays, results, tangents)


class DifferentiableAgain(torch.autograd.Function):  # type: ignore[misc]
    """An output that is recorded by torch, which has first derivatives only."""

    @staticmethod
    def forward(ctx: Any, operation: KernelOperation, output: Any, *arrays: Any) -> Any:
        ctx.operation = operation
        ctx.save_for_backward(*arrays)
        return output.detach()  # an input that is returned as it is could not be written to

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple[Any, ...]:
        arrays, operation = ctx.saved_tensors, ctx.operation
        ((plain,), _) = without_old_vmap([cotangent])
        if not torch.is_grad_enabled() and operation.trusts_library(plain):
            return None, cotangent, *[None] * len(arrays)
        needed = ctx.needs_input_grad[2:]
        gradients = by_new_vmap(lambda *groups: operation.pull(*groups, needed), arrays, (), [cotangent])
        return None, None, *gradients


def _keep(ctx: Any, operation: Operation, arrays: Sequence[Any], results: Sequence[Any]) -> None:
    """Keep what the derivatives of an operation read."""
    ctx.operation, ctx.count, ctx.results = operation, len(arrays), len(results)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*results[operation.returned :])
    kept = (*arrays, *results) if operation.keeps_results else arrays
    ctx.save_for_backward(*kept)
    ctx.save_for_forward(*kept)


def _kept(ctx: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the arrays and the results that are kept."""
    saved = ctx.saved_tensors
    return saved[: ctx.count], saved[ctx.count :]


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


def _push_through(operation: Operation, arrays: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    """Return the tangents of an operation by those of the operations of torch that it consists of.

    Reverse mode is linear in the cotangents, and its own reverse mode is forward mode. torch.func.jvp refuses
    to compute that inside of a `dual_level`.
    """
    places, run = _of_floating(operation, arrays)
    results, pull = torch.func.vjp(run, *(arrays[n] for n in places))
    _, push = torch.func.vjp(lambda *cotangents: pull(cotangents), *map(torch.zeros_like, results))
    moved: Sequence[Any] = push(
        tuple(torch.zeros_like(arrays[n]) if tangents[n] is None else tangents[n] for n in places)
    )
    return moved
