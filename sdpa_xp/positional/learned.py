"""The learned encoding: a table with one row for each position."""

from __future__ import annotations

import math
from typing import TypeVar, cast

from sdpa_xp._checks.arrays import check_plain_array
from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp._checks.numbers import check_integers
from sdpa_xp._checks.positions import check_below
from sdpa_xp._checks.shapes import check_axes
from sdpa_xp._libraries import is_array, is_traced
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.positional.positions import PositionsLike, array_factory, as_positions

A = TypeVar("A", bound=AnyArray)


@explains_keywords
def learned(table: A, positions: PositionsLike | int) -> A:
    """Return the row `table[p]` for each position p.

    Shapes:
        `P` positions in the table, `L` tokens, `...` batch.

    Args:
        table: (P, width), floating.
        positions: The integer L, for the first L rows; or the positions as a range, a list or an integer array
            of any shape (...).

    Returns:
        (..., width), to add to embeddings, with the table's library, device and dtype.

    Raises:
        TypeError: The positions are not integers, or are an array of another library than the table.
        ValueError: The table does not have 2 axes, or a position is beyond its last row. Inside a jit,
            positions cannot be checked; the library decides what a position beyond the table gives.

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
    positions = as_positions(function, positions)
    factory = array_factory(function, positions, table, "table")
    xp = factory.xp
    rows = check_plain_array(function, "table", table)
    check_axes(function, {"table": rows.shape}, 2)
    integers = tuple(positions) if isinstance(positions, range) else positions
    traced = is_array(integers) and is_traced(integers)
    with factory.quiet():
        checked = check_integers(function, "positions", integers, xp, factory.device, traced=traced, least=0)
        check_below(function, "positions", checked, rows.shape[0], "P")
        index = cast(Array, checked.values)
        encoding = xp.take(rows, xp.reshape(index, (math.prod(index.shape),)), axis=0)
        return cast(A, xp.reshape(encoding, (*index.shape, rows.shape[1])))
