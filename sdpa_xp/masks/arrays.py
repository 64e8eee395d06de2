"""Convert a mask to a boolean array, to look at it or to pass it to another library."""

from __future__ import annotations

from typing import Any

from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp._checks.messages import brief
from sdpa_xp._checks.numbers import check_rows
from sdpa_xp._libraries import quiet
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp._tiles.score_grid import ScoreGrid, grid_of
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp.masks.algebra import Mask


@explains_keywords
def to_array(mask: Mask, shape: tuple[int, ...], *, rows: range | None = None, like: Any = None) -> Any:
    """Convert a mask to a boolean array.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        mask: A mask.
        shape: (L, S), or (..., Hq, L, S) if the mask differs between batch entries or heads.
        rows: The queries to convert, as a range with step 1; by default all of them. A few rows of a long mask
            need little memory.
        like: An array with the library and the device of the result. By default the first array in the mask, or
            NumPy if there is none.

    Returns:
        A boolean array of `shape`, with `len(rows)` instead of L; True = may attend.

    Raises:
        TypeError: `mask` is not a mask, its arrays belong to another library, or `rows` is not a range.
        ValueError: `shape` has fewer than two axes, the mask does not fit it, or `rows` are not among the L
            queries.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal(), (2, 3)).tolist()
        [[True, False, False], [True, True, False]]
        >>> masks.to_array(masks.causal(), (10**6, 3), rows=range(1, 2)).tolist()
        [[True, True, False]]
    """
    return as_boolean("to_array", mask, shape, rows=rows, like=like)


def as_boolean(
    function: str, mask: object, shape: tuple[int, ...], *, rows: range | None = None, like: Any = None
) -> Any:
    """Convert a mask as `to_array` does, for the public function that messages name."""
    if not isinstance(mask, Mask):
        rule = "`mask` must be a mask"
        raise ArgumentTypeError(function, rule, {"mask": brief(mask)})
    grid = grid_of(function, "mask", shape, mask.arrays(), like)
    rows = check_rows(function, "rows", rows, grid.queries)
    with quiet(next((array for _, array in mask.arrays()), like)):
        return _of_rows(mask, grid, rows, (*shape[:-2], len(rows), shape[-1]))


def _of_rows(mask: Mask, grid: ScoreGrid, rows: range, shape: Shape) -> Array:
    xp = grid.xp
    if 0 in shape:
        return xp.zeros(shape, dtype=xp.bool, device=grid.device)
    tile = Tile(rows, range(grid.keys), grid)
    allowed = mask.bind(grid).allowed_in(tile)
    if isinstance(allowed, bool):
        return xp.full(shape, allowed, dtype=xp.bool, device=grid.device)
    whole = xp.reshape(xp.broadcast_to(allowed, tile.shape), shape)
    return xp.astype(whole, xp.bool, copy=True)  # no view: neither read-only nor the caller's own
