"""Attention with first and second derivatives along directions, in the same pass: forward mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, cast

from ._call import PreparedCall, prepare
from ._call.options import CallOptions, DifferentiableOptions, floating_arrays, takes_options
from ._call.tangents import beside, check_tangent, check_tangents, lifted, refuse_chunks
from ._checks import shown, type_name
from ._checks.arrays import check_floating, check_one_library
from ._checks.keywords import explains_keywords
from ._libraries import dtype_name, in_own_memory, is_number, library_of, overridden
from ._libraries.jet_library import kind_of_caller
from ._libraries.jet_namespace import JetNamespace
from ._libraries.jets import Jet
from ._libraries.protocols import AnyArray, Array
from ._libraries.trees import mapped
from ._programs.gradients import try_functions
from ._programs.output import attend
from ._tiles import ArraySource
from .biases.custom import check_answers
from .errors import ArgumentTypeError, ArgumentValueError
from .masks import Mask

A = TypeVar("A", bound=AnyArray)
JVP = "scaled_dot_product_attention_jvp"
LAPLACIAN = "scaled_dot_product_attention_laplacian"


@explains_keywords
def jvp(
    function: Callable[..., Any], primals: Sequence[AnyArray], tangents: Sequence[AnyArray]
) -> tuple[Any, Any]:
    r"""Compute a function of arrays, and its derivative along a direction, as `jax.jvp` and `torch.func.jvp`.

    The tangent of the output $f(x)$ is $\partial f(x)\, x'$. The function may call this library, use operators
    and the functions that `x.__array_namespace__()` has, and call `jvp`, for second derivatives.

    Args:
        function: It takes the `primals`, as arrays that cannot be written to, and returns an array, or a
            tuple, list, dict, dataclass or object of this library with arrays.
        primals: The arguments, a tuple of floating arrays of one library.
        tangents: The direction: for each argument an array of its shape, dtype and device.

    Returns:
        The output and its tangent, the same with derivatives in place of arrays and floats.

    Raises:
        TypeError: An argument is no such tuple, or arrays have several libraries or dtypes, or lazy chunks. Or
            the function converts an array to a number or for NumPy, writes to it, or returns a set or function.
        ValueError: The tangents have another number, shape or device than the primals; or a call of the
            function is `reproducible`.
        AttributeError: The derivative of a function of the namespace is not known.

    Numerics:
        Of several largest elements, the first has the derivative. The codes of a quantised cache are constants,
        its scales are not.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import attention_state, jvp
        >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.asarray([[1.0], [3.0]])
        >>> moved = np.asarray([[0.0, 1.0]])
        >>> state, tangent = jvp(lambda x: attention_state(x, key, value, scale=1), (query,), (moved,))
        >>> tangent.output, tangent.lse
        (array([[0.5]]), array([0.5]))

    References:
        Griewank and Walther, "Evaluating Derivatives", 2nd edition, 2008, chapter 3.
    """
    if not callable(function):
        raise ArgumentTypeError("jvp", "`function` must be a function", {"function": shown(function)})
    for name, part in (("primals", primals), ("tangents", tangents)):
        if not isinstance(part, tuple | list):
            raise ArgumentTypeError("jvp", f"`{name}` must be a tuple of floating arrays", {name: shown(part)})
    if len(primals) != len(tangents) or not primals:
        rule = "there must be a tangent for each primal, and at least one"
        raise ArgumentValueError("jvp", rule, {"primals": len(primals), "tangents": len(tangents)})
    moved = map(_whole, tangents)
    _, arrays = check_one_library("jvp", {f"primals[{n}]": _whole(x) for n, x in enumerate(primals)})
    for name, array in arrays.items():
        check_floating("jvp", name, array)
        refuse_chunks("jvp", library_of(array), name)
    directions = [
        check_tangent("jvp", f"tangents[{n}]", tangent, *pair)
        for n, (tangent, pair) in enumerate(zip(moved, arrays.items(), strict=True))
    ]
    with kind_of_caller(arrays["primals[0]"]) as kind:
        jets = [Jet(kind, pair) for pair in zip(arrays.values(), directions, strict=True)]
        output = _apply(function, jets)
        inputs = [*arrays.values(), *directions]
        value, tangent = (mapped(partial(_result, kind, inputs, n), output) for n in (0, 1))
    return value, tangent


def _apply(function: Callable[..., Any], jets: Sequence[Jet]) -> Any:
    """Call a caller's function. An error of another library, which knows no jets, says what to do."""
    try:
        return function(*jets)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentTypeError | ArgumentValueError) or Jet.__name__ not in str(error):
            raise
        rule = "`function` must use operators and the functions that `x.__array_namespace__()` has"
        hint = "In an operator with an array that refuses it, write the array with derivatives on the left."
        raise ArgumentTypeError("jvp", rule, {"its error": error}, hint) from error


