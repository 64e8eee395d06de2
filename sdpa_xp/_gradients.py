"""Attention with a function that computes its gradients, for arrays that no framework differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, Unpack, cast

from ._call import PreparedCall, prepare
from ._call.options import (
    CallOptions,
    CheckedOptions,
    DifferentiableOptions,
    DrawnSeed,
    floating_arrays,
    takes_options,
)
from ._call.tangents import beside, check_alike, check_tangents
from ._checks.keywords import explains_keywords
from ._derivatives import Derivable, derive, pull_back, second_order
from ._libraries import overridden
from ._libraries.protocols import AnyArray, Array, Shape
from .errors import ArgumentValueError
from .masks import Mask

A = TypeVar("A", bound=AnyArray)
O = TypeVar("O", CallOptions, CheckedOptions)
FUNCTION = "scaled_dot_product_attention_vjp"


@takes_options(DifferentiableOptions)
def scaled_dot_product_attention_vjp(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    **keywords: Unpack[DifferentiableOptions],
) -> tuple[A, Pullback[A]]:
    r"""Compute attention, and return a function that computes the gradients of the inputs, in any library.

    Memory grows linearly with L + S, because the scores are not stored: the returned function, the pullback,
    computes them again, tile by tile.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.
        bias: A function in it (`biases.from_function`) may only add to the score.
        implementation: `"xp"` or None.

    Returns:
        The output, (..., Hq, L, Ev), and the function `pullback`. `pullback(cotangent)`, with the gradient of
            your loss with respect to the output, an array like it, returns the gradients by name: "query",
            "key", "value", each of "attn_mask", "bias", "scale" and "sinks" that is a floating array, and the
            arrays of a bias: "bias.array", "bias.slopes" of ALiBi, "bias.table" of relative positions. Each has
            the shape and dtype of its array. `pullback` reads the inputs and the output again, so do not write
            to them before its last call.

    Numerics:
        Gradients are summed in the accumulation dtype and rounded once. A row whose keys are all masked has
        gradient 0. A masked pair adds nothing, even if its query, key, value or cotangent is NaN or inf; inside
        a jit, only if no query attends to its key.

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
    options = CallOptions.from_keywords(attn_mask, keywords)
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    if (result := overridden(FUNCTION, inputs, options._asdict)) is not NotImplemented:
        return cast(tuple[A, Pullback[A]], result)
    return _differentiated(inputs, options)


def _differentiated(inputs: Mapping[str, Any], options: CallOptions) -> tuple[Any, Pullback[Any]]:
    call = prepare(FUNCTION, inputs, options)
    arrays = floating_arrays(inputs, options)
    with call.computing():
        forward = derive(call, arrays)
        output = call.result(forward.output)
    return call.checked(output), Pullback(call, arrays, forward, output.shape)


@explains_keywords
class Pullback(Generic[A]):
    """The function that `scaled_dot_product_attention_vjp` returns."""

    def __init__(
        self, call: PreparedCall, arrays: Mapping[str, Array], forward: Derivable, output: Shape
    ) -> None:
        self._call, self._arrays, self._forward, self._output = call, arrays, forward, output

    def __repr__(self) -> str:
        return f"<pullback of {FUNCTION}: {self._output} to {', '.join(self._arrays)}>"

    def __call__(self, cotangent: AnyArray) -> dict[str, A]:
        """Return the gradients of the inputs, by name.

        Args:
            cotangent: The gradient of a loss with respect to the output, with the output's shape.
        """
        array = check_cotangent(cotangent, self._arrays["query"], self._output)
        if (lifted := self._beside({"cotangent": array})) is not None:
            return lifted(array)
        # The context of the output has ended, and the caller may be in another thread now.
        with self._call.computing():
            computed = pull_back(self._call, self._forward, self._arrays, array)
        return self._checked(computed)

    def jvp(
        self, cotangent: AnyArray, tangents: Mapping[str, AnyArray], cotangent_tangent: AnyArray | None = None
    ) -> tuple[dict[str, A], dict[str, A]]:
        r"""Return the gradients, and their derivatives along a direction: a Hessian-vector product.

        For a fixed cotangent c, the derivatives are the Hessian of $\langle c, O \rangle$ times the tangents,
        as in double backward. Memory grows with L + S.

        Args:
            cotangent: As in a call of the pullback.
            tangents: The direction, as for `scaled_dot_product_attention_jvp`.
            cotangent_tangent: How the cotangent moves, with its shape, or None: of a loss that is not linear in
                the output, the Hessian of the loss times the tangent of the output.

        Returns:
            The gradients and their derivatives, both by name, as the pullback returns gradients.

        Raises:
            TypeError: An array has another library or dtype than its input, or is a lazy array in chunks.
            ValueError: An array has another shape or device than its input, or a tangent has a name that no
                floating array of the call has.
        """
        array = check_cotangent(cotangent, self._arrays["query"], self._output)
        moved = None
        if cotangent_tangent is not None:
            moved = check_cotangent(cotangent_tangent, self._arrays["query"], self._output, "cotangent_tangent")
        checked = check_tangents(FUNCTION, tangents, self._arrays)
        lifted = self._beside({**checked, "cotangent": array, "cotangent_tangent": moved})
        if lifted is not None:
            return lifted.jvp(array, checked, moved)
        names, options = self._forward.targets, self._with_seed(self._call.options)
        call = self._call._replace(options=options)
        with call.computing():
            _, *computed = second_order(call, self._arrays, names, array, checked, moved)
        gradients, derivatives = map(self._checked, computed)
        return gradients, derivatives

    def _beside(self, others: Mapping[str, Array | None]) -> Pullback[A] | None:
        """Return the pullback of a query with derivatives, if `others` have some and the inputs have none."""
        if (query := beside(self._arrays["query"], others)) is self._arrays["query"]:
            return None
        inputs = {"query": query, "key": self._arrays["key"], "value": self._arrays["value"]}
        return _differentiated(inputs, self._with_seed(self._call.call_options))[1]

    def _with_seed(self, options: O) -> O:
        """Return options that drop the pairs which the output has dropped."""
        forward = self._forward.forward
        dropout = None if forward is None else forward.scores.options.dropout
        return options if dropout is None else options._replace(rng=DrawnSeed(dropout.seed))

    def _checked(self, computed: Mapping[str, Array]) -> dict[str, A]:
        return {name: self._call.checked(cast(A, gradient), name) for name, gradient in computed.items()}


def check_cotangent(
    value: object,
    like: Array,
    shape: Shape,
    name: str = "cotangent",
    *,
    function: str = FUNCTION,
    like_name: str = "query",
    result: str = "output",
) -> Array:
    """Check that a cotangent is like a result, and return it.

    The result has the library, dtype and device of `like`, which messages call `like_name`.
    """
    array = check_alike(function, name, value, like_name, like)
    if array.shape != shape:
        rule = f"`{name}` must have the shape of the {result}"
        raise ArgumentValueError(function, rule, {f"{name}.shape": array.shape, f"{result}.shape": shape})
    return array
