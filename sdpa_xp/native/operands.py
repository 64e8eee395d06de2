"""What kernels have in common: inputs of 4 axes, and one array that says which pairs may attend."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import cast

from sdpa_xp._libraries.protocols import Array
from sdpa_xp.arguments import Call
from sdpa_xp.biases.algebra import FromArray as BiasFromArray
from sdpa_xp.biases.algebra import is_masked
from sdpa_xp.masks.algebra import And, FromArray, Mask
from sdpa_xp.masks.bands import Causal

CAUSAL = Causal()
MANY_SCORES = 2**20
"""So many are no matter for memory."""


def refusal(call: Call, library: str) -> str | None:
    """Why what a call adds to the scores is not one array, or more than the kernel of `library` takes."""
    for name, asked in {"softcap": call.softcap is not None, "rng": call.dropout_p > 0}.items():
        if asked:
            return f"{library}'s kernel takes no `{name}`"
    if not all(mask == CAUSAL or isinstance(mask, FromArray) for mask in _parts(call.masks)):
        return f"{library}'s kernel takes no masks but `masks.causal()` and boolean arrays"
    if len(call.biases) > 1 or not all(isinstance(bias, BiasFromArray) for bias in call.biases):
        return f"{library}'s kernel takes no bias but one floating array"
    return None


def is_empty(call: Call) -> bool:
    """Whether an axis has no elements."""
    value = call.arrays["value"]
    return any(length == 0 for length in (*call.sizes.batch, *call.pairs.scores[-3:], value.shape[-1]))


def mask_size(call: Call) -> int:
    """The elements of an array of the pairs that arrays of the caller speak of; 0 where there is none."""
    given = [mask.boolean for mask in _parts(call.masks) if isinstance(mask, FromArray)]
    given += [bias.array for bias in call.biases if isinstance(bias, BiasFromArray)]
    axes = max((len(array.shape) for array in given), default=0)
    shapes = [(*[1] * (axes - len(array.shape)), *array.shape)[:-2] for array in given]
    leading = math.prod(max(lengths) for lengths in zip(*shapes, strict=True))
    return leading * call.sizes.queries * call.sizes.keys if given else 0


def _parts(masks: Iterable[Mask]) -> Iterator[Mask]:
    """The masks that all have to hold, those joined by `&` among them."""
    for mask in masks:
        yield from _parts(mask.parts) if isinstance(mask, And) else (mask,)


def is_causal(call: Call) -> bool:
    """Whether j <= i is among what has to hold."""
    return any(mask == CAUSAL for mask in _parts(call.masks))


def bias(call: Call) -> Array | None:
    """What is added, with two axes at least."""
    held = [cast(Array, bias.array) for bias in call.biases if isinstance(bias, BiasFromArray)]
    return _matrix(call.pairs.xp.astype(held[0], call.pairs.dtype, copy=False)) if held else None


def allowed(call: Call) -> Array | None:
    """Which pairs may attend, where an array of the caller says so; None is for all, or those of is_causal."""
    added = bias(call)
    given = [_matrix(cast(Array, mask.boolean)) for mask in _parts(call.masks) if isinstance(mask, FromArray)]
    given += [] if added is None else [~is_masked(added)]
    if not given:
        return None
    return reduce(operator.and_, given + [causal(call)] * is_causal(call))


def causal(call: Call) -> Array:
    """Where j <= i, (L, S)."""
    queries, keys = indices(call)
    return keys <= call.pairs.xp.expand_dims(queries, axis=-1)


def indices(call: Call) -> tuple[Array, Array]:
    """The numbers of queries and keys; a length may be a symbol, which no range takes."""
    pairs = call.pairs
    lengths = (call.sizes.queries, call.sizes.keys)
    one, other = (pairs.xp.arange(0, n, dtype=pairs.xp.int32, device=pairs.device) for n in lengths)
    return one, other


def _matrix(array: Array) -> Array:
    """With a row of queries and a column of keys at least."""
    return array if array.ndim >= 2 else array[(None,) * (2 - array.ndim)]


def with_4_axes(call: Call, array: Array) -> Array:
    """(..., heads, length, width) -> (B, heads, length, width)."""
    batch = call.sizes.batch
    if not batch:
        return call.pairs.xp.expand_dims(array, axis=0)
    return array if array.shape[:-3] == batch and len(batch) == 1 else of_one_batch(call, array)


def of_one_batch(call: Call, array: Array) -> Array:
    """The batch in full, and as one axis."""
    xp, batch, rest = call.pairs.xp, call.sizes.batch, array.shape[-3:]
    return xp.reshape(xp.broadcast_to(array, (*batch, *rest)), (math.prod(batch), *rest))


def of_the_batch(call: Call, output: Array) -> Array:
    """(B, heads, length, width) -> (..., heads, length, width)."""
    batch = call.sizes.batch
    return output if len(batch) == 1 else call.pairs.xp.reshape(output, (*batch, *output.shape[1:]))
