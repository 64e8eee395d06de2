"""Linear attention with a state, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from .._checks import brief
from .._checks.arrays import Layout, explaining_missing_names
from .._checks.keywords import explains_keywords
from .._gradients import check_cotangent
from .._libraries import checked, computing, library_of, overridden
from .._libraries.protocols import AnyArray
from .call import LinearCall

A = TypeVar("A", bound=AnyArray)


class LinearAttentionState(NamedTuple, Generic[A]):
    """The output of linear attention, and the state for the tokens that follow."""

    output: A
    """(..., Hq, L, Ev), in the dtype of the query."""
    state: A
    """(..., H, E, Ev), in float32, or in float64 if the query is."""

    def __repr__(self) -> str:
        return f"LinearAttentionState(output={brief(self.output)}, state={brief(self.state)})"


@explains_keywords
def linear_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    *,
    decay: AnyArray | None = None,
    beta: AnyArray | None = None,
    state: AnyArray | None = None,
    rule: Literal["linear", "gated", "delta", "gated_delta"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    layout: Layout = "...HLE",
) -> LinearAttentionState[A]:
    r"""Compute linear attention, whose memory of earlier tokens is a state of fixed size.

    With $F_t = \mathrm{diag}(e^{g_t}) S_{t-1}$, the state is $S_t = F_t + k_t u_t^T$ and the output
    $o_t = scale \; S_t^T q_t$. Here $u_t = v_t$, or with `beta`, the delta rule,
    $u_t = \beta_t (v_t - F_t^T k_t)$. Time and memory are linear in L. A step of decoding is a call with L = 1
    and the `state` of the last call.

    Args:
        query: (..., Hq, L, E), or (L, E). Query head h reads the state of head h // (Hq // H).
        key: (..., H, L, E). The delta rule needs keys of length 1 at most, or the state may grow without bound.
        value: (..., H, L, Ev).
        decay: The logarithms g of what a token keeps of the state, at most 0, for each key channel or head:
            broadcasts to (..., H, L, E) or (..., H, L, 1). -inf forgets all.
        beta: How far a token corrects the state, from 0 to 1: broadcasts to (..., H, L, 1).
        state: (..., H, E, Ev), the state that an earlier call returned. The default is zeros.
        rule: "linear", "gated" (with `decay`), "delta" (with `beta`) or "gated_delta" (with both), to check the
            arguments. By default it follows from them.
        scale: The factor of the output; 1/sqrt(E) by default.
        chunk_size: The tokens of a chunk, rounded down to a power of 2. It changes no result but by rounding:
            with the delta rule, the errors grow above 100 or so.
        layout: "...HLE" or "...LHE", of all arrays but the state.

    Returns:
        `output`, (..., Hq, L, Ev), and `state`, (..., H, E, Ev). States of the rule "linear" add, so
            that the state of two sets of tokens is the sum of theirs. With decay, the first is faded by exp of
            the sum of the second's decay before it is added. With the delta rule, states do not add: pass them
            on.

    Raises:
        TypeError: Arrays have several libraries, or dtypes other than the query's; `decay`, `beta` and `state`
            may have the state's. Or they are lazy arrays in chunks.
        ValueError: Shapes or devices do not fit, the rule has other arguments, or L is a symbol.

    Numerics:
        All is computed in the dtype of the state. What is left of earlier tokens is a product of exp(decay),
        and nothing is divided, so that no decay overflows. A NaN or inf shows from its token on, also in the
        state, and in no output before.

    Examples:
        >>> import numpy as np
        >>> key = value = np.eye(3)
        >>> output, state = linear_attention(np.ones((3, 3)), key, value, scale=1)
        >>> output
        array([[1., 0., 0.],
               [1., 1., 0.],
               [1., 1., 1.]])

    References:
        Yang et al., "Gated Linear Attention", arXiv 2312.06635; "Gated Delta Networks", arXiv 2412.06464;
        LinearAttention-27 of ONNX.
    """
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    more: dict[str, Any] = {"decay": decay, "beta": beta, "state": state}
    settings: dict[str, Any] = {"rule": rule, "scale": scale, "chunk_size": chunk_size, "layout": layout}
    function = "linear_attention"
    if (result := overridden(function, inputs, lambda: more | settings)) is not NotImplemented:
        return cast(LinearAttentionState[A], result)
    return cast(LinearAttentionState[A], _forward(LinearCall(function, inputs | more, **settings))[0])


@explains_keywords
def linear_attention_vjp(
    query: A,
    key: AnyArray,
    value: AnyArray,
    *,
    decay: AnyArray | None = None,
    beta: AnyArray | None = None,
    state: AnyArray | None = None,
    rule: Literal["linear", "gated", "delta", "gated_delta"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    layout: Layout = "...HLE",
) -> tuple[LinearAttentionState[A], Callable[..., dict[str, A]]]:
    """Compute linear attention, and return a function that computes the gradients, in any library.

    Of the forward pass, only a state for each part of some chunks is kept. The returned function, the pullback,
    computes the parts again, from the last one to the first.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `linear_attention`.

    Returns:
        What `linear_attention` returns, and `pullback(cotangent, state_cotangent=None)`. It takes the gradients
            of your loss with respect to the output and to the state, and returns those of the inputs by name:
            "query", "key", "value", and each of "decay", "beta" and "state" that was passed.

    Examples:
        >>> import numpy as np
        >>> x = np.ones((2, 1))
        >>> (output, state), pullback = linear_attention_vjp(x, x, x)
        >>> pullback(np.ones_like(output))["value"]
        array([[2.],
               [1.]])

    References:
        Griewank and Walther, "Evaluating Derivatives", 2nd edition, 2008, chapters 3 and 12.
    """
    inputs = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "state": state}
    settings: dict[str, Any] = {"rule": rule, "scale": scale, "chunk_size": chunk_size, "layout": layout}
    call = LinearCall("linear_attention_vjp", inputs, **settings)
    result, states = _forward(call)

    def pullback(cotangent: AnyArray, state_cotangent: AnyArray | None = None) -> dict[str, A]:
        function, (output, last) = call.function, result
        of_output = check_cotangent(cotangent, output, output.shape, function=function, like_name="output")
        of_state, kind = None, {"function": function, "like_name": "state", "result": "state"}
        if state_cotangent is not None:
            of_state = check_cotangent(state_cotangent, last, last.shape, "state_cotangent", **kind)
        with _computing(call):
            gradients = call.backward(states, of_output, of_state)
        return cast(dict[str, A], gradients)

    return result, pullback


def _forward(call: LinearCall) -> tuple[LinearAttentionState[Any], list[Any]]:
    with _computing(call):
        output, state, states = call.forward()
    result = LinearAttentionState(output, state)
    return checked(library_of(output), call.function, result), states


def _computing(call: LinearCall) -> AbstractContextManager[object]:
    query = call.arrays["query"]
    return explaining_missing_names(call.function, query, computing(query))
