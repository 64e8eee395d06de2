"""Which queries and keys a mask lets meet, as far as it is known before anything is computed."""

from __future__ import annotations

from collections.abc import Callable

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._chunks.call import readable_grid
from sdpa_xp._tiles.modifier import with_arrays
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.masks.algebra import AllOf, And, Mask


def may_meet(call: PreparedCall) -> Callable[[range, range], bool]:
    """Return a function of some queries and some keys: whether the masks let any pair of them attend.

    A mask whose arrays are inputs of a jit lets all of them meet here, and decides on the devices.
    """
    grid, known_values = readable_grid(call), call.grid.library.known_values
    parts = [part for mask in call.masks for part in (mask.parts if isinstance(mask, And) else (mask,))]
    known: list[Mask] = []
    for part in parts:
        if all(known_values(array) is not array for _, array in part.arrays()):
            known.append(with_arrays(part, known_values))
    pattern = AllOf(tuple(mask.bind(grid) for mask in known))
    return lambda rows, columns: pattern.uniform(Tile(rows, columns, grid)) is not False
