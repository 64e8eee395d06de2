"""A learned encoding: a row of a table for each position."""

from __future__ import annotations

import math
from typing import TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import is_array, is_traced
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.positional.positions import PositionsLike, first, place

A = TypeVar("A", bound=AnyArray)


def learned(table: A, positions: PositionsLike | int) -> A:
    """The row `table[p]` for each position p.

    Shapes:
        `P` positions that the table has, `L` tokens, `...` batch.

    Args:
        table: (P, width), floating.
        positions: L, for the first L rows; or a range, a list or an integer array (...) of them.

    Returns:
        (..., width), to be added to embeddings; of the table's library, device and dtype.

    Raises:
        TypeError: Positions that are no integers, or an array of another library than the table.
        ValueError: A table that has not 2 axes, or a position that it does not have. Inside a jit positions
            cannot be looked at, and what stands beyond the table is as the library has it.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import positional
        >>> positional.learned(np.asarray([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]), [2, 0])
        array([[2. , 2.5],
               [0. , 0.5]])

    References:
        Gehring et al., "Convolutional Sequence to Sequence Learning", arXiv 1705.03122, section 3.1.
    """
    function = "learned"
    positions = first(function, positions)
    at = place(function, positions, table, "table")
    rows = checks.plain_array(function, "table", table)
    checks.axes(function, {"table": rows.shape}, 2)
    asked = tuple(positions) if isinstance(positions, range) else positions
    traced = is_array(asked) and is_traced(asked)
    found = checks.integers(function, "positions", asked, at.xp, at.device, traced=traced, least=0)
    checks.below(function, "positions", found, rows.shape[0], "P")
    index = cast(Array, found.values)
    chosen = at.xp.take(rows, at.xp.reshape(index, (math.prod(index.shape),)), axis=0)
    return cast(A, at.xp.reshape(chosen, (*index.shape, rows.shape[1])))
