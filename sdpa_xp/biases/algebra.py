"""What a bias is, and how biases combine.

A bias is a lightweight object that changes the scores. Bound to the grid of a call it becomes terms, which
compute one tile at a time, so that no L x S array is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, cast

from .._checks.arrays import broadcast, check_plain_array
from .._checks.score_arrays import check_operand
from .._libraries.protocols import AnyArray, Array
from .._tiles import Allowed, Target, Tile, TilePlace, is_masked
from .._tiles.grid import CallGrid, ScoreGrid
from .._tiles.modifier import ScoreModifier


class Term(ABC):
    """A bias that is bound to the grid of a call."""

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {}
    """The axes (..., -3 for Hq, -2 for L, -1 for S) along which its arrays lie, None for an axis of another
    kind. Arrays that are not named broadcast to (..., Hq, L, S)."""

    @property
    def can_mask(self) -> bool:
        """Whether it may be -inf, which masks a pair."""
        return True

    @property
    def is_of_caller(self) -> bool:
        """Whether a function of the caller gets the scores."""
        return False

    @abstractmethod
    def apply(self, tile: Tile, scores: Array, /, *, in_place: bool = False) -> tuple[Array, Allowed]:
        """Return the scores (..., Hq, rows, columns) with the bias, and which pairs it does not mask.

        With `in_place`, the scores may be overwritten.
        """

    def for_tiles(self, _grid: ScoreGrid, /) -> Term:
        """Return the term for many tiles of a grid whose values can be read: with what all tiles share."""
        return self

    @property
    def gradient_target(self) -> Target | None:
        """The caller's floating array, whose gradient `gradient` computes; None if there is none."""
        return None

    def gradient(self, _tile: Tile, _scores: Array, _gradient: Array, /) -> Array | None:
        """Return what a tile contributes to the gradient of the target, from the `gradient` of its `scores`.

        The scores before the bias have the same gradient, because a term that does more than add is refused.
        """
        return None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bias(ScoreModifier, ABC):
    """A bias: a number for each pair of a query and a key, which is added to its score.

    The functions of `sdpa_xp.biases` return biases, which are immutable.

    Examples:
        >>> from sdpa_xp import biases
        >>> biases.alibi(8) + biases.alibi([0.5] * 8)
        alibi(8) + alibi((0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5))
    """

    can_mask: ClassVar[bool] = True
    """Whether it may be -inf for some pair."""
    only_adds: ClassVar[bool] = False
    """Whether what it adds does not depend on the scores."""

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows."""
        from .._display import sampled_bias  # only notebooks need it

        return sampled_bias(self, partial(biased_zeros, self))

    @abstractmethod
    def bind(self, grid: CallGrid, /) -> tuple[Term, ...]:
        """Check the arguments against `grid`, and return the terms in the order in which they are applied."""

    def __add__(self, other: Bias | AnyArray) -> Bias:
        return _summed(self, as_bias("biases", other))

    def __radd__(self, other: AnyArray) -> Bias:
        return _summed(as_bias("biases", other), self)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sum(Bias):
    """Biases that are applied one after the other."""

    name = "+"
    parts: tuple[Bias, ...] = field()  # or the property of the base class would be its default

    def bind(self, grid: CallGrid) -> tuple[Term, ...]:
        return tuple(term for bias in self.parts for term in bias.bind(grid))

    def __repr__(self) -> str:
        return " + ".join(map(str, self.parts))


def biased_zeros(bias: Bias, tile: Tile) -> Array:
    """Return the scores of a tile after a bias, if all scores before it are 0."""
    scores = tile.grid.xp.zeros(tile.shape, dtype=tile.grid.dtype, device=tile.grid.device)
    for term in bias.bind(tile.grid):
        scores, _ = term.apply(tile, scores)
    return scores


def _summed(*biases: Bias) -> Bias:
    """Join biases by `+`; the biases of a sum become part of the chain, so that sums are not nested."""
    return Sum(sum((bias.parts if isinstance(bias, Sum) else (bias,) for bias in biases), ()))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ArrayBias(Bias):
    """A floating array that broadcasts to (..., Hq, L, S)."""

    name = "from_array"
    counts = "slots"
    ignores_heads = only_adds = True
    array: AnyArray
    argument: str = field(default="bias", repr=False)
    """The name of the array in messages."""

    def bind(self, grid: CallGrid) -> tuple[Term, ...]:
        array = cast(Array, self.array)
        grid.check_dtype(self.argument, array)
        return (ArrayTerm(grid.check_scores_shape(self.argument, array)),)


def as_bias(function: str, value: object) -> Bias:
    """Convert a floating array to a Bias; biases pass through unchanged."""
    if isinstance(value, Bias):
        return value
    check_operand(function, "bias", value, "a bias or a floating array")
    return ArrayBias(check_plain_array(function, "bias", value))


class Added(Term):
    """A term that adds an array to the scores."""

    @abstractmethod
    def added(self, tile: Tile, /) -> Array:
        """Return what is added, in the accumulation dtype; -inf masks its pair."""

    def apply(self, tile: Tile, scores: Array, *, in_place: bool = False) -> tuple[Array, Allowed]:
        # The bias says which pairs it masks: the sum does not, because inf - inf is NaN.
        added = self.added(tile)
        unmasked = self.unmasked(tile, added, in_place)
        if not in_place or broadcast(scores.shape, added.shape) != scores.shape:
            return scores + added, unmasked
        scores += added
        return scores, unmasked

    def unmasked(self, tile: Tile, added: Array, in_place: bool) -> Allowed:
        """Return which pairs are not masked by what is added."""
        masked = is_masked(added)
        # Values in memory can be read at once: it is cheaper to ask than to mask every pair.
        return True if in_place and not bool(tile.grid.xp.any(masked)) else ~masked


@dataclass(frozen=True, slots=True, eq=False)
class ArrayTerm(Added):
    """An array that broadcasts to (..., Hq, L, S)."""

    array: Array

    def added(self, tile: Tile) -> Array:
        return tile.grid.xp.astype(tile.slice(self.array), tile.grid.dtype, copy=False)

    @property
    def gradient_target(self) -> Target:
        shape = (*[1] * (3 - self.array.ndim), *self.array.shape)
        return Target(shape, ("rows" if shape[-2] != 1 else None, "columns" if shape[-1] != 1 else None))

    def gradient(self, _tile: Tile, _scores: Array, gradient: Array) -> Array:
        return gradient


class AddedByDistance(Added):
    """A term that adds a function of j - i: all scores of a diagonal get the same number."""

    @abstractmethod
    def at_distances(self, grid: CallGrid, distances: Array, /) -> Array:
        """Return what is added at n distances j - i, int32 (n,): (..., Hq, 1, n)."""

    def for_tiles(self, grid: ScoreGrid) -> Term:
        if (diagonals := grid.library.diagonals) is None:  # only strides, as NumPy's, make a view of diagonals
            return self
        distances = grid.arange(1 - grid.queries - grid.position.least, grid.keys - grid.position.least)
        numbers = self.at_distances(grid, distances)
        has_masked = self.can_mask and bool(grid.xp.any(is_masked(numbers)))
        return DiagonalTerm(diagonals.view(numbers, grid.keys), has_masked)


@dataclass(frozen=True, slots=True, eq=False)
class DiagonalTerm(Added):
    """A number for each diagonal of the scores."""

    array: Array
    """(..., Hq, L, S), a view of (..., Hq, 1, L + S - 1)."""
    has_masked: bool

    def added(self, tile: Tile) -> Array:
        return tile.slice(self.array)

    def unmasked(self, _tile: Tile, added: Array, _in_place: bool) -> Allowed:
        return ~is_masked(added) if self.has_masked else True


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTerm(Term):
    """A term that is asked about another tile."""

    place: TilePlace
    term: Term

    def apply(self, tile: Tile, scores: Array, *, in_place: bool = False) -> tuple[Array, Allowed]:
        return self.term.apply(self.place.placed_tile(tile), scores, in_place=in_place)

    @property
    def can_mask(self) -> bool:
        return self.term.can_mask

    @property
    def is_of_caller(self) -> bool:
        return self.term.is_of_caller

    @property
    def gradient_target(self) -> Target | None:
        return self.term.gradient_target

    def gradient(self, tile: Tile, scores: Array, gradient: Array) -> Array | None:
        return self.term.gradient(self.place.placed_tile(tile), scores, gradient)
