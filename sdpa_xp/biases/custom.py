"""Biases from the caller's own array, or from a function of a score and its indices; and a bias as an array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

from .._checks import brief
from .._checks.arrays import broadcast, check_floating, check_plain_array
from .._checks.keywords import check_function, explains_keywords
from .._libraries import dtype_name, is_traced
from .._libraries.protocols import AnyArray, Array
from .._tiles import Allowed, Tile, is_masked
from .._tiles.grid import CallGrid
from ..errors import ArgumentTypeError, ArgumentValueError
from ..masks.custom import apply_caller_function, array_of_rows, check_function_result
from .algebra import Bias, Term, as_bias, biased_zeros

ScoreFunction: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
"""score_mod(score, batch, head, query_index, key_index) -> score, as in torch's FlexAttention."""
ROUNDING = {"float32": 2.0**-20, "float64": 2.0**-49}
"""A few roundings: the error that a function may have if it only adds to the score."""


@explains_keywords
def from_array(array: AnyArray) -> Bias:
    """Convert a floating array to a bias, which combines with other biases. `bias` and `+` also take the array
    itself.

    Args:
        array: A floating array that broadcasts to (..., Hq, L, S); -inf masks a pair.

    Raises:
        TypeError: `array` is not a floating array.
        ValueError: The shape does not broadcast to (..., Hq, L, S) of a call.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import biases
        >>> biases.alibi(2) + biases.from_array(np.asarray([0.0, 1.5]))
        alibi(2) + from_array([0, 1.5])

    References:
        Shaw et al., "Self-Attention with Relative Position Representations", arXiv 1803.02155.
    """
    check_floating("from_array", "array", check_plain_array("from_array", "array", array))
    return as_bias("from_array", array)


@explains_keywords
def from_function(score_mod: ScoreFunction) -> Bias:
    """Return the bias of a function, which changes the score s of query i and key j to score_mod(s, b, h, i,
    j).

    Args:
        score_mod: A function with the signature of FlexAttention's score_mod. It is called for each tile,
            several times if the call is traced or has derivatives, with the scores after scale and soft cap,
            (..., Hq, rows, columns) in the accumulation dtype, and int32 arrays that broadcast to them, of
            batch entries, heads, queries and keys. It returns the new scores; -inf masks a pair. In a sum of
            biases, it gets the scores after the biases before it. For NumPy arrays, several threads call it at
            the same time.

    Raises:
        TypeError: `score_mod` cannot be called, or its result is not floating.
        ValueError: The result does not have the shape of the scores.

    Examples:
        >>> from sdpa_xp import biases
        >>> nearer = biases.from_function(
        ...     lambda score, b, h, q_idx, kv_idx: score - abs(q_idx - kv_idx)
        ... )
        >>> biases.to_array(nearer, (2, 3))
        array([[ 0., -1., -2.],
               [-1.,  0., -1.]])

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, section 3.1.
    """
    check_function("from_function", "score_mod", score_mod, ("score", "b", "h", "q_idx", "kv_idx"))
    return FunctionBias(score_mod)


@explains_keywords
def to_array(bias: Bias, shape: tuple[int, ...], *, rows: range | None = None, like: Any = None) -> Any:
    """Convert a bias to an array: the scores after the bias, if all scores before it are 0.

    Args:
        bias: A bias. All other arguments and errors are as in `masks.to_array`.

    Returns:
        A floating array of `shape`, with len(rows) instead of L; float64 if the device has it, else float32.

    Examples:
        >>> from sdpa_xp import biases
        >>> biases.to_array(biases.alibi([0.5]), (2, 3))
        array([[ 0. , -0.5, -1. ],
               [-0.5,  0. , -0.5]])

    References:
        Press et al., "Train Short, Test Long", arXiv 2108.12409, section 3.
    """
    if not isinstance(bias, Bias):
        raise ArgumentTypeError("to_array", "`bias` must be a bias", {"bias": brief(bias)})
    return array_of_rows("to_array", "bias", bias, shape, rows, like, partial(biased_zeros, bias))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FunctionBias(Bias, Term):
    """Made by `from_function`."""

    name = "from_function"
    is_of_caller = True
    score_mod: ScoreFunction

    def bind(self, _grid: CallGrid) -> tuple[Term, ...]:
        return (self,)

    def apply(self, tile: Tile, scores: Array, *, in_place: bool = False) -> tuple[Array, Allowed]:
        del in_place
        xp, function, library = tile.grid.xp, tile.grid.function, tile.grid.library
        values = library.values(scores)
        if values is not scores:  # its derivative is known only if it adds
            self.gradient(tile, values, values)
        returned = apply_caller_function(function, "bias", self.score_mod, (values, *tile.indices))
        result = check_function_result(function, "bias", returned, tile.shape, xp)
        check_floating(function, "bias", result)
        shape = broadcast(result.shape, scores.shape) or tile.shape
        # The function may have widened it: some libraries add float32 and int32 to float64.
        changed = xp.broadcast_to(xp.astype(result, tile.grid.dtype, copy=False), shape)
        return library.with_derivatives(changed, scores), ~is_masked(changed)

    def gradient(self, tile: Tile, scores: Array, _gradient: Array) -> None:
        xp, function, values = tile.grid.xp, tile.grid.function, tile.grid.library.values
        scores = values(scores)
        computed, _ = self.apply(tile, scores)
        if tile.grid.access.is_traced or is_traced(computed):
            refuse_unknown_derivative(function, traced=True)
        added, _ = self.apply(tile, values(xp.zeros_like(scores)))
        expected = scores + added
        largest = xp.max(xp.where(xp.isfinite(expected), xp.abs(scores) + xp.abs(added), 0.0))
        near = xp.abs(computed - expected) <= largest * ROUNDING[dtype_name(tile.grid.dtype)]
        equal = (computed <= expected) & (computed >= expected)  # also if both are infinite
        only_adds = xp.all(near | equal | ~xp.isfinite(scores))
        if (questions := tile.grid.questions) is not None:  # they are read after the last tile
            questions.ask(lambda: xp.reshape(only_adds, (1,)))
        elif not bool(only_adds):
            refuse_unknown_derivative(function, traced=False)


def check_answers(grid: CallGrid) -> None:
    """Refuse a function that does more than add, if tiles have asked about one: a device is waited for."""
    questions = grid.questions
    if questions is not None and questions.arrays and not all(map(all, questions.read(grid.library, grid.xp))):
        refuse_unknown_derivative(grid.function, traced=False)


def refuse_unknown_derivative(function: str, *, traced: bool) -> NoReturn:
    """Refuse a caller's function that does more than add to the score, or that cannot be tried."""
    rule = "the function of `bias` must only add to the score, because its derivative is not known"
    got = "a function that does more"
    if traced:
        got = "a function inside a jit or a lazy graph, where it cannot be tried"
    hint = "Pass what it adds as an array, or let torch or JAX differentiate `scaled_dot_product_attention`."
    raise ArgumentValueError(function, rule, {"bias": got}, hint)
