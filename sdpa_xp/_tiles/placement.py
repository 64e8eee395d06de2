"""A window of the grid of which only a run knows where it lies, or how long it is."""

from __future__ import annotations

from typing import NamedTuple

from .._libraries.protocols import Array

FAR = 2**62
"""Beyond any length."""


class WindowPlace(NamedTuple):
    """What is known of such a window before the run.

    In a program on several devices each device has its own place. In a program for all lengths the window is
    the grid: its compiler knows a length by its symbol alone, and masks are asked about a tile that goes on to
    `FAR`.
    """

    queries: int
    keys: int
    query_start: Array | None = None
    """The first query of the window; None is the first of the grid."""
    key_start: Array | None = None
    position: int = 0
    """The position of the first query among the keys, in a program for all lengths."""