def _whole(value: Any) -> Any:
    """Return a scalar of NumPy, which NumPy returns in place of arrays without axes, as such an array."""
    return library_of(value).base_form(value) if is_number(value) and hasattr(value, "dtype") else value


def _result(kind: JetNamespace, inputs: Sequence[Array], n: int, leaf: Any) -> Any:
    """Return the value or the tangent of a leaf of an output, in memory that no input has."""
    if leaf is None or isinstance(leaf, str | bytes | int):
        return leaf
    if is_number(leaf):
        return leaf if n == 0 else type(leaf)(0)
    if not hasattr(leaf, "dtype") or dtype_name(leaf.dtype) == "object":
        rule = "`function` must return arrays and numbers in tuples, lists, dicts or dataclasses"
        raise ArgumentTypeError("jvp", rule, {"its output": type_name(leaf)})
    part = kind.part(leaf, n)
    library = library_of(part)
    if n:  # the functions that computed the value have looked at it
        library.find_nonfinite("jvp", "tangent", part)
    return in_own_memory(part, inputs)


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

    With the weights $p$ of a row and the tangents $s'$ of its scores, the tangent is $\sum_j p_j (s'_j v_j +
    v'_j) - (\sum_j p_j s'_j) (\sum_j p_j v_j)$, in memory that grows with L + S.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention_vjp`.
        tangents: The direction: a dict of arrays, each with the shape and dtype of its argument. The names are
            those of the gradients of `scaled_dot_product_attention_vjp`, such as "query", "scale" or
            "bias.slopes". Arguments without a tangent do not move.

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
    inputs["query"] = beside(query, tangents)
    call = prepare(JVP, inputs, options)
    checked = check_tangents(JVP, tangents, floating_arrays(inputs, options))
    output, tangent = derivatives(call, [checked])
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
    $\sum_n \partial_t^2 O(x + t \, x'_n)$ at $t = 0$, plus the derivative of the output along the `laplacians`
    of the inputs. Memory grows with L + S.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention_jvp`.
        tangents: The directions, by name: arrays with the dtype and the shape of their argument, behind one
            axis of length N, at least 1.
        laplacians: The Laplacians of the inputs, by name: arrays with the shape and dtype of their argument.
            Those without one are 0.

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
    inputs["query"] = beside(query, tangents, laplacians)
    call = prepare(LAPLACIAN, inputs, options)
    arrays = floating_arrays(inputs, options)
    count = _count_directions(tangents)
    moved = check_tangents(LAPLACIAN, tangents, arrays, count=count)
    bends = check_tangents(LAPLACIAN, {} if laplacians is None else laplacians, arrays, "laplacians")
    with call.computing():
        directions = [{name: array[n, ...] for name, array in moved.items()} for n in range(count)]
        output, *parts, laplacian = derivatives(call, directions, bends)
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
    call: PreparedCall, directions: Sequence[Mapping[str, Array]], bends: Mapping[str, Array] | None = None
) -> list[Any]:
    """Return the output of a prepared call, its tangent along each direction, and with `bends` its laplacian.

    Directions and `bends`, the laplacians of the inputs, have passed `check_tangents`.
    """
    refuse_chunks(call.grid.function, call.grid.library)
    with call.computing():
        jets, grid = lifted(call, directions, bends), call.grid
        kind, value = cast(JetNamespace, jets.grid.xp), ArraySource(jets.arrays["value"])
        if call.is_empty:
            output = grid.xp.zeros((*grid.shape[:-1], value.width), dtype=grid.dtype, device=grid.device)
        else:
            try_functions(call.scores())
            output = attend(jets.draw_scores(), value, jets.plan(), grid.dtype, "output")["output"]
            check_answers(jets.grid)
        return [call.result(kind.part(output, n)) for n in range(1 + len(kind.zeros_of_parts))]
