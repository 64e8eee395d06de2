"""The arguments of a call: refused with a message, or turned into what the implementation computes with."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from sdpa_xp import biases, checks, masks, namespace
from sdpa_xp.protocols import Array, Dtype, Namespace
from sdpa_xp.scores import Scores


class Rules(NamedTuple):
    """What a caller passed besides query, key and value, as it came."""

    attn_mask: object
    bias: object
    is_causal: object
    scale: object
    softcap: object
    implementation: object


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that has passed every check."""

    scores: Scores
    value: Array | None
    """(..., H, S, Ev); None where the call has no value."""
    sizes: checks.Sizes
    dtype: Dtype
    """Of the result."""

    def without_heads(self, computed: Array) -> Array:
        """`computed` as the caller is to get it: 2-D inputs get no head axis."""
        return computed[0, ...] if self.sizes.flat else computed


def check(function: str, inputs: Mapping[str, object], rules: Rules) -> Call:
    """Refuse what does not fit; `inputs` are query and key, and value where the call has one."""
    checks.implementation(function, rules.implementation)
    optional = {"attn_mask": rules.attn_mask, "bias": rules.bias}
    others = {name: x for name, x in optional.items() if x is not None}
    if _is_learned(rules.scale):
        others["scale"] = rules.scale
    xp, arrays = checks.one_library(function, {**inputs, **others})
    named = {name: arrays[name] for name in inputs}
    for name, array in named.items():
        checks.floating(function, name, array)
    checks.one_dtype(function, named)
    checks.one_device(function, arrays)
    sizes = checks.shapes(function, *(x.shape for x in named.values()))

    query, key = (_with_heads(xp, named[name]) for name in ("query", "key"))
    value = _with_heads(xp, named["value"]) if "value" in named else None
    dtype = namespace.accumulation_dtype(xp, query.dtype)
    added = {name: arrays[name] for name in optional if name in arrays}
    mask, pair_biases = _masks_and_biases(function, added, query, dtype, sizes)
    if checks.flag(function, "is_causal", rules.is_causal):
        mask = masks.AllOf((masks.Causal(), *mask.masks))
    scores = Scores(
        xp=xp,
        query=query,
        key=key,
        batch=sizes.batch,
        mask=mask,
        biases=pair_biases,
        scale=_scale(function, arrays.get("scale", rules.scale), query, dtype, sizes),
        softcap=checks.softcap(function, rules.softcap, dtype),
        dtype=dtype,
        device=namespace.device(query),
        traced=any(namespace.is_traced(array) for array in arrays.values()),
    )
    return Call(scores, value, sizes, query.dtype)


def _masks_and_biases(
    function: str, added: Mapping[str, Array], query: Array, dtype: Dtype, sizes: checks.Sizes
) -> tuple[masks.AllOf, tuple[biases.Bias, ...]]:
    """A boolean attn_mask masks; a floating one is a bias."""
    pair_masks: list[masks.Mask] = []
    pair_biases: list[biases.Bias] = []
    for name, array in added.items():
        if name == "attn_mask" and checks.mask_dtype(function, array):
            pair_masks.append(masks.FromArray(array))
        else:
            checks.added_dtype(function, name, array, query, dtype)
            pair_biases.append(biases.FromArray(array))
        checks.broadcasts(function, name, array.shape, sizes.pairs, "(..., Hq, L, S)")
    return masks.AllOf(tuple(pair_masks)), tuple(pair_biases)


def _scale(function: str, scale: object, query: Array, dtype: Dtype, sizes: checks.Sizes) -> float | Array:
    if scale is None:
        return 1.0 / math.sqrt(sizes.width)
    if not _is_learned(scale):
        return checks.number(function, "scale", scale, dtype)
    if scale.ndim == 0:  # a number that the library holds, of whichever floating dtype
        checks.floating(function, "scale", scale)
    else:
        checks.added_dtype(function, "scale", scale, query, dtype)
    checks.broadcasts(function, "scale", scale.shape, (*sizes.pairs[:-1], 1), "(..., Hq, L, 1)")
    return scale


def _is_learned(scale: object) -> TypeGuard[Array]:
    """Whether a scale is an array; a scalar of NumPy is a number."""
    if scale is None or isinstance(scale, numbers.Number):
        return False
    numpy = sys.modules.get("numpy")
    is_scalar = numpy is not None and isinstance(scale, numpy.generic)
    return not is_scalar and namespace.is_array(scale)


def _with_heads(xp: Namespace, array: Array) -> Array:
    """2-D is one head: (L, E) -> (1, L, E)."""
    return xp.expand_dims(array, axis=0) if array.ndim == 2 else array
