"""States: attention over some of the keys, to merge with attention over the other keys."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar, cast

from sdpa_xp._checks.arrays import explain_missing_name
from sdpa_xp._checks.key_ranges import KeyRanges, check_key_ranges
from sdpa_xp._checks.keywords import check_layout, check_lse_base, explains_keywords
from sdpa_xp._checks.messages import brief
from sdpa_xp._checks.states import check_states
from sdpa_xp._core.online_softmax import merge
from sdpa_xp._libraries import quiet
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp._tiles.layout import Layout, swap_heads_and_length

A = TypeVar("A", bound=AnyArray)


class AttentionState(NamedTuple, Generic[A]):
    """Attention over some of the keys, with the log-sum-exp that `merge_states` needs."""

    output: A
    """The output over these keys, (..., Hq, L, Ev), in the dtype of the query."""
    lse: A
    """The logarithm of the sum of exp(score), (..., Hq, L), in the dtype of the scores.

    It is the natural logarithm; with `lse_base=2` it has base 2. The scores are float64 for float64 inputs or
    `softmax_dtype=float64`, and float32 otherwise.
    """

    def __repr__(self) -> str:
        return f"AttentionState(output={brief(self.output)}, lse={brief(self.lse)})"


@explains_keywords
def merge_states(
    states: Iterable[AttentionState[A]],
    *,
    lse_base: float | None = None,
    layout: Layout = "...HLE",
    key_ranges: KeyRanges | None = None,
    keys: int | None = None,
) -> AttentionState[A]:
    r"""Merge attention over parts of the keys into attention over all of these keys.

    $o = \sum_i e^{lse_i - lse}\,o_i$ with $lse = \log \sum_i e^{lse_i}$.

    Shapes:
        As for `attention_state`. All states have the same shapes.

    Args:
        states: The results of `attention_state` for the same queries and disjoint parts of the keys.
        lse_base: The base of `lse`: None for natural logarithms, or 2 for logarithms to base 2, as in
            FlashInfer. The result has the same base.
        layout: The layout of the outputs, as for `attention_state`: "...HLE" or "...LHE". `lse` is
            (..., Hq, L) in both.
        key_ranges: The keys of each state, to check that no key counts twice: a `range` or (start, stop), or a
            list of these for a state that was merged from others. If two states share a key, an error is
            raised.
        keys: The number of all keys, to check that none is missing in `key_ranges`. If one is, an error is
            raised.

    Returns:
        The state over all these keys, in the dtypes of the first state.

    Raises:
        TypeError: An item is not an AttentionState, or the states have several libraries or dtypes.
        ValueError: `states` is empty, the shapes or devices of the states differ, or a key is in two of
            `key_ranges` or in none of them.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import attention_state, scaled_dot_product_attention
        >>> q, k, v = np.ones((1, 2)), np.eye(4, 2), np.eye(4)
        >>> parts = [attention_state(q, k[i : i + 2], v[i : i + 2]) for i in (0, 2)]
        >>> bool(
        ...     np.allclose(
        ...         merge_states(parts).output, scaled_dot_product_attention(q, k, v)
        ...     )
        ... )
        True
        >>> merge_states(parts, key_ranges=[(0, 2), (2, 4)], keys=4).lse.shape
        (1,)

    References:
        Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2.
    """
    check_layout("merge_states", layout)
    base = check_lse_base("merge_states", lse_base)
    xp, parts = check_states("merge_states", states, layout)
    check_key_ranges("merge_states", key_ranges, len(parts), keys)
    try:
        with quiet(parts[0][0]):
            natural_states = [
                (swap_heads_and_length(xp, output, layout), lse if base is None else lse * math.log(base), 0.0)
                for output, lse in parts
            ]
            output, large, small = merge(xp, natural_states)
            output = swap_heads_and_length(xp, xp.astype(output, parts[0][0].dtype, copy=False), layout)
            return AttentionState(cast(A, output), cast(A, to_base(large + small, base)))
    except AttributeError as error:
        explain_missing_name("merge_states", xp, error)
        raise


def to_base(lse: Array, base: float | None) -> Array:
    """Convert a natural logarithm to another base; None is e."""
    return lse if base is None else lse * (1 / math.log(base))
