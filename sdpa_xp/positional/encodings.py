"""Encodings of positions, to add to embeddings: learned tables, and waves."""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

from .._checks.arrays import check_axes, check_plain_array
from .._checks.keywords import explains_keywords
from .._checks.score_arrays import check_integers
from .._libraries import astype_if_needed
from .._libraries.protocols import AnyArray, Array
from ..errors import ArgumentValueError
from .positions import PositionsLike, array_factory, as_array, as_positions
from .scaling import base_frequencies, check_width_and_base

A = TypeVar("A", bound=AnyArray)


@explains_keywords
def sinusoidal(positions: PositionsLike | int, width: int, *, base: float = 10000.0, like: Any = None) -> Any:
    r"""Return the sinusoidal encodings of positions.

    At position p, $PE_{2i} = \sin(p\,base^{-2i/width})$ and $PE_{2i+1} = \cos(p\,base^{-2i/width})$.

    Args:
        positions: The integer L, for the first L positions; or the positions as a range, a list or an array of
            any shape (...).
        width: The width of the encoding, an even number.
        base: The longest wavelength is almost 2 pi * base.
        like: An array with the library, device and dtype of the result. By default the library and device are
            those of `positions`, or NumPy's, and the dtype is float64 if the device has it, else float32.

    Returns:
        (..., width), to add to embeddings.

    Raises:
        TypeError: The positions are not numbers, or are an array of another library than `like`.
        ValueError: The width is odd, or the base is 1 or less.

    Examples:
        >>> from sdpa_xp import positional
        >>> positional.sinusoidal(2, 4).round(2)
        array([[0.  , 1.  , 0.  , 1.  ],
               [0.84, 0.54, 0.01, 1.  ]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.5.
    """
    function = "sinusoidal"
    width, base = check_width_and_base(function, width, base)
    frequencies = base_frequencies(width, base)
    positions = as_positions(function, positions)
    factory = array_factory(function, positions, like)
    xp = factory.xp
    with factory.computing():
        angles = factory.angles(as_array(function, positions, factory), frequencies)
        # No assignment to every second element: traced arrays take none.
        waves = xp.stack([xp.sin(angles), xp.cos(angles)], axis=-1)
        encoding = xp.reshape(waves, (*angles.shape[:-1], width))
        return encoding if like is None else astype_if_needed(xp, encoding, like.dtype)


@explains_keywords
def learned(table: A, positions: PositionsLike | int) -> A:
    """Return the row `table[p]` for each position p.

    Args:
        table: (P, width), floating, for P positions.
        positions: As in `sinusoidal`; an array has integers.

    Returns:
        (..., width), to add to embeddings, with the table's library, device and dtype.

    Raises:
        TypeError: The positions are not integers, or are an array of another library than the table.
        ValueError: The table does not have 2 axes, or a position is beyond its last row. Inside a jit, the
            library decides what such a position gives.

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
    with factory.computing():
        checked = check_integers(function, "positions", integers, xp, factory.device, least=0)
        # Positions that cannot be read, as inside a jit, have no largest value.
        if checked.most >= rows.shape[0] and checked.most != math.inf:
            got = {"positions": int(checked.most), "P": rows.shape[0]}
            raise ArgumentValueError(function, "`positions` must be below P", got)
        index = cast(Array, checked.values)
        # `take` of the standard has indices of one axis.
        encoding = xp.take(rows, xp.reshape(index, (math.prod(index.shape),)), axis=0)
        return cast(A, xp.reshape(encoding, (*index.shape, rows.shape[1])))
