"""Which pairs of a tile may attend: the answer of masks and biases."""

from __future__ import annotations

from typing import TypeAlias

from sdpa_xp._libraries import is_traced
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.tile import Tile

Allowed: TypeAlias = bool | Array
"""True: every pair of the tile may attend. False: none may. An array: the pairs where it is True."""


def collapse_uniform(tile: Tile, allowed: Array) -> Allowed:
    """Return a bool if `allowed` is the same for every pair.

    The array stays if it is traced, or if a device would have to be waited for.
    """
    xp = tile.grid.xp
    if tile.grid.is_traced or tile.grid.waits or is_traced(allowed):
        return allowed
    if not bool(xp.any(allowed)):
        return False
    return True if bool(xp.all(allowed)) else allowed


def both(left: Allowed, right: Allowed) -> Allowed:
    """Return the pairs that are in both answers."""
    if left is False or right is False:
        return False
    if left is True:
        return right
    if right is True:
        return left
    return left & right


def either(left: Allowed, right: Allowed) -> Allowed:
    """Return the pairs that are in one of the answers, or in both."""
    if left is True or right is True:
        return True
    if left is False:
        return right
    if right is False:
        return left
    return left | right


def is_masked(scores: Array) -> Array:
    """Return where a score or a bias is -inf; a NaN is not."""
    return scores <= float("-inf")
