"""The array of a bias, to look at or to hand to another library."""

from __future__ import annotations

from typing import Any

from sdpa_xp import checks
from sdpa_xp.biases.algebra import Bias
from sdpa_xp.pairs import pairs_of
from sdpa_xp.tiles import Tile


def to_array(bias: Bias, shape: tuple[int, ...], *, like: Any = None) -> Any:
    """What the bias adds, as an array: what it makes of scores of 0.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        bias: A bias.
        shape: (L, S), or (..., Hq, L, S) where the bias differs from one batch entry or head to another.
        like: An array of the library, and on the device, that the result is to be of. By default those of
            the first array that the bias holds, else NumPy.

    Returns:
        A floating array of `shape`, float64 where the library has it.

    Raises:
        TypeError: Something that is no bias, or a bias whose arrays are of another library.
        ValueError: A shape that has no L and S, or that the bias does not fit.

    Examples:
        >>> from sdpa_xp import biases
        >>> biases.to_array(biases.alibi([0.5]), (2, 3))
        array([[ 0. , -0.5, -1. ],
               [-0.5,  0. , -0.5]])

    References:
        Press et al., "Train Short, Test Long", arXiv 2108.12409, section 3.
    """
    if not isinstance(bias, Bias):
        raise TypeError(checks.message("to_array", "`bias` must be a bias", {"bias": checks.brief(bias)}))
    pairs = pairs_of("to_array", "bias", shape, bias.arrays(), like)
    xp = pairs.xp
    if 0 in pairs.scores:
        return xp.zeros(tuple(shape), dtype=pairs.dtype, device=pairs.device)
    scores = xp.zeros(pairs.scores, dtype=pairs.dtype, device=pairs.device)
    tile = Tile(range(pairs.queries), range(pairs.keys), pairs)
    for term in bias.bind(pairs):
        scores, _ = term.apply(tile, scores)
    whole = xp.reshape(xp.broadcast_to(scores, pairs.scores), tuple(shape))
    return xp.astype(whole, pairs.dtype, copy=True)  # no view: neither read-only nor the caller's own
