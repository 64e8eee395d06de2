"""The older vmap of torch, which knows no rules of functions: its tensors become those of torch.func.vmap.

`is_grads_batched` of torch.autograd.grad and `vectorize` of torch.autograd.functional use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

torch: Any = import_module("torch")
MOST_LEVELS = 64
"""How deep torch nests the older vmap, and the highest number of a level."""
Tensors: TypeAlias = Sequence[Any]
"""Tensors, or None in place of some."""


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
