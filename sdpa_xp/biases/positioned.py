"""Biases of tokens whose positions are not their places in the arrays, as in a cache that dropped tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp._tiles.allowed import Allowed
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Tile, TokenPositions
from sdpa_xp.biases.algebra import Bias, Sum, Term
from sdpa_xp.masks.positioned import bound_positions, reads_positions


def bias_at(bias: Bias, queries: AnyArray, keys: AnyArray, *, consecutive: bool) -> Bias:
    """Return a bias for queries and keys at these positions, int32 (..., L) and (..., S)."""
    if isinstance(bias, Sum):
        return Sum(tuple(bias_at(part, queries, keys, consecutive=consecutive) for part in bias.biases))
    return BiasAtPositions((bias,), queries, keys) if reads_positions(bias, consecutive=consecutive) else bias


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BiasAtPositions(Bias):
    """A bias whose i and j are positions of the tokens. Caches make it of the caller's bias."""

    name = "at_positions"
    counts = "slots"
    biases: tuple[Bias]
    query_positions: AnyArray
    key_positions: AnyArray

    @property
    def parts(self) -> tuple[Bias, ...]:
        return self.biases

    def bind(self, grid: ScoreGrid) -> tuple[Term, ...]:
        positions = bound_positions(grid, self.query_positions, self.key_positions)
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
