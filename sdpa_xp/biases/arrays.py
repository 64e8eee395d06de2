"""Convert a bias to an array, to look at it or to pass it to another library."""

from __future__ import annotations

from typing import Any

from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp._checks.messages import brief
from sdpa_xp._checks.numbers import check_rows
from sdpa_xp._libraries import quiet
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp._tiles.score_grid import ScoreGrid, grid_of
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.biases.algebra import Bias
from sdpa_xp.errors import ArgumentTypeError


@explains_keywords
def to_array(bias: Bias, shape: tuple[int, ...], *, rows: range | None = None, like: Any = None) -> Any:
    """Convert a bias to an array: the scores after the bias, if all scores before it are 0.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        bias: A bias.
        shape: (L, S), or (..., Hq, L, S) if the bias differs between batch entries or heads.
        rows: The queries to convert, as a range with step 1; by default all of them. A few rows of a long bias
            need little memory.
        like: An array with the library and the device of the result. By default the first array in the bias, or
            NumPy if there is none.

    Returns:
        A floating array of `shape`, with `len(rows)` instead of L; float64 if the device has it, else float32.

    Raises:
        TypeError: `bias` is not a bias, its arrays belong to another library, or `rows` is not a range.
        ValueError: `shape` has fewer than two axes, the bias does not fit it, or `rows` are not among the L
            queries.

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
    grid = grid_of("to_array", "bias", shape, bias.arrays(), like)
    rows = check_rows("to_array", "rows", rows, grid.queries)
    with quiet(next((array for _, array in bias.arrays()), like)):
        return _of_rows(bias, grid, rows, (*shape[:-2], len(rows), shape[-1]))


def _of_rows(bias: Bias, grid: ScoreGrid, rows: range, shape: Shape) -> Array:
    xp = grid.xp
    if 0 in shape:
        return xp.zeros(shape, dtype=grid.dtype, device=grid.device)
    tile = Tile(rows, range(grid.keys), grid)
    scores = xp.zeros(tile.shape, dtype=grid.dtype, device=grid.device)
    for term in bias.bind(grid):
        scores, _ = term.apply(tile, scores)
    whole = xp.reshape(xp.broadcast_to(scores, tile.shape), shape)
    return xp.astype(whole, grid.dtype, copy=True)  # no view: neither read-only nor the caller's own
