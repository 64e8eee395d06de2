"""Convert a mask to a boolean array, to look at it or to pass it to another library."""

from __future__ import annotations

from typing import Any

from sdpa_xp import _checks as checks
from sdpa_xp._tiles.score_grid import grid_of
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.masks.algebra import Mask


def to_array(mask: Mask, shape: tuple[int, ...], *, like: Any = None) -> Any:
    """Convert a mask to a boolean array.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        mask: A mask.
        shape: (L, S), or (..., Hq, L, S) if the mask differs between batch entries or heads.
        like: An array with the library and the device of the result. By default the first array in the mask, or
            NumPy if there is none.

    Returns:
        A boolean array of `shape`; True = may attend.

    Raises:
        TypeError: `mask` is not a mask, or its arrays belong to another library.
        ValueError: `shape` has no L and S, or the mask does not fit it.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal(), (2, 3)).tolist()
        [[True, False, False], [True, True, False]]

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.3.
    """
    if not isinstance(mask, Mask):
        rule = "`mask` must be a mask"
        raise TypeError(checks.message("to_array", rule, {"mask": checks.brief(mask)}))
    grid = grid_of("to_array", "mask", shape, mask.arrays(), like)
    xp = grid.xp
    if 0 in grid.shape:
        return xp.zeros(tuple(shape), dtype=xp.bool, device=grid.device)
    allowed = mask.bind(grid).allowed_in(Tile(range(grid.queries), range(grid.keys), grid))
    if isinstance(allowed, bool):
        return xp.full(tuple(shape), allowed, dtype=xp.bool, device=grid.device)
    whole = xp.reshape(xp.broadcast_to(allowed, grid.shape), tuple(shape))
    return xp.astype(whole, xp.bool, copy=True)  # no view: neither read-only nor the caller's own
