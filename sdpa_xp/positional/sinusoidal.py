"""The sinusoidal encoding of positions: waves whose frequencies fall geometrically."""

from __future__ import annotations

from typing import Any

from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp._checks.positions import check_above, check_even
from sdpa_xp._libraries import astype_if_needed
from sdpa_xp.positional.positions import PositionsLike, array_factory, as_array, as_positions
from sdpa_xp.positional.scaling import base_frequencies


@explains_keywords
def sinusoidal(positions: PositionsLike | int, width: int, *, base: float = 10000.0, like: Any = None) -> Any:
    r"""Return $PE_{2i} = \sin(p\,base^{-2i/width})$ and $PE_{2i+1} = \cos(p\,base^{-2i/width})$ at position p.

    To get from the encoding of p to that of p + k, rotate each pair of elements by an angle that depends only
    on k.

    Shapes:
        `L` tokens, `...` batch.

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
    width, base = check_even(function, "width", width), check_above(function, "base", base, 1)
    frequencies = base_frequencies(width, base)
    positions = as_positions(function, positions)
    factory = array_factory(function, positions, like)
    xp = factory.xp
    with factory.quiet():
        angles = factory.angles(as_array(function, positions, factory), frequencies)
        waves = xp.stack([xp.sin(angles), xp.cos(angles)], axis=-1)
        encoding = xp.reshape(waves, (*angles.shape[:-1], width))
        return encoding if like is None else astype_if_needed(xp, encoding, like.dtype)
