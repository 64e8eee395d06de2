"""The attention weights, and the scores before the softmax. Only these two build an L x S array."""

from __future__ import annotations

from typing import Literal, TypeVar, Unpack, cast

from ._call import prepare
from ._call.options import CallOptions, DifferentiableOptions, ScoreOptions, takes_options
from ._chunked import cut_call
from ._libraries import overridden
from ._libraries.protocols import AnyArray, Array
from ._programs.weights import full_matrix
from ._tiles.plan import plan_full_rows
from .masks import Mask

A = TypeVar("A", bound=AnyArray)


@takes_options(DifferentiableOptions)
def attention_weights(
    query: A,
    key: AnyArray,
    *,
    attn_mask: Mask | AnyArray | None = None,
    **keywords: Unpack[DifferentiableOptions],
) -> A:
    """Compute the attention weights, softmax(q k^T * scale + bias). This builds an L x S array.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.

    Returns:
        (..., Hq, L, S), or (L, S) for 2-D inputs, in the dtype of the query, after dropout. A masked pair has
            weight 0. Each row sums to 1; with a sink it sums to less, and to 0 if all its keys are masked.

    Examples:
        >>> import numpy as np
        >>> attention_weights(np.zeros((2, 4)), np.ones((2, 4)), is_causal=True)
        array([[1. , 0. ],
               [0.5, 0.5]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    return cast(A, _full_matrix("attention_weights", "weights", query, key, options))


@takes_options(ScoreOptions)
def attention_scores(
    query: A, key: AnyArray, *, attn_mask: Mask | AnyArray | None = None, **keywords: Unpack[ScoreOptions]
) -> A:
    """Compute the scores before the softmax, softcap(q k^T * scale) + bias. This builds an L x S array.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.

    Returns:
        (..., Hq, L, S), or (L, S) for 2-D inputs, in the dtype of the query; -inf where masked. In float16, a
            score beyond 65504 is inf.

    Examples:
        >>> import numpy as np
        >>> attention_scores(np.ones((2, 4)), np.ones((2, 4)), is_causal=True)
        array([[  2., -inf],
               [  2.,   2.]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    return cast(A, _full_matrix("attention_scores", "scores", query, key, options))


def _full_matrix(
    function: str, name: Literal["weights", "scores"], query: AnyArray, key: AnyArray, options: CallOptions
) -> Array:
    inputs = {"query": query, "key": key}
    if (result := overridden(function, inputs, options._asdict)) is not NotImplemented:
        return cast(Array, result)
    call = prepare(function, inputs, options)
    plan = plan_full_rows(call.grid)
    with call.computing():
        if (cut := cut_call(call)) is not None:  # of a library that never looks for NaN
            in_chunks = cut.weights if name == "weights" else cut.scores
            return call.remove_head_axis(in_chunks(call.result_dtype))
        computed = full_matrix(name, call.draw_scores(), plan, call.result_dtype)
        # Where no pair may attend, the result follows from no input, and autograd would refuse it.
        result = call.remove_head_axis(call.attach_zero_gradient(computed, call.options.sinks))
    return call.checked(result, name)
