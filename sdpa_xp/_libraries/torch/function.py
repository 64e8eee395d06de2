"""The function by which torch differentiates an operation of ours, in all of its modes.

Imported when torch first differentiates a call, as the classes derive from torch's. The older vmap of torch,
which `is_grads_batched` of torch.autograd.grad and `vectorize` of torch.autograd.functional use, knows no rules
of functions: its tensors become those of torch.func.vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise, zip_longest
from typing import Any, TypeAlias

torch: Any = import_module("torch")
MOST_SCORES_AT_ONCE = 2**20
"""The scores of all entries of a `vmap` that are computed at once; more are computed one by one."""
MOST_LEVELS = 64
"""How deep torch nests the older vmap, and the highest number of a level."""
Tensors: TypeAlias = Sequence[Any]
"""Tensors, or None in place of some."""


class Operation:
    """An operation that says what its derivatives are, so that these have derivatives again."""

    returned = 1
    """How many results have derivatives. The others are kept for the derivatives of these."""
    keeps_results = False
    """Whether derivatives read the results."""
    scores = 0
    """How many scores it computes, or 0 if no `vmap` asks for that."""

    def run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results."""
        raise NotImplementedError

    def pull(
        self, arrays: Sequence[Any], results: Tensors, cotangents: Tensors, needed: Sequence[bool]
    ) -> Tensors | None:
        """Return the gradients of the arrays that are `needed`, and None for others.

        `results` are those of `run` if the operation keeps them, or none: then they are computed again.
        Return None in place of all if torch has to derive what `run` does.
        """
        raise NotImplementedError

    def push(self, arrays: Sequence[Any], results: Tensors, tangents: Tensors) -> Tensors | None:
        """Return the tangents of the results that have derivatives, or None as above."""
        raise NotImplementedError


