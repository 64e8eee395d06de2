"""The sinusoidal encoding of positions: waves of geometrically falling frequency."""

from __future__ import annotations

from typing import Any

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import astype_if_needed
from sdpa_xp.positional.positions import PositionsLike, as_array, first, place
from sdpa_xp.positional.scaling import geometric


def sinusoidal(positions: PositionsLike | int, width: int, *, base: float = 10000.0, like: Any = None) -> Any:
    r"""$PE_{2i} = \sin(p\,base^{-2i/width})$ and $PE_{2i+1} = \cos(p\,base^{-2i/width})$ for position p.

    The encoding of p + k is that of p, turned in each pair of entries by an angle that depends on k alone.

    Shapes:
        `L` tokens, `...` batch.

    Args:
        positions: L, for the first L positions; or a range, a list or an array (...) of them.
        width: Of the encoding, even.
        base: The longest wavelength is almost 2 pi times it.
        like: An array of the library, device and dtype that the result is to be of. By default those of
            `positions`, or of NumPy, and float64 where the device has it.

    Returns:
        (..., width), to be added to embeddings.

    Raises:
        TypeError: Positions that are no numbers, or an array of another library than `like`.
        ValueError: An odd width, or a base of 1 or less.

    Examples:
        >>> from sdpa_xp import positional
        >>> positional.sinusoidal(2, 4).round(2)
        array([[0.  , 1.  , 0.  , 1.  ],
               [0.84, 0.54, 0.01, 1.  ]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.5.
    """
    function = "sinusoidal"
    frequencies = geometric(checks.even(function, "width", width), checks.above(function, "base", base, 1))
    positions = first(function, positions)
    at = place(function, positions, like)
    angles = at.angles(as_array(function, positions, at), frequencies)
    waves = at.xp.stack([at.xp.sin(angles), at.xp.cos(angles)], axis=-1)
    encoding = at.xp.reshape(waves, (*angles.shape[:-1], width))
    return encoding if like is None else astype_if_needed(at.xp, encoding, like.dtype)
