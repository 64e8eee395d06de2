"""ALiBi, attention with linear biases: the farther a key, the lower its score."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from .._checks.arrays import check_floating, check_plain_array
from .._checks.keywords import check_integer, check_number, explains_keywords
from .._checks.score_arrays import Integers, IntegersLike, check_columns, check_offset
from .._libraries.protocols import AnyArray, Array
from .._tiles import Allowed, Target, Tile
from .._tiles.grid import CallGrid
from .algebra import AddedByDistance, Bias, Term


@explains_keywords
def alibi(
    slopes: int | Sequence[float] | AnyArray, *, offset: IntegersLike | Literal["lower_right"] = 0
) -> Bias:
    """Return the bias of ALiBi, which falls with the distance: -slope[h] * |i + offset - j| in head h.

    Args:
        slopes: The number of query heads, which gives the slopes of the paper; or the slopes themselves, as a
            list of Hq numbers or a floating array (..., Hq).
        offset: As for `masks.causal`; flash-attention has "lower_right". If no query may attend to a key after
            its position, the offset changes no output, because it shifts all scores of a row by the same
            number.

    Raises:
        TypeError: The slopes are not numbers, the offset is not an integer, or an array has another library.
        ValueError: The number of heads is below 1, the offset is another string, or the slopes do not fit.

    Examples:
        >>> from sdpa_xp import biases
        >>> biases.to_array(biases.alibi(2), (2, 1, 3))
        array([[[ 0.        , -0.0625    , -0.125     ]],
        <BLANKLINE>
               [[ 0.        , -0.00390625, -0.0078125 ]]])

    References:
        Press et al., "Train Short, Test Long", arXiv 2108.12409, section 3.
    """
    if isinstance(slopes, numbers.Integral) and not isinstance(slopes, bool):  # True is an Integral too
        slopes = check_integer("alibi", "slopes", slopes, least=1)
    elif isinstance(slopes, list | tuple):
        slopes = tuple(check_number("alibi", f"slopes[{head}]", slope) for head, slope in enumerate(slopes))
    else:
        slopes = check_plain_array("alibi", "slopes", slopes)
        check_floating("alibi", "slopes", slopes)
    return Alibi(slopes, check_offset("alibi", offset))


@explains_keywords
def alibi_slopes(heads: int) -> tuple[float, ...]:
    r"""Return the slopes of ALiBi for n heads: $2^{-8/n}, 2^{-16/n}, \dots$

    If n is not a power of two, they are the slopes of the next lower power of two, followed by every other
    slope of the next higher one, as in the authors' code.

    Args:
        heads: The number of query heads.

    Returns:
        The slopes, one for each head. `biases.alibi(heads)` uses the same numbers.

    Raises:
        TypeError: `heads` is not an integer.
        ValueError: `heads` is below 1.

    Examples:
        >>> from sdpa_xp import positional
        >>> positional.alibi_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)

    References:
        Press et al., "Train Short, Test Long", arXiv 2108.12409, section 3.
    """
    heads = check_integer("alibi_slopes", "heads", heads, least=1)
    whole = 2 ** int(math.log2(heads))  # the next lower power of two, or `heads` itself
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]
    return (*slopes, *between)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Alibi(Bias):
    """Made by `alibi`."""

    name = "alibi"
    counts = "distances"
    can_mask = False
    only_adds = True
    slopes: int | Sequence[float] | AnyArray
    offset: IntegersLike | Literal["lower_right"] = 0

    def bind(self, grid: CallGrid) -> tuple[Term, ...]:
        slopes = self.slopes
        if isinstance(slopes, int):
            check_columns(grid.function, "bias.slopes", slopes, grid.heads)
            slopes = alibi_slopes(slopes)
        is_array = not isinstance(slopes, tuple)
        if is_array:
            grid.check_dtype("bias.slopes", cast(Array, slopes))
            array = grid.xp.astype(cast(Array, slopes), grid.dtype, copy=False)
        else:
            array = grid.put(cast(Sequence[float], slopes), grid.dtype)
        array = grid.check_heads_shape("bias.slopes", array)
        return (AlibiTerm(array, grid.check_offset("bias.offset", self.offset), is_array),)


@dataclass(frozen=True, slots=True, eq=False)
class AlibiTerm(AddedByDistance):
    """-slope * |i + offset - j|, with slopes (..., Hq, 1, 1)."""

    can_mask = False
    slopes: Array
    offset: Integers
    has_gradient: bool
    """Whether the caller's slopes are an array."""

    def unmasked(self, _tile: Tile, _added: Array, _in_place: bool) -> Allowed:
        return True  # it is finite

    def added(self, tile: Tile) -> Array:
        return -tile.slice(self.slopes) * self._distance(tile)

    def at_distances(self, grid: CallGrid, distances: Array) -> Array:
        return -self.slopes * grid.xp.astype(grid.xp.abs(distances - self.offset.values), grid.dtype)

    @property
    def gradient_target(self) -> Target | None:
        shape = (*[1] * (3 - self.slopes.ndim), *self.slopes.shape)
        return Target(shape) if self.has_gradient else None

    def gradient(self, tile: Tile, _scores: Array, gradient: Array) -> Array | None:
        return -gradient * self._distance(tile) if self.has_gradient else None

    def _distance(self, tile: Tile) -> Array:
        xp = tile.grid.xp
        distance = xp.abs(tile.query_index + tile.slice_integers(self.offset).values - tile.key_index)
        return xp.astype(distance, tile.grid.dtype)
