"""Masks and biases whose i and j are the positions of the tokens, where these are not their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from .._call.options import CallOptions
from .._libraries import FLOATING, dtype_name
from .._libraries.protocols import AnyArray, Array
from .._tiles import TokenPositions
from .._tiles.grid import CallGrid
from .._tiles.modifier import ScoreModifier
from ..biases.algebra import Bias, PlacedTerm, Sum, Term
from ..masks.algebra import Combined, Mask, Pattern, PlacedPattern


def options_at(
    options: CallOptions, positions: Callable[[], Iterable[Array]], *, consecutive: bool
) -> CallOptions:
    """Return options whose masks and biases count positions.

    The `positions` of the queries, (..., L), and of the keys, (..., S), are computed only if some are counted.
    """
    modifiers = options.attn_mask, options.bias
    if not any(_reads_positions(modifier, consecutive=consecutive) for modifier in modifiers):
        return options
    queries, keys = positions()
    mask, bias = (modifier_at(modifier, queries, keys, consecutive=consecutive) for modifier in modifiers)
    return options._replace(attn_mask=mask, bias=bias)


def modifier_at(modifier: Any, queries: AnyArray, keys: AnyArray, *, consecutive: bool) -> Any:
    """Return a mask or a bias for queries and keys at these positions, int32 (..., L) and (..., S)."""
    if not _reads_positions(modifier, consecutive=consecutive):
        return modifier
    if isinstance(modifier, Combined | Sum):
        parts = tuple(modifier_at(part, queries, keys, consecutive=consecutive) for part in modifier.parts)
        return type(modifier)(parts)
    at_positions: Any = MaskAtPositions if isinstance(modifier, Mask) else BiasAtPositions
    return at_positions((modifier,), queries, keys)


def _reads_positions(modifier: object, *, consecutive: bool) -> bool:
    """Return whether the positions of the tokens change a mask or a bias.

    If queries and keys are `consecutive`, their distances are those of their places in the arrays.
    """
    if not isinstance(modifier, ScoreModifier):
        return False
    if modifier.parts:
        return any(_reads_positions(part, consecutive=consecutive) for part in modifier.parts)
    return modifier.counts == "positions" or (modifier.counts == "distances" and not consecutive)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _AtPositions(ScoreModifier):
    """A mask or a bias whose i and j are positions of the tokens."""

    name = "at_positions"
    counts = "slots"
    parts: tuple[Any] = field()  # or the property of the base class would be its default
    query_positions: AnyArray
    key_positions: AnyArray

    def has_known_gradients(self) -> bool:
        # The gradient of a table of buckets counts rows and columns, which are no positions.
        (modifier,) = self.parts
        arrays = [cast(Array, array) for _, array in modifier.arrays()]
        return bool(modifier.has_known_gradients()) and all(dtype_name(x.dtype) not in FLOATING for x in arrays)

    def _bind_at(self, grid: CallGrid) -> tuple[TokenPositions, Any]:
        """Return the positions, of the grid's batch entries, and what the mask or the bias is bound to."""
        xp = grid.xp
        queries, keys = (
            xp.expand_dims(grid.slice_entries(cast(Array, array), 1), axis=-2)
            for array in (self.query_positions, self.key_positions)
        )
        positions = TokenPositions(
            grid.in_all_axes(queries, 1), grid.in_all_axes(xp.expand_dims(keys, axis=-2))
        )
        return positions, self.parts[0].bind(grid.at_positions())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskAtPositions(_AtPositions, Mask):
    def bind(self, grid: CallGrid) -> Pattern:
        return PlacedPattern(*self._bind_at(grid))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BiasAtPositions(_AtPositions, Bias):
    def bind(self, grid: CallGrid) -> tuple[Term, ...]:
        positions, terms = self._bind_at(grid)
        return tuple(PlacedTerm(positions, term) for term in terms)
