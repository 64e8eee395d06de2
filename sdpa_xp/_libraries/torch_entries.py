"""Functions of the entries of a batch, by either vmap of torch.

torch.func.vmap asks a function of ours for its rule. `is_grads_batched` of torch.autograd.grad, and `vectorize`
of torch.autograd.functional, use an older vmap, which knows no rules. Its tensors become those of
torch.func.vmap.
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


def map_entries(
    function: Callable[..., Tensors | None], axes: Sequence[Sequence[int | None]], *groups: Tensors
) -> list[Any] | None:
    """Return the results of `function(*groups)` for all entries, with the entries along axis 0.

    `axes` says for each tensor of each group along which axis its entries lie; None if they share it. What is
    None for one entry is None for all.
    """
    borders = [*pairwise(accumulate([0, *map(len, groups)]))]
    places: list[int] | None = None
    count = 0

    def of_entry(*tensors: Any) -> tuple[Any, ...]:
        nonlocal places, count
        results = function(*(tensors[start:stop] for start, stop in borders))
        if results is None:
            return ()
        places, count = [n for n, x in enumerate(results) if x is not None], len(results)
        return tuple(results[n] for n in places)

    tensors = [x for group in groups for x in group]
    in_dims = [
        None if x is None else axis for x, axis in zip(tensors, (a for g in axes for a in g), strict=True)
    ]
    computed = torch.func.vmap(of_entry, tuple(in_dims))(*tensors)
    if places is None:
        return None
    by_place = dict(zip(places, computed, strict=True))
    return [by_place.get(n) for n in range(count)]


def by_new_vmap(function: Callable[..., Tensors], *groups: Tensors) -> Tensors:
    """Return `function(*groups)`, computed by torch.func.vmap where tensors are of the older vmap."""
    tensors = [x for group in groups for x in group]
    if not _is_of_old_vmap(tensors):
        return function(*groups)
    borders = [*pairwise(accumulate([0, *map(len, groups)]))]
    plain, levels = without_old_vmap(tensors)

    def computed(*tensors: Any) -> Tensors:
        return function(*(tensors[start:stop] for start, stop in borders))

    for _, axes in levels:
        computed = partial(_map_all, computed, axes)
    results = computed(*plain)
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


def _map_all(function: Callable[..., Tensors], axes: Sequence[int | None], *tensors: Any) -> Tensors:
    return map_entries(lambda all_tensors: function(*all_tensors), [axes], tensors) or ()


def _is_of_old_vmap(tensors: Tensors) -> bool:
    return any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors if x is not None)
