"""Masks and biases of tokens whose positions are not their places in the arrays.

A cache from which tokens were dropped, or whose texts are padded on the left, makes them of the caller's masks
and biases. Their i and j are then positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from sdpa_xp._call.options import CallOptions
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp._tiles.modifier import ScoreModifier
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Allowed, Tile, TokenPositions
from sdpa_xp.biases.algebra import Bias, Sum, Term
from sdpa_xp.masks.algebra import Combined, Mask, Pattern


def count_positions(options: CallOptions, *, consecutive: bool) -> bool:
    """Return whether a mask or a bias of the options counts positions, which are not the slots."""
    return any(
        isinstance(option, ScoreModifier) and _reads_positions(option, consecutive=consecutive)
        for option in (options.attn_mask, options.bias)
    )


def options_at(options: CallOptions, queries: Array, keys: Array, *, consecutive: bool) -> CallOptions:
    """Return options whose masks and biases count positions of the queries, (..., L), and keys, (..., S)."""
    mask, bias = (
        modifier_at(option, queries, keys, consecutive=consecutive)
        for option in (options.attn_mask, options.bias)
    )
    return options._replace(attn_mask=mask, bias=bias)


def modifier_at(modifier: Any, queries: AnyArray, keys: AnyArray, *, consecutive: bool) -> Any:
    """Return a mask or a bias for queries and keys at these positions, int32 (..., L) and (..., S)."""
    if not isinstance(modifier, ScoreModifier) or not _reads_positions(modifier, consecutive=consecutive):
        return modifier
    if isinstance(modifier, Combined | Sum):
        parts = tuple(modifier_at(part, queries, keys, consecutive=consecutive) for part in modifier.parts)
        return type(modifier)(parts)
    at_positions: Any = MaskAtPositions if isinstance(modifier, Mask) else BiasAtPositions
    return at_positions((modifier,), queries, keys)


def _reads_positions(modifier: ScoreModifier, *, consecutive: bool) -> bool:
    """Return whether the positions of the tokens change a mask or a bias.

    If queries and keys are `consecutive`, their distances are those of their places in the arrays.
    """
    if modifier.parts:
        return any(_reads_positions(part, consecutive=consecutive) for part in modifier.parts)
    return modifier.counts == "positions" or (modifier.counts == "distances" and not consecutive)


def _bound(grid: ScoreGrid, queries: AnyArray, keys: AnyArray) -> TokenPositions:
    """Return positions (..., L) and (..., S) with axes for the scores, those of the grid's batch entries."""
    xp = grid.xp
    of_queries, of_keys = (grid.slice_entries(cast(Array, array), 1) for array in (queries, keys))
    of_queries, of_keys = (xp.expand_dims(array, axis=-2) for array in (of_queries, of_keys))
    return TokenPositions(grid.in_all_axes(of_queries, 1), grid.in_all_axes(xp.expand_dims(of_keys, axis=-2)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskAtPositions(Mask):
    """A mask whose i and j are positions of the tokens."""

    name = "at_positions"
    counts = "slots"
    masks: tuple[Mask]
    query_positions: AnyArray
    key_positions: AnyArray

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def bind(self, grid: ScoreGrid) -> Pattern:
        pattern = self.masks[0].bind(replace(grid, has_positions=True))
        return PatternAtPositions(pattern, _bound(grid, self.query_positions, self.key_positions))


@dataclass(frozen=True, slots=True, eq=False)
class PatternAtPositions(Pattern):
    """A pattern of positions. It bounds no range of keys, since the positions are not read."""

    pattern: Pattern
    positions: TokenPositions

    def allowed_in(self, tile: Tile) -> Allowed:
        return self.pattern.allowed_in(tile._replace(positions=self.positions))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BiasAtPositions(Bias):
    """A bias whose i and j are positions of the tokens."""

    name = "at_positions"
    counts = "slots"
    biases: tuple[Bias]
    query_positions: AnyArray
    key_positions: AnyArray

    @property
    def parts(self) -> tuple[Bias, ...]:
        return self.biases

    def bind(self, grid: ScoreGrid) -> tuple[Term, ...]:
        positions = _bound(grid, self.query_positions, self.key_positions)
        terms = self.biases[0].bind(replace(grid, has_positions=True))
        return tuple(TermAtPositions(term, positions) for term in terms)


@dataclass(frozen=True, slots=True, eq=False)
class TermAtPositions(Term):
    """A term of positions."""

    term: Term
    positions: TokenPositions

    @property
    def is_of_caller(self) -> bool:
        return self.term.is_of_caller

    def apply(self, tile: Tile, scores: Array, *, in_place: bool = False) -> tuple[Array, Allowed]:
        return self.term.apply(tile._replace(positions=self.positions), scores, in_place=in_place)
