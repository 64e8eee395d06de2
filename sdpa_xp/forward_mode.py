"""Attention with first and second derivatives along directions, in the same pass: forward mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack, cast

from ._call.options import CallOptions, DifferentiableOptions, floating_arrays, takes_options
from ._call.prepared_call import PreparedCall, prepare
from ._call.tangents import check_tangents, lifted, refuse_chunks
from ._libraries import overridden
from ._libraries.jets import JetNamespace
from ._libraries.protocols import AnyArray, Array
from ._programs.gradient_targets import try_functions
from ._programs.output import attend
from ._sources.arrays import ArraySource
from .biases.custom import check_answers
from .errors import ArgumentValueError
from .masks import Mask

A = TypeVar("A", bound=AnyArray)
JVP = "scaled_dot_product_attention_jvp"
LAPLACIAN = "scaled_dot_product_attention_laplacian"


@takes_options(DifferentiableOptions)
def scaled_dot_product_attention_jvp(
    query: A,
    key: AnyArray,
    value: AnyArray,
    tangents: Mapping[str, AnyArray],
    attn_mask: Mask | AnyArray | None = None,
    **keywords: Unpack[DifferentiableOptions],
) -> tuple[A, A]:
    r"""Compute attention, and its derivative along a direction: the Jacobian-vector product.

    If the inputs move by a small number times `tangents`, the output moves by this number times the tangent.
    With the weights $p$ of a row and the tangents $s'$ of its scores, the tangent is $\sum_j p_j (s'_j v_j +
    v'_j) - (\sum_j p_j s'_j) (\sum_j p_j v_j)$, in memory that grows with L + S.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.
        tangents: The direction: a dict of arrays, each with the shape and dtype of the argument of its name.
            The names are those of the gradients of `scaled_dot_product_attention_vjp`, such as "query", "scale"
            or "bias.slopes". Arguments without a tangent do not move.
        bias: A function in it (`biases.from_function`) may only add to the score.
        implementation: `"xp"` or None.

    Returns:
        The output and its tangent, both (..., Hq, L, Ev) in the dtype of the query.

    Raises:
        TypeError: A tangent has another library or dtype than its argument, or arrays are in lazy chunks.
        ValueError: A tangent has another shape or device than its argument, or a name that no floating argument
            of the call has.

    Numerics:
        As for `scaled_dot_product_attention_vjp`: a row whose keys are all masked has the tangent 0.

    Examples:
        >>> import numpy as np
        >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.asarray([[1.0], [3.0]])
        >>> scaled_dot_product_attention_jvp(
        ...     query, key, value, {"query": np.asarray([[0.0, 1.0]])}, scale=1
        ... )
        (array([[2.]]), array([[0.5]]))

    References:
        Lu and Song, "Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models", arXiv
        2410.11081, appendix F.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    if (
        result := overridden(JVP, inputs, lambda: {"tangents": tangents, **options._asdict()})
    ) is not NotImplemented:
        return cast(tuple[A, A], result)
    call = prepare(JVP, inputs, options)
    checked = check_tangents(JVP, tangents, floating_arrays(inputs, options))
    output, tangent = derivatives(call, options, [checked])
    return call.checked(output), call.checked(tangent, "tangent")


@takes_options(DifferentiableOptions)
def scaled_dot_product_attention_laplacian(
    query: A,
    key: AnyArray,
    value: AnyArray,
    tangents: Mapping[str, AnyArray],
    attn_mask: Mask | AnyArray | None = None,
    *,
    laplacians: Mapping[str, AnyArray] | None = None,
    **keywords: Unpack[DifferentiableOptions],
) -> tuple[A, A, A]:
    r"""Compute attention, its derivatives along directions, and its Laplacian: the sum of second derivatives.

    Along direction n of N, the inputs $x$ move as $x + t \, x'_n$. The Laplacian of the output is
    $\sum_n \partial_t^2 O(x + t \, x'_n)$ at $t = 0$, and the derivative of the output along the `laplacians`
    of the inputs, if these are functions of coordinates: this is the forward Laplacian. Memory grows with L +
    S.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention_jvp`.
        tangents: The directions: a dict of arrays, each with the dtype and the shape of the argument of its
            name, behind one axis of length N, at least 1.
        laplacians: The Laplacians of the inputs: a dict of arrays, each with the shape and dtype of the
            argument of its name. Those without one are 0.

    Returns:
        The output, (..., Hq, L, Ev); its tangents, (N, ..., Hq, L, Ev), one for each direction; and its
            Laplacian, (..., Hq, L, Ev), all in the dtype of the query.

    Examples:
        >>> import numpy as np
        >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.asarray([[1.0], [3.0]])
        >>> moved = {"query": np.asarray([[[0.0, 1.0]]]), "value": np.ones((1, 2, 1))}
        >>> output, tangents, laplacian = scaled_dot_product_attention_laplacian(
        ...     query, key, value, moved, scale=1
        ... )
        >>> tangents, laplacian
        (array([[[1.5]]]), array([[0.]]))

    References:
        Li et al., "A computational framework for neural network-based variational Monte Carlo with forward
        Laplacian", arXiv 2307.08214.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    more = {"tangents": tangents, "laplacians": laplacians}
    if (result := overridden(LAPLACIAN, inputs, lambda: {**more, **options._asdict()})) is not NotImplemented:
        return cast(tuple[A, A, A], result)
    call = prepare(LAPLACIAN, inputs, options)
    arrays = floating_arrays(inputs, options)
    count = _count_directions(tangents)
    moved = check_tangents(LAPLACIAN, tangents, arrays, count=count)
    directions = [{name: array[n, ...] for name, array in moved.items()} for n in range(count)]
    bends = check_tangents(LAPLACIAN, {} if laplacians is None else laplacians, arrays, "laplacians")
    output, *parts, laplacian = derivatives(call, options, directions, bends)
    tangent: Any = call.grid.xp.stack(parts, axis=0)
    return call.checked(output), call.checked(tangent, "tangent"), call.checked(laplacian, "laplacian")


def _count_directions(tangents: object) -> int:
    """Return the length of the first axis of the first tangent; what is no such array is refused later."""
    if not isinstance(tangents, Mapping):
        return 1
    shape = getattr(next(iter(tangents.values()), None), "shape", None)
    count = 0 if not tangents else shape[0] if shape else 1
    if count == 0:
        rule = "`tangents` must have at least one direction: arrays with one axis in front"
        raise ArgumentValueError(LAPLACIAN, rule, {"tangents": "none"})
    return cast(int, count)


def derivatives(
    call: PreparedCall,
    options: CallOptions,
    directions: Sequence[Mapping[str, Array]],
    bends: Mapping[str, Array] | None = None,
) -> list[Any]:
    """Return the output of a prepared call, its tangent along each direction, and with `bends` its laplacian.

    `options` are those that the call was prepared with. Directions and `bends`, the laplacians of the inputs,
    have passed `check_tangents`.
    """
    refuse_chunks(call.grid.function, call.grid.library)
    with call.computing():
        jets, grid = lifted(call, options, directions, bends), call.grid
        kind, value = cast(JetNamespace, jets.grid.xp), ArraySource(jets.arrays["value"])
        if call.is_empty:
            output = grid.xp.zeros((*grid.shape[:-1], value.width), dtype=grid.dtype, device=grid.device)
        else:
            try_functions(call.scores_without_dropout())
            output = attend(jets.scores(), value, jets.plan(), grid.dtype, "output")["output"]
            check_answers(jets.grid)
        return [call.result(kind.part(output, n)) for n in range(1 + len(kind.zeros_of_parts))]