def apply(operation: Operation, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operation of tensors, which torch can differentiate."""
    functorch, entries, kind = torch._C._functorch, 1, Differentiable
    if torch._C._are_functorch_transforms_active():
        for level in functorch.get_interpreter_stack():
            if level.key() == functorch.TransformType.Vmap:
                entries *= functorch.CVmapInterpreterPtr(level).batchSize()
        kind = Transformed if entries * operation.scores <= MOST_SCORES_AT_ONCE else OneByOne
    results: tuple[Any, ...] = kind.apply(operation, *arrays)
    return results


class Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """An operation with its derivatives."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *arrays: Any) -> tuple[Any, ...]:
        results = operation.run(arrays)
        _keep(ctx, (operation, *arrays), results)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        operation, needed = ctx.operation, ctx.needs_input_grad[1:]

        def pull(arrays: Tensors, results: Tensors, of_results: Tensors) -> Tensors:
            gradients = operation.pull(arrays, results, of_results, needed)
            return _pull_through(operation, arrays, of_results) if gradients is None else gradients

        # A cotangent or a tangent may be of the older vmap, which knows no rule of a function.
        return None, *by_new_vmap(pull, *_kept(ctx), cotangents[: operation.returned])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:
        operation = ctx.operation

        def push(arrays: Tensors, results: Tensors, of_arrays: Tensors) -> Tensors:
            computed = operation.push(arrays, results, of_arrays)
            return _push_through(operation, arrays, of_arrays) if computed is None else computed

        # torch turns forward mode off here. Then each torch.func.jvp around this one would get tangents of 0,
        # without an error. The arrays that are kept must lack the tangents of this one.
        with torch.autograd.forward_ad._set_fwd_grad_enabled(True):
            kept = [[*map(_primal, group)] for group in _kept(ctx)]
            computed = by_new_vmap(push, *kept, tangents)
        return *computed, *[None] * (ctx.results - operation.returned)


class Transformed(Differentiable):
    """The same inside of torch.func, which takes 30 us more for each call, to bind arguments by name."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *arrays: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return operation.run(arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _keep(ctx, inputs, output)


class OneByOne(Transformed):
    """The same for the entries of a `vmap` one after the other."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operation: Operation, *arrays: Any) -> tuple[Any, Any]:
        parts = (
            [x if axis is None else x.select(axis, n) for x, axis in zip(arrays, in_dims[1:], strict=True)]
            for n in range(info.batch_size)
        )
        of_entries = [apply(operation, part) for part in parts]
        results = tuple(torch.stack(of_result) for of_result in zip(*of_entries, strict=True))
        return results, (0,) * len(results)


class OfTangent(Operation):
    """An operation with one result, whose tangent is `tangent(arrays, result, tangents)`, which is linear."""

    keeps_results = True

    def __init__(self, compute: Callable[..., Any], tangent: Callable[..., Any]) -> None:
        self.compute, self.tangent = compute, tangent

    def run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return (self.compute(*arrays),)

    def pull(
        self, arrays: Sequence[Any], results: Tensors, cotangents: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        places = [n for n, is_needed in enumerate(needed) if is_needed]

        def of_needed(*tangents: Any) -> Any:
            by_place = dict(zip(places, tangents, strict=True))
            return self.tangent(arrays, results[0], [by_place.get(n) for n in range(len(arrays))])

        if cotangents[0] is None or not places:
            return [None] * len(arrays)
        _, pull = torch.func.vjp(of_needed, *(torch.zeros_like(arrays[n]) for n in places))
        gradients = dict(zip(places, pull(cotangents[0]), strict=True))
        return [gradients.get(n) for n in range(len(arrays))]

    def push(self, arrays: Sequence[Any], results: Tensors, tangents: Tensors) -> Tensors:
        return [self.tangent(arrays, results[0], tangents)]


class DifferentiableAgain(torch.autograd.Function):  # type: ignore[misc]
    """An output that is recorded by torch, which has first derivatives only.

    With `may_mask` these are right for finite cotangents alone: 0 * NaN of a masked pair is NaN.
    """

    @staticmethod
    def forward(ctx: Any, operation: Operation, may_mask: bool, output: Any, *arrays: Any) -> Any:
        ctx.operation, ctx.may_mask = operation, may_mask
        ctx.save_for_backward(*arrays)
        return output.detach()  # an input that is returned as it is could not be written to

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple[Any, ...]:
        arrays, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if not torch.is_grad_enabled():
            ((plain,), _) = without_old_vmap([cotangent])
            if not ctx.may_mask or torch.isfinite(torch.sum(plain)):
                return None, None, cotangent, *[None] * len(arrays)
        gradients = by_new_vmap(lambda *groups: ctx.operation.pull(*groups, needed), arrays, (), [cotangent])
        return None, None, None, *gradients


def _keep(ctx: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Keep what the derivatives of an operation read."""
    operation, *arrays = inputs
    ctx.operation, ctx.count, ctx.results = operation, len(arrays), len(results)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*results[operation.returned :])
    kept = (*arrays, *results) if operation.keeps_results else arrays
    ctx.save_for_backward(*kept)
    ctx.save_for_forward(*kept)


def _kept(ctx: Any) -> tuple[Tensors, Tensors]:
    """Return the arrays and the results that are kept."""
    saved = ctx.saved_tensors
    return saved[: ctx.count], saved[ctx.count :]


def _primal(x: Any) -> Any:
    """Return a tensor without its tangent; `unpack_dual` takes none of a `vmap`."""
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(x):
        return torch.autograd.forward_ad.unpack_dual(x).primal
    level = functorch.maybe_get_level(x)
    entries, axis = functorch._unwrap_batched(x, level)
    return functorch._add_batch_dim(_primal(entries), axis, level)


def _linearized(operation: Operation, arrays: Sequence[Any]) -> tuple[list[int], tuple[Any, ...], Any]:
    """Return the places of the floating arrays, the results, and what pulls their cotangents back to these.

    The derivatives are those of the operations of torch that the operation consists of.
    """
    places = [n for n, x in enumerate(arrays) if x.is_floating_point()]

    def run(*floating: Any) -> Any:
        changed = dict(zip(places, floating, strict=True))
        return operation.run([changed.get(n, x) for n, x in enumerate(arrays)])

    return places, *torch.func.vjp(run, *(arrays[n] for n in places))


def _pull_through(operation: Operation, arrays: Sequence[Any], cotangents: Tensors) -> Tensors:
    places, results, pull = _linearized(operation, arrays)
    filled = tuple(torch.zeros_like(x) if c is None else c for x, c in zip_longest(results, cotangents))
    gradients = dict(zip(places, pull(filled), strict=True))
    return [gradients.get(n) for n in range(len(arrays))]


def _push_through(operation: Operation, arrays: Sequence[Any], tangents: Tensors) -> Tensors:
    # Reverse mode is linear in the cotangents, and its own reverse mode is forward mode. torch.func.jvp refuses
    # to compute that inside of a `dual_level`.
    places, results, pull = _linearized(operation, arrays)
    _, push = torch.func.vjp(lambda *cotangents: pull(cotangents), *map(torch.zeros_like, results))
    filled = (torch.zeros_like(arrays[n]) if tangents[n] is None else tangents[n] for n in places)
    moved: Tensors = push(tuple(filled))
    return moved[: operation.returned]


def by_new_vmap(function: Callable[..., Tensors], *groups: Tensors) -> Tensors:
    """Return `function(*groups)`, computed by torch.func.vmap where tensors are of the older vmap."""
    tensors = [x for group in groups for x in group]
    if not _is_of_old_vmap(tensors):
        return function(*groups)
    borders = [*pairwise(accumulate([0, *map(len, groups)]))]
    plain, levels = without_old_vmap(tensors)

    def computed(tensors: Tensors) -> Tensors:
        return function(*(tensors[start:stop] for start, stop in borders))

    for _, axes in levels:
        computed = partial(_map_entries, computed, axes)
    results = computed(plain)
    for level, _ in reversed(levels):
        results = [None if x is None else torch._add_batch_dim(x, 0, level) for x in results]
    return results


def without_old_vmap(tensors: Tensors) -> tuple[Tensors, list[tuple[int, list[int | None]]]]:
    """Return the tensors of all entries of the older vmap, and its levels.

    Each level has a number, and for each tensor the axis of its entries: 0, or None if they share it.
    """
    levels: list[tuple[int, list[int | None]]] = []
    for level in range(1, MOST_LEVELS + 1):
        if not _is_of_old_vmap(tensors):
            break
        # A tensor without this level gets an axis of the length that is passed here: 0, which no other has.
        whole = [None if x is None else torch._remove_batch_dim(x, level, 0, 0) for x in tensors]
        axes = [None if x is None or x.shape[0] == 0 else 0 for x in whole]
        if any(axis is not None for axis in axes):
            tensors = [x if axis is None else y for x, y, axis in zip(tensors, whole, axes, strict=True)]
            levels.append((level, axes))
    return tensors, levels


def _map_entries(function: Callable[..., Tensors], axes: Sequence[int | None], tensors: Tensors) -> Tensors:
    """Return the results of a function for all entries of `tensors`, with the entries along axis 0.

    What is None for one entry is None for all.
    """
    entries = next(len(x) for x, axis in zip(tensors, axes, strict=True) if axis is not None)
    # torch.func.vmap takes no function that returns None among tensors. The private one below it does, in 2.13.
    mapped = torch._functorch.vmap.restore_vmap(function, ([*axes],), entries, "error")
    results, places = mapped([*tensors])
    return [
        x if x is None else x.expand(entries, *x.shape) if place is None else x.movedim(place, 0)
        for x, place in zip(results, places, strict=True)
    ]


def _is_of_old_vmap(tensors: Tensors) -> bool:
    return any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors if x is not None)
