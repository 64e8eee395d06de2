"""What kernels have in common: inputs of 4 axes, and one array that says which pairs may attend."""

from __future__ import annotations

import math
import operator
from collections.abc import Container
from functools import reduce
from typing import cast

from .._call import PreparedCall, shared_by_equal_calls
from .._libraries.protocols import Array, Namespace, Shape
from .._tiles import is_masked
from ..biases.algebra import ArrayBias
from ..masks import Causal
from ..masks.algebra import ArrayMask, Mask
from ..masks.lengths import Padding

MANY_SCORES = 2**20
"""Above this size a kernel that needs an array of all scores is refused; below it the array is small."""
MANY_ENTRIES = 8
"""Batch entries with different numbers of keys are computed one by one if there are at most this many, or if
each has `MANY_SCORES_OF_ONE`."""
MANY_SCORES_OF_ONE = 2**16


def unsupported_reason(
    call: PreparedCall, library: str, *, takes: Container[str] = (), cuts_keys: bool = False
) -> str | None:
    """Return why the options are not what kernels take: `is_causal`, boolean arrays and one floating array.

    With `cuts_keys`, padding is supported too: its keys are cut off, and only `is_causal` remains as a mask.
    """
    for name in call.options.extras:
        if name not in takes:
            return f"{library}'s kernel takes no `{name}`"
    if cuts_keys and real_keys(call) is not None:
        return None
    if not all(_is_plain_causal(mask) or isinstance(mask, ArrayMask) for mask in call.options.masks):
        padding = ", `masks.padding(...)`" if cuts_keys else ""
        return f"{library}'s kernel supports only `masks.causal()`{padding} and boolean arrays as masks"
    if len(call.options.biases) > 1 or not all(isinstance(part, ArrayBias) for part in call.options.biases):
        return f"{library}'s kernel supports only one floating array as bias"
    return None


def not_default_reason(call: PreparedCall, library: str, compilers: str) -> str:
    """Return that a kernel is not the default where the call is: inside of compilers, or on its device."""
    where = f"inside {compilers}" if call.grid.access.is_traced else f"on {call.grid.device}"
    return f"{library}'s kernel is not the default {where}"


def mask_size(call: PreparedCall) -> int:
    """Return the number of elements of all masks and biases joined in one array; 0 without masks and biases."""
    arrays = [mask.boolean for mask in _array_masks(call)] + [part.array for part in _array_biases(call)]
    shapes = [tuple(array.shape) for array in arrays]
    if arrays and is_causal(call):
        shapes.append((call.sizes.queries, call.sizes.keys))
    axes = max(map(len, shapes), default=0)
    in_all_axes = [(*[1] * (axes - len(shape)), *shape) for shape in shapes]
    return math.prod(max(lengths) for lengths in zip(*in_all_axes, strict=True)) if arrays else 0


@shared_by_equal_calls
def is_causal(call: PreparedCall) -> bool:
    """Return whether j <= i is among the masks."""
    return any(_is_plain_causal(mask) for mask in call.options.masks)


@shared_by_equal_calls
def has_arrays(call: PreparedCall) -> bool:
    """Return whether an array is among the masks and biases."""
    return bool(_array_masks(call) or _array_biases(call))


@shared_by_equal_calls
def real_keys(call: PreparedCall) -> list[int] | None:
    """Return how many keys each batch entry attends to, if the only masks are padding of keys and `is_causal`.

    Returns None if there are other masks, or if many entries with few scores have different numbers.
    """
    masks = [mask for mask in call.options.masks if not _is_plain_causal(mask)]
    batch = call.sizes.batch
    if call.options.biases or len(masks) != 1 or len(batch) > 1 or 0 in batch:
        return None
    (padding,) = masks
    if not isinstance(padding, Padding) or padding.query_lengths is not None:
        return None
    lengths = call.grid.check_integers(padding.names[0], padding.key_lengths)
    count = math.prod(batch)
    # Under `is_causal` no query attends to the keys behind the last query.
    most = call.sizes.queries if is_causal(call) else call.sizes.keys
    if lengths.least == lengths.most:
        return [min(int(lengths.least), most)] * count
    scores_of_one = math.prod(call.grid.shape) // count
    if count > MANY_ENTRIES and scores_of_one < MANY_SCORES_OF_ONE:
        return None
    if isinstance(lengths.values, int) or not math.isfinite(lengths.least):  # they cannot be read
        return None
    return [min(int(number), most) for number in call.grid.library.to_list(lengths.values[:, 0, 0, 0])]


def bias(call: PreparedCall) -> Array | None:
    """Return the floating array that is added to the scores, with two axes at least."""
    arrays = [cast(Array, term.array) for term in _array_biases(call)]
    return _to_matrix(call.grid.xp.astype(arrays[0], call.grid.dtype, copy=False)) if arrays else None


def allowed(call: PreparedCall) -> Array | None:
    """Return which pairs may attend according to arrays. None means all pairs, or those of `is_causal`."""
    if not has_arrays(call):
        return None
    added = bias(call)
    arrays = [_to_matrix(cast(Array, mask.boolean)) for mask in _array_masks(call)]
    if added is not None:
        arrays.append(~is_masked(added))
    if is_causal(call):
        arrays.append(causal(call))
    return reduce(operator.and_, arrays)


def causal(call: PreparedCall) -> Array:
    """Return where j <= i, (L, S)."""
    queries, keys = indices(call)
    return keys <= call.grid.xp.expand_dims(queries, axis=-1)


def indices(call: PreparedCall) -> tuple[Array, Array]:
    """Return the numbers of queries and keys; no `range`, since a length may be a symbol of a compiler."""
    return call.grid.arange(0, call.sizes.queries), call.grid.arange(0, call.sizes.keys)


def with_4_axes(call: PreparedCall, array: Array) -> Array:
    """Return (..., heads, length, width) as (B, heads, length, width)."""
    batch = call.sizes.batch
    if not batch:
        return call.grid.xp.expand_dims(array, axis=0)
    return array if array.shape[:-3] == batch and len(batch) == 1 else merge_batch(call.grid.xp, array, batch)


def merge_batch(xp: Namespace, array: Array, batch: Shape) -> Array:
    """Return (..., heads, length, width) with all batch entries on one axis; a broadcast batch is repeated."""
    heads_and_rest = array.shape[-3:]
    full = xp.broadcast_to(array, (*batch, *heads_and_rest))
    return xp.reshape(full, (math.prod(batch), *heads_and_rest))


def split_batch(call: PreparedCall, output: Array) -> Array:
    """Return (B, heads, length, width) as (..., heads, length, width)."""
    batch = call.sizes.batch
    return output if len(batch) == 1 else call.grid.xp.reshape(output, (*batch, *output.shape[1:]))


def _is_plain_causal(mask: Mask) -> bool:
    """Return whether a mask is `causal()`. torch.compile cannot compare masks, which may have an array's id."""
    return isinstance(mask, Causal) and isinstance(mask.offset, int) and mask.offset == 0


def _array_masks(call: PreparedCall) -> list[ArrayMask]:
    return [mask for mask in call.options.masks if isinstance(mask, ArrayMask)]


def _array_biases(call: PreparedCall) -> list[ArrayBias]:
    return [part for part in call.options.biases if isinstance(part, ArrayBias)]


def _to_matrix(array: Array) -> Array:
    """Return an array of fewer than two axes as one row or one element."""
    return array if array.ndim >= 2 else array[(None,) * (2 - array.ndim)]
