"""The causal convolution in front of linear attention: each channel with a kernel of its own, and a state."""

from __future__ import annotations

from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from .._checks import brief
from .._checks.arrays import check_one_kind, explaining_missing_names
from .._checks.keywords import explains_keywords
from .._checks.linear import check_convolution
from .._libraries import accumulation_dtype, checked, computing, library_of, overridden
from .._libraries.protocols import AnyArray

A = TypeVar("A", bound=AnyArray)


class CausalConvState(NamedTuple, Generic[A]):
    """The output of a causal convolution, and the state for the tokens that follow."""

    output: A
    """(..., C, L), in the dtype of the input."""
    state: A
    """(..., C, k - 1): the last inputs, in their dtype."""

    def __repr__(self) -> str:
        return f"CausalConvState(output={brief(self.output)}, state={brief(self.state)})"


@explains_keywords
def causal_conv_with_state(
    input: A,
    weight: AnyArray,
    bias: AnyArray | None = None,
    state: AnyArray | None = None,
    *,
    activation: Literal["silu", "swish"] | None = None,
) -> CausalConvState[A]:
    r"""Compute a causal convolution of each channel along the tokens, as models do before linear attention.

    $y_{c,t} = b_c + \sum_j w_{c,j} x_{c,t-k+1+j}$, where inputs before the first come from the state.

    Args:
        input: (..., C, L): the channels, then the tokens.
        weight: (C, 1, k), as ONNX and torch have it. The last element meets the token itself.
        bias: (C,), or None.
        state: (..., C, k - 1), the state that an earlier call returned. The default is zeros.
        activation: "silu" or its other name "swish": the output is y / (1 + exp(-y)).

    Returns:
        `output`, (..., C, L), and `state`, (..., C, k - 1), the last k - 1 inputs, those of the passed state
            included. A step of decoding is a call with L = 1 and the state.

    Raises:
        TypeError: Arrays have several libraries or dtypes, or no floating dtype.
        ValueError: Shapes or devices do not fit, or the activation is unknown.

    Numerics:
        Halves are summed in float32. A NaN shows in the k outputs that read it.

    Examples:
        >>> import numpy as np
        >>> causal_conv_with_state(np.asarray([[1.0, 2.0, 3.0]]), np.asarray([[[10.0, 1.0]]]))
        CausalConvState(output=<float64 (1, 3)>, state=<float64 (1, 1)>)

    References:
        CausalConvWithState-27 of ONNX; Gu and Dao, "Mamba", arXiv 2312.00752, section 3.4.
    """
    function = "causal_conv_with_state"
    inputs: dict[str, Any] = {"input": input, "weight": weight, "bias": bias, "state": state}
    passed = {name: array for name, array in inputs.items() if array is not None}
    if (result := overridden(function, passed, lambda: {"activation": activation})) is not NotImplemented:
        return cast(CausalConvState[A], result)
    xp, arrays = check_one_kind(function, passed)
    state_shape = check_convolution(function, {n: tuple(x.shape) for n, x in arrays.items()}, activation)
    x, taps = arrays["input"], arrays["weight"]
    length, width = x.shape[-1], taps.shape[-1]
    with explaining_missing_names(function, x, computing(x)):
        dtype = accumulation_dtype(xp, x.dtype)
        zeros = xp.zeros(state_shape, dtype=x.dtype, device=library_of(x).device(x))
        padded = xp.concat([arrays.get("state", zeros), x], axis=-1)
        aligned = (*[1] * (x.ndim - 2), x.shape[-2])  # some libraries refuse unlike numbers of axes
        wide, taps = xp.astype(padded, dtype), xp.astype(xp.reshape(taps, (*aligned, width)), dtype)
        output = wide[..., :length] * taps[..., :1]
        for j in range(1, width):
            output = output + wide[..., j : j + length] * taps[..., j : j + 1]
        if "bias" in arrays:
            output = output + xp.astype(xp.reshape(arrays["bias"], (*aligned, 1)), dtype)
        if activation is not None:
            output = output / (xp.exp(-output) + 1.0)
        result = CausalConvState(xp.astype(output, x.dtype), padded[..., length:])
    return checked(library_of(x), function, cast(CausalConvState[A], result))
