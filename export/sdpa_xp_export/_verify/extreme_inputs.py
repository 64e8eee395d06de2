"""Inputs that show whether a runtime takes a finite number for -inf.

A mask that adds or writes a finite number works until scores are larger than it. CUDA's kernels use -1e30, and
-65504 in float16, and return 0 for a row whose biases are no larger. Ordinary scores do not show it, and the
rounding errors of large ones would hide it. So here no result depends on the digits of a large score: one key
gets all the weight, or all scores are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._verify.pair_terms import Arrays, numbers
from sdpa_xp_export._verify.reference_inputs import heads_first

Extreme: TypeAlias = Literal["", "one high score", "low scores", "least biases"]
HIGH = dict.fromkeys(("bfloat16", "float32", "float64"), 2.0**62) | {"float16": 2.0**15}
"""The number in each query and in one key: their score is up to 2**124, and 2**30 in float16."""
LOW = dict.fromkeys(("bfloat16", "float32", "float64"), (2.0**62, 2.0**62)) | {"float16": (2.0**8, 2.0**9)}
"""The number in each query, and in all keys if the scale is 1. The score of -2**17 in float16 leaves float32
some digits of a bias."""
LEAST = {"bfloat16": -(2.0**128 - 2.0**120)} | {
    name: float(np.finfo(name).min) for name in ("float16", "float32", "float64")
}
"""The most negative number of each dtype."""


def extremes(call: ExportCall) -> Iterator[Extreme]:
    """Yield the extreme inputs that a call can have."""
    overflows = call.query.dtype == "float16" and "scores" in call.outputs  # as they are returned
    # Any other bias, such as a function, may turn a high score into inf.
    if not overflows and all(bias.only_adds for bias in call.biases):
        yield from ("one high score", "low scores")
    if any(_floating_biases(call)):
        yield "least biases"


def with_extremes(call: ExportCall, arrays: Arrays, extreme: Extreme, rng: np.random.Generator) -> Arrays:
    """Return the inputs with one key of high score in each head, equal low scores, or the least biases."""
    query = heads_first(call, arrays["query"])
    keys = [heads_first(call, arrays[name]) for name in ("key", "past_key") if name in arrays]
    scale = float(np.max(np.abs(np.asarray(numbers(call.scale, arrays), np.float64)), initial=0.0))
    high, (low, opposite) = HIGH[call.query.dtype], LOW[call.query.dtype]
    if extreme == "least biases":
        query[...] = 0.0
    elif extreme == "one high score":
        query[..., 0] = high
        for key in keys:
            key[..., 0] = 0.0  # the other scores stay ordinary
        heads = keys[0].shape[:-2]
        chosen = np.arange(keys[0].shape[-2]) == rng.integers(0, keys[0].shape[-2], (*heads, 1))
        keys[0][..., 0][chosen] = high / max(scale, 1.0)
    else:
        query[...] = 0.0
        query[..., 0] = low
        for key in keys:
            key[..., 0] = -min(opposite / scale, high) if scale else 0.0
    for index, name in enumerate(_floating_biases(call)):
        _set_least(arrays[name], rows=extreme == "least biases" and index == 0, zero=extreme == "least biases")
    return arrays


def _set_least(bias: NDArray[Any], *, rows: bool, zero: bool) -> None:
    """Set some rows to the most negative number, with half of it in places; else no number to it.

    With `zero`, the other numbers become 0: in a half dtype, a sum with the most negative number has no digits.
    """
    masked, least = np.isneginf(bias), LEAST[bias.dtype.name]
    bias[(bias == least) | zero] = 0
    if rows:
        by_row = bias.reshape(-1, bias.shape[-1] if bias.ndim else 1)
        by_row[-1::-2] = least
        by_row[-3::-4, ::3] = least / 2
    bias[masked] = -np.inf


def _floating_biases(call: ExportCall) -> list[str]:
    """Return the inputs that are added to the scores of pairs."""
    return [
        name
        for name, spec in call.inputs.items()
        if name.rstrip("_0123456789") in ("attn_mask", "bias") and spec.dtype != "bool"
    ]
