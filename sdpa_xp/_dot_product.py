"""Attention with the names and the layout of jax.nn, so that code can switch with one import."""

from __future__ import annotations

import functools
import operator
from typing import TypeVar

from ._attention import compute_output
from ._call.options import CallOptions
from ._checks.arrays import LHE
from ._checks.keywords import Implementation, check_flag, check_integer, explains_keywords
from ._checks.score_arrays import IntegersLike, frozen
from ._libraries.protocols import AnyArray
from .biases import Bias
from .errors import ArgumentValueError
from .masks import Mask, SlidingWindow
from .masks.algebra import as_mask
from .masks.lengths import Padding

A = TypeVar("A", bound=AnyArray)


@explains_keywords
def dot_product_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    bias: Bias | AnyArray | None = None,
    mask: Mask | AnyArray | None = None,
    *,
    scale: float | AnyArray | None = None,
    is_causal: bool = False,
    query_seq_lengths: IntegersLike | None = None,
    key_value_seq_lengths: IntegersLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> A:
    """Compute attention with the signature of `jax.nn.dot_product_attention`, for any library.

    One result differs from JAX: a row whose keys are all masked is 0, not the mean of all values.

    Shapes:
        `B` batch, `T` queries, `S` keys, `N` query heads, `K` key heads, `H` width, as JAX names them.

    Args:
        query: (B, T, N, H), or (T, N, H) without a batch. All other arguments and errors are as in
            `scaled_dot_product_attention`.
        key: (B, S, K, H).
        value: (B, S, K, H).
        bias: A bias of `sdpa_xp.biases`, or an array that broadcasts to (B, N, T, S).
        mask: A mask of `sdpa_xp.masks`, or a boolean array that broadcasts to (B, N, T, S).
        query_seq_lengths: (B,): the number of real queries among the T; the others give 0.
        key_value_seq_lengths: (B,): the number of real keys among the S.
        local_window_size: The keys before and after its own position that a query attends to: one number for
            both, or (left, right).
        return_residual: False. `attention_state` returns the log-sum-exp.

    Returns:
        (B, T, N, H), with the library, device and dtype of the query.

    Examples:
        >>> import numpy as np
        >>> x = np.ones((2, 5, 4, 8))  # batch, length, heads, width
        >>> dot_product_attention(
        ...     x, x, x, is_causal=True, key_value_seq_lengths=[5, 3]
        ... ).shape
        (2, 5, 4, 8)

    References:
        jax.nn.dot_product_attention, JAX 0.10.
    """
    function = "dot_product_attention"
    if check_flag(function, "return_residual", return_residual):
        hint = "`attention_state(..., layout='...LHE')` returns the output and the log-sum-exp."
        rule = "`return_residual` must be False"
        raise ArgumentValueError(function, rule, {"return_residual": True}, hint)
    masks = [] if mask is None else [as_mask(function, "mask", mask, "mask")]
    if local_window_size is not None:
        masks.append(SlidingWindow(*_checked_window(function, local_window_size)))
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        # By its class: messages name the arguments of this function, not those of `masks.padding`.
        names = ("key_value_seq_lengths", "query_seq_lengths")
        masks.append(Padding(frozen(key_value_seq_lengths), frozen(query_seq_lengths), names))
    joined = functools.reduce(operator.and_, masks) if masks else None
    options = CallOptions(joined, bias, is_causal, scale, layout=LHE, implementation=implementation)
    return compute_output(function, query, key, value, options)


def _checked_window(function: str, value: object) -> tuple[int, int]:
    """Check the reach of a window, one integer or (left, right), and return (left, right)."""
    name, widths = "local_window_size", value if isinstance(value, tuple | list) else (value, value)
    if len(widths) != 2:
        raise ArgumentValueError(function, f"`{name}` must be an integer or (left, right)", {name: value})
    left, right = (check_integer(function, name, width, least=0) for width in widths)
    return left, right
