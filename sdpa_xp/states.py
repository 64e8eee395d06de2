"""Attention over some of the keys, and how such states merge."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._core.online_softmax import merge
from sdpa_xp._libraries import quiet
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp._tiles.layout import Layout, swap_heads_and_length

A = TypeVar("A", bound=AnyArray)


class AttentionState(NamedTuple, Generic[A]):
    """Attention over some of the keys, with what it takes to merge it with attention over the others."""

    output: A
    """(..., Hq, L, Ev), in the dtype of the input."""
    lse: A
    """Natural logarithm of the sum of exp(score), (..., Hq, L); float64 for float64 input, else float32."""


def merge_states(
    states: Iterable[AttentionState[A]], *, lse_base: float | None = None, layout: Layout = "...HLE"
) -> AttentionState[A]:
    r"""Attention over all keys, from attention over parts of them.

    $o = \sum_i e^{lse_i - lse}\,o_i$ with $lse = \log \sum_i e^{lse_i}$.

    Shapes:
        As for `attention_state`; all states have the same.

    Args:
        states: What `attention_state` returned for the same queries and disjoint parts of the keys.
        lse_base: None where `lse` is a natural logarithm; 2 where it is FlashInfer's. So is the result's.
        layout: Of the outputs, as it was for `attention_state`: "...HLE" or "...LHE". `lse` is (..., Hq, L) in
            both.

    Returns:
        The state over all these keys, in the dtypes of the first.

    Raises:
        TypeError: Something that is not a state, or states of several libraries or dtypes.
        ValueError: No state, or states whose shapes or devices differ.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import attention_state, scaled_dot_product_attention
        >>> q, k, v = np.ones((1, 2)), np.eye(4, 2), np.eye(4)
        >>> parts = [attention_state(q, k[i : i + 2], v[i : i + 2]) for i in (0, 2)]
        >>> bool(np.allclose(merge_states(parts).output, scaled_dot_product_attention(q, k, v)))
        True

    References:
        Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2.
    """
    checks.named("merge_states", "layout", layout, checks.LAYOUTS)
    base = checks.lse_base("merge_states", lse_base)
    xp, parts = checks.states("merge_states", states, layout)
    with quiet(parts[0][0]):
        natural = [
            (swap_heads_and_length(xp, output, layout), lse if base is None else lse * math.log(base))
            for output, lse in parts
        ]
        output, lse = merge(xp, natural)
        output = swap_heads_and_length(xp, xp.astype(output, parts[0][0].dtype, copy=False), layout)
        return AttentionState(cast(A, output), cast(A, to_base(lse, base)))


def to_base(lse: Array, base: float | None) -> Array:
    """Convert a natural logarithm to another base; None is e."""
    return lse if base is None else lse * (1 / math.log(base))
