"""The options of a call as programs read them: bound to the grid of its scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._libraries import LARGEST, dtype_name, is_traced
from .._libraries.protocols import Array
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Allowed, LeadingSlice, Tile, both, is_masked, slice_leading
from ..biases.algebra import Term
from ..masks.patterns import AllOf, Pattern

if TYPE_CHECKING:
    from .dropout import Dropout


class BoundOptions(NamedTuple):
    """The options of a call, checked against a grid and converted to its library: an option is a field here."""

    mask: Pattern
    biases: tuple[Term, ...]
    scale: float | Array
    softcap: float | None
    sinks: Array | None
    """A logit that joins the sum of each row and has no value, (..., Hq, 1, 1) in the accumulation dtype."""
    dropout: Dropout | None = None
    finite_inputs: frozenset[str] | None = None
    """The names of the inputs without NaN and inf; None if they have not been searched."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a mask changes the products of queries times a number, and their weights."""
        others = self.softcap, self.sinks, self.dropout
        is_alone = len(self.biases) == 0 and all(option is None for option in others)
        return is_alone and isinstance(self.scale, float)

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask; a bias may mask pairs too."""
        return not isinstance(self.mask, AllOf) or len(self.mask.patterns) > 0

    @property
    def may_mask(self) -> bool:
        """Whether a pair may be masked. If none is, each NaN and inf belongs to the result."""
        return self.has_mask or True in [bias.can_mask for bias in self.biases]

    @property
    def has_functions(self) -> bool:
        """Whether a function of the caller sees the scores. It may keep them, or use autograd."""
        return any(bias.is_of_caller for bias in self.biases)

    @property
    def needs_products(self) -> bool:
        """Whether derivatives read the soft-capped products of a tile, which no buffer holds until then."""
        return self.softcap is not None or self.has_functions

    def for_tiles(self, grid: ScoreGrid) -> BoundOptions:
        """Return the options with what the tiles of a call share computed already."""
        return self._replace(biases=tuple([bias.for_tiles(grid) for bias in self.biases]))

    def slice_leading(self, leading: LeadingSlice) -> BoundOptions:
        """Return the options of some batch entries and heads; masks, biases and dropout slice for each tile."""
        return self if self.sinks is None else self._replace(sinks=slice_leading(self.sinks, leading))

    def biased(
        self, tile: Tile, scores: Array, allowed: Allowed, *, in_place: bool = False
    ) -> tuple[Array, Allowed]:
        """Return `products` of a tile with the biases, and the pairs of `allowed` that no bias masks.

        Each bias says itself which pairs it masks: the sum does not show it, since -inf + inf is NaN.
        """
        for bias in self.biases:
            if bias.is_of_caller:
                scores, unmasked = _without_hidden_nan(bias, tile, scores)
                allowed = both(allowed, unmasked)
            scores, unmasked = bias.apply(tile, scores, in_place=in_place)
            allowed = both(allowed, unmasked)
        # Two of the most negative finite numbers add up to -inf, and must not mask.
        if len(self.biases) > 1:
            scores = tile.grid.xp.where(is_masked(scores), -LARGEST[dtype_name(tile.grid.dtype)], scores)
        return scores, allowed


def _without_hidden_nan(bias: Term, tile: Tile, scores: Array) -> tuple[Array, Allowed]:
    """Return scores with 0 where a function of the caller masks a pair, and which pairs it does not mask.

    0 * NaN is NaN in the gradients of the arrays that the function reads. Scores that are finite, or that the
    library does not differentiate, stay as they are.
    """
    grid, rules = tile.grid, tile.grid.library.tangent_rules
    if rules is None:
        return scores, True
    if grid.waits:  # not for the values
        may_hide = rules.may_record(grid)
    else:
        may_hide = is_traced(scores) or not bool(grid.xp.isfinite(grid.xp.sum(scores)))
    if not may_hide:
        return scores, True
    unmasked = bias.apply(tile, scores)[1]
    if isinstance(unmasked, bool):
        return scores, unmasked
    unmasked = rules.constant(unmasked)  # one library multiplies with 0 also behind a comparison
    return grid.xp.where(unmasked, scores, 0.0), unmasked
