"""Attention with a function that computes its gradients, for arrays that no framework differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from sdpa_xp._call.options import CallOptions, floating_arrays
from sdpa_xp._call.prepared_call import PreparedCall, prepare
from sdpa_xp._checks.arrays import (
    Layout,
    check_known,
    check_one_device,
    check_one_dtype,
    check_one_library,
    swap_heads_and_length,
)
from sdpa_xp._checks.keywords import Implementation, explains_keywords
from sdpa_xp._core import streaming
from sdpa_xp._core.backward import Forward, gradients
from sdpa_xp._core.gradient_sums import gradient_targets, try_functions
from sdpa_xp._core.products import ArraySource
from sdpa_xp._libraries import astype_if_needed, overridden
from sdpa_xp._libraries.protocols import AnyArray, Array, Dtype, Rng, Shape
from sdpa_xp._many import graph_call
from sdpa_xp._tiles.tile import GradientTarget
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.masks import Mask

A = TypeVar("A", bound=AnyArray)
Pullback: TypeAlias = Callable[[AnyArray], dict[str, A]]
"""A function from the gradient of the output to the gradients of the inputs, by name."""

FUNCTION = "scaled_dot_product_attention_vjp"


@explains_keywords
def scaled_dot_product_attention_vjp(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    bias: Bias | AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    softmax_dtype: Dtype | None = None,
    layout: Layout = "...HLE",
    implementation: Implementation | None = None,
) -> tuple[A, Pullback[A]]:
    r"""Compute attention, and return a function that computes the gradients of the inputs.

    You need no framework with automatic differentiation, so you can train with NumPy. Memory grows linearly
    with L + S, because the scores are not stored: the returned function, the pullback, computes them again,
    tile by tile.

    Shapes:
        As for `scaled_dot_product_attention`.

    Args:
        query: (..., Hq, L, E). All arguments are as in `scaled_dot_product_attention`.
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        attn_mask: A mask, or an array that broadcasts to (..., Hq, L, S).
        bias: A bias, or an array that broadcasts to (..., Hq, L, S). The function of `biases.from_function`
            may only add to the score.
        is_causal: Query i attends to key j only if j <= i.
        scale: A number, or an array that broadcasts to (..., Hq, L, 1).
        softcap: A positive number; None or 0 is off.
        sinks: (..., Hq).
        dropout_p: From 0 to 1.
        rng: Required if dropout_p > 0. Each pullback drops the weights that the output dropped.
        softmax_dtype: float32, float64 or None.
        layout: "...HLE" or "...LHE".
        implementation: `"xp"` or None.

    Returns:
        The output, (..., Hq, L, Ev), and the function `pullback`. Call `pullback(cotangent)`, where `cotangent`
            is the gradient of your loss with respect to the output, with the output's shape, dtype, library and
            device. It returns the gradients of the loss by name: "query", "key", "value", and each of
            "attn_mask", "bias", "scale" and "sinks" that is a floating array. The arrays of a bias are named as
            in messages: "bias.array", "bias.slopes" of ALiBi, "bias.table" of relative positions. Each gradient
            has the shape and dtype of its array. You can call `pullback` several times. It reads the inputs and
            the output again, so do not write to them before its last call.

    Raises:
        TypeError: As for `scaled_dot_product_attention`. `pullback` raises it for its `cotangent`.
        ValueError: As for `scaled_dot_product_attention`; or the function of a bias does more than add.
            `pullback` raises it for a `cotangent` of another shape or device.

    Numerics:
        Gradients are summed in the accumulation dtype and rounded once. A row whose keys are all masked has
        gradient 0. A masked pair adds nothing, even if its query, key, value or cotangent is NaN or inf. If a
        key or value that is not masked is NaN, the NaN appears only in the gradients of the rows that attend to
        it, and of the keys and values that these rows attend to. Inside a jit, a NaN is without effect only if
        no query attends to its key. All pairs are one tile there, so the compiler decides how much memory is
        needed. Dask arrays are computed chunk by chunk.

    Examples:
        >>> import numpy as np
        >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.asarray([[1.0], [3.0]])
        >>> output, pullback = scaled_dot_product_attention_vjp(
        ...     query, key, value, scale=1
        ... )
        >>> gradients = pullback(np.ones_like(output))
        >>> gradients["query"], gradients["value"]
        (array([[-0.5,  0.5]]), array([[0.5],
               [0.5]]))

    References:
        Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1, algorithm 2.
    """
    options = CallOptions(
        attn_mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
    )
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    if (result := overridden(FUNCTION, inputs, options._asdict)) is not NotImplemented:
        return cast(tuple[A, Pullback[A]], result)
    call = prepare(FUNCTION, inputs, options)
    arrays = floating_arrays(inputs, options)
    with call.computing():
        forward = _forward(call, arrays)
        output = call.result(forward.output)
    call.checked(output)
    shape = output.shape

    def pullback(cotangent: AnyArray) -> dict[str, A]:
        array = _check_cotangent(cotangent, arrays["query"], shape)
        # The context of the output has ended, and the caller may be in another thread now.
        with call.computing():
            computed = _backward(call, forward, arrays, array)
        return {name: call.checked(cast(A, gradient), name) for name, gradient in computed.items()}

    return cast(A, output), pullback


class Derivable(NamedTuple):
    """The output of a call, and what its gradients are computed with."""

    output: Array
    """(..., Hq, L, Ev), in the accumulation dtype."""
    targets: Mapping[str, GradientTarget]
    gradients: Callable[[Array], dict[str, Array]]
    """Returns the gradient of each target from the cotangent of the output."""


def _forward(call: PreparedCall, arrays: Mapping[str, Array]) -> Derivable:
    """Compute the output, and return all that the gradients of `arrays` are computed with."""
    cut = graph_call(call) if call.grid.library.chunks is not None else None
    # Before the output, so that a call that has no gradients is refused at once, and not by its pullback.
    if call.options.biases and not call.is_empty:
        try_functions(call.scores_without_dropout() if cut is None else cut.readable_scores())
    scores = call.scores() if cut is None else call.scores_without_dropout()
    if cut is None:
        scores = call.search_inputs(scores)
    value = ArraySource(call.arrays["value"])
    targets, bias_names = gradient_targets(scores, call.arrays["key"], value.array, arrays)
    if cut is not None:
        output, lse = cut.attend(call.grid.dtype, in_parts=True)
        return Derivable(output, targets, partial(cut.gradients, output, lse, targets, arrays))
    plan = call.plan()
    output, lse_parts = streaming.attend(scores, value, plan, call.grid.dtype, in_parts=True)
    forward = Forward(scores, value, output, cast(Array, lse_parts), targets, bias_names, plan)
    return Derivable(output, targets, partial(gradients, forward))


def _backward(
    call: PreparedCall, forward: Derivable, arrays: Mapping[str, Array], cotangent: Array
) -> dict[str, Array]:
    """Return the gradient of each of the caller's arrays, in its shape, layout and dtype."""
    xp = call.grid.xp
    if call.is_empty:
        return {name: xp.zeros_like(array) for name, array in arrays.items()}

    def swapped(array: Array) -> Array:
        return swap_heads_and_length(xp, array, call.layout)

    heads_first = xp.expand_dims(cotangent, axis=0) if call.sizes.is_2d else swapped(cotangent)
    computed = forward.gradients(heads_first)
    for name in call.arrays:
        computed[name] = computed[name][0, ...] if arrays[name].ndim == 2 else swapped(computed[name])
    in_caller_shape = {
        name: forward.targets[name].in_caller_shape(xp, computed[name], array.shape)
        for name, array in arrays.items()
    }
    return {name: astype_if_needed(xp, in_caller_shape[name], array.dtype) for name, array in arrays.items()}


def _check_cotangent(value: object, query: Array, output: Shape) -> Array:
    """Check that a cotangent is like the output, and return it.

    The output has the library, dtype and device of the query.
    """
    _, arrays = check_one_library(FUNCTION, {"query": query, "cotangent": value})
    check_one_dtype(FUNCTION, arrays)
    check_one_device(FUNCTION, arrays)
    array = arrays["cotangent"]
    check_known(FUNCTION, "cotangent", array.shape)
    if array.shape != output:
        rule = "`cotangent` must have the shape of the output"
        raise ArgumentValueError(FUNCTION, rule, {"cotangent.shape": array.shape, "output.shape": output})
    return array
