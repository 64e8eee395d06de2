"""Loops that a compiler keeps as loops, so that neither its graph nor its memory grows with their number.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174: what a pass makes is computed
again for the gradients, and not kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar, cast

from sdpa_xp.protocols import Array, Namespace

T = TypeVar("T")


def has_loops(xp: Namespace) -> bool:
    """Whether the library's compiler has them; others would write each pass into the graph."""
    return xp.__name__ == "jax.numpy"


def rolled(body: Callable[[Array], T], starts: Array) -> T:
    """`body` of each of `starts`; its arrays stacked on a new first axis."""
    jax = sys.modules["jax"]  # whose loop keeps apart what would be common subexpressions, so none is prevented
    return cast(T, jax.lax.map(jax.checkpoint(body, prevent_cse=False), starts))


def rows_from(array: Array, start: Array, count: int) -> Array:
    """`count` rows of an array (..., L, width) from `start` on, which only the loop knows."""
    return cast(Array, sys.modules["jax"].lax.dynamic_slice_in_dim(array, start, count, axis=array.ndim - 2))
