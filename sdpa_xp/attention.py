"""The public functions: check, plan, compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar, cast

from sdpa_xp import checks, streaming
from sdpa_xp.arguments import Rules, check
from sdpa_xp.namespace import quiet
from sdpa_xp.protocols import AnyArray, Array
from sdpa_xp.tiles import plan, plan_rows

A = TypeVar("A", bound=AnyArray)


class AttentionState(NamedTuple, Generic[A]):
    """Attention over some of the keys, with what it takes to merge it with attention over the others."""

    output: A
    """(..., Hq, L, Ev), in the dtype of the input."""
    lse: A
    """Natural logarithm of the sum of exp(score), (..., Hq, L); float64 for float64 input, else float32."""


def scaled_dot_product_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: AnyArray | None = None,
    *,
    bias: AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> A:
    r"""Attention, $\mathrm{softmax}(q k^T \cdot scale + bias)\,v$, on the arrays of any library.

    Memory grows with L + S: the scores are made tile by tile and never as a whole.

    Shapes:
        `L` queries, `S` keys, `E` width of a query or key, `Ev` width of a value, `Hq` query heads,
        `H` key heads, `...` leading axes, which broadcast. 2-D inputs are one head without a batch.

    Args:
        query: (..., Hq, L, E); float16, bfloat16, float32 or float64.
        key: (..., H, S, E), of the query's library, device and dtype. Hq is a multiple of H, and query head
            h reads key head h // (Hq // H); keys and values are not copied for that.
        value: (..., H, S, Ev), likewise. Ev need not be E.
        attn_mask: Broadcasts to (..., Hq, L, S). Boolean: True = may attend. Floating: added to the scores,
            as `bias` is.
        bias: Added to the scores after `softcap`; broadcasts to (..., Hq, L, S). Of the query's dtype or of
            the accumulation dtype. -inf masks its pair; the smallest finite number does not.
        is_causal: Query i attends key j only if j <= i, counted from the upper left also where L != S. With
            a mask, both hold.
        scale: What the products are multiplied by: a finite number, or an array that broadcasts to
            (..., Hq, L, 1). Default 1 / sqrt(E).
        softcap: Scores become softcap * tanh(score / softcap), after `scale`. None or 0 is off.
        implementation: `"xp"` is the portable one, written in array-API calls. None leaves the choice to the
            library, which as yet has that one alone.

    Returns:
        (..., Hq, L, Ev), or (L, Ev) for 2-D inputs, of the query's library, device and dtype. A row with no
            key to attend is 0.

    Raises:
        TypeError: Arrays of several libraries or dtypes, a subclass that changes what arithmetic means,
            integer or complex data, an integer mask, or a keyword of a wrong type; names the argument.
        ValueError: Shapes that do not fit, arrays on several devices, or a keyword out of its range; names
            the argument and the axis.

    Numerics:
        Half dtypes are scored, normalised and summed in float32, float64 in float64; the result is rounded
        once. A pair that is masked adds nothing, even when its key or value is NaN or inf; a NaN that may be
        attended shows in exactly the rows that attend it. Inside a jit or a lazy graph this holds for keys
        that no query attends (padding). It holds for results, not for gradients: those of a key that is NaN
        are NaN.

    Examples:
        >>> import numpy as np
        >>> query, key = np.eye(2, 4), np.eye(3, 4)
        >>> value = np.asarray([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
        >>> scaled_dot_product_attention(query, key, value, is_causal=True).round(3)
        array([[1.   , 0.   ],
               [0.378, 0.622]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1, equation 1.
        Ainslie et al., "GQA", arXiv 2305.13245, section 2.2, for grouped heads.
        Gemma Team, "Gemma 2", arXiv 2408.00118, section 2, for the soft cap.
    """
    rules = Rules(attn_mask, bias, is_causal, scale, softcap, implementation)
    return _state("scaled_dot_product_attention", query, key, value, rules).output


def attention_state(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: AnyArray | None = None,
    *,
    bias: AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> AttentionState[A]:
    r"""Attention and the log-sum-exp of its scores, $\log \sum_j \exp(s_{ij})$.

    States over parts of the keys merge to the state over all of them: see `merge_states`.

    Shapes:
        As for `scaled_dot_product_attention`.

    Args:
        query: (..., Hq, L, E), as for `scaled_dot_product_attention`; so are all that follow.
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        attn_mask: Broadcasts to (..., Hq, L, S).
        bias: Broadcasts to (..., Hq, L, S).
        is_causal: Query i attends key j only if j <= i.
        scale: A number, or an array that broadcasts to (..., Hq, L, 1).
        softcap: A positive number, or None.
        implementation: `"xp"` or None.

    Returns:
        `output`, (..., Hq, L, Ev), and `lse`, (..., Hq, L), in the accumulation dtype. A row with no key to
            attend has output 0 and lse -inf.

    Raises:
        TypeError: As for `scaled_dot_product_attention`.
        ValueError: As for `scaled_dot_product_attention`.

    Examples:
        >>> import numpy as np
        >>> state = attention_state(np.zeros((1, 2)), np.ones((4, 2)), np.ones((4, 3)))
        >>> state.output, state.lse.round(3)
        (array([[1., 1., 1.]]), array([1.386]))

    References:
        Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1.
    """
    rules = Rules(attn_mask, bias, is_causal, scale, softcap, implementation)
    return _state("attention_state", query, key, value, rules)


def attention_weights(
    query: A,
    key: AnyArray,
    attn_mask: AnyArray | None = None,
    *,
    bias: AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> A:
    r"""The weights that attention gives to each key, $\mathrm{softmax}(q k^T \cdot scale + bias)$.

    This makes an array of L x S; attention itself does not need it.

    Shapes:
        As for `scaled_dot_product_attention`.

    Args:
        query: (..., Hq, L, E), as for `scaled_dot_product_attention`; so are all that follow.
        key: (..., H, S, E).
        attn_mask: Broadcasts to (..., Hq, L, S).
        bias: Broadcasts to (..., Hq, L, S).
        is_causal: Query i attends key j only if j <= i.
        scale: A number, or an array that broadcasts to (..., Hq, L, 1).
        softcap: A positive number, or None.
        implementation: `"xp"` or None.

    Returns:
        (..., Hq, L, S), or (L, S) for 2-D inputs, in the query's dtype. A row sums to 1, or to 0 where no
            key may be attended; a masked pair is 0.

    Raises:
        TypeError: As for `scaled_dot_product_attention`.
        ValueError: As for `scaled_dot_product_attention`.

    Examples:
        >>> import numpy as np
        >>> attention_weights(np.zeros((2, 4)), np.ones((2, 4)), is_causal=True)
        array([[1. , 0. ],
               [0.5, 0.5]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1.
    """
    rules = Rules(attn_mask, bias, is_causal, scale, softcap, implementation)
    call = check("attention_weights", {"query": query, "key": key}, rules)
    sizes, traced = call.sizes, call.scores.traced
    tiles = plan_rows(sizes.queries, sizes.keys, sizes.all_heads, traced=traced)
    with quiet(call.scores.query):
        return cast(A, call.without_heads(streaming.weights(call.scores, tiles, call.dtype)))


def merge_states(states: Iterable[AttentionState[A]]) -> AttentionState[A]:
    r"""Attention over all keys, from attention over parts of them.

    $o = \sum_i e^{lse_i - lse}\,o_i$ with $lse = \log \sum_i e^{lse_i}$.

    Shapes:
        As for `attention_state`; all states have the same.

    Args:
        states: What `attention_state` returned for the same queries and disjoint parts of the keys.

    Returns:
        The state over all these keys, in the dtypes of the first.

    Raises:
        TypeError: Something that is not a state, or states of several libraries or dtypes.
        ValueError: No state, or states whose shapes or devices differ.

    Examples:
        >>> import numpy as np
        >>> q, k, v = np.ones((1, 2)), np.eye(4, 2), np.eye(4)
        >>> parts = [attention_state(q, k[i : i + 2], v[i : i + 2]) for i in (0, 2)]
        >>> bool(np.allclose(merge_states(parts).output, scaled_dot_product_attention(q, k, v)))
        True

    References:
        Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2.
    """
    xp, parts = checks.states("merge_states", [*states])
    with quiet(parts[0][0]):
        output, lse = streaming.merge(xp, parts)
        output = xp.astype(output, parts[0][0].dtype, copy=False)
    return AttentionState(cast(A, output), cast(A, lse))


def _state(function: str, query: A, key: AnyArray, value: AnyArray, rules: Rules) -> AttentionState[A]:
    call = check(function, {"query": query, "key": key, "value": value}, rules)
    sizes, traced = call.sizes, call.scores.traced
    tiles = plan(sizes.queries, sizes.keys, sizes.all_heads, traced=traced)
    with quiet(call.scores.query):
        output, lse = streaming.attend(call.scores, cast(Array, call.value), tiles)
        output = call.scores.xp.astype(output, call.dtype, copy=False)
    return AttentionState(cast(A, call.without_heads(output)), cast(A, call.without_heads(lse)))
