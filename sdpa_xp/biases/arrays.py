"""The array of a bias, to look at or to hand to another library."""

from __future__ import annotations

from typing import Any

from sdpa_xp import _checks as checks
from sdpa_xp._tiles.score_grid import grid_of
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.biases.algebra import Bias


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
    grid = grid_of("to_array", "bias", shape, bias.arrays(), like)
    xp = grid.xp
    if 0 in grid.shape:
        return xp.zeros(tuple(shape), dtype=grid.dtype, device=grid.device)
    scores = xp.zeros(grid.shape, dtype=grid.dtype, device=grid.device)
    tile = Tile(range(grid.queries), range(grid.keys), grid)
    for term in bias.bind(grid):
        scores, _ = term.apply(tile, scores)
    whole = xp.reshape(xp.broadcast_to(scores, grid.shape), tuple(shape))
    return xp.astype(whole, grid.dtype, copy=True)  # no view: neither read-only nor the caller's own
