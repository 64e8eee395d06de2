"""What is computed from the scores of a tile, on the arrays of any library.

    softmax          one tile of keys after the other; `dropout`
    output, weights  programs
    statistics       a program; `top_keys`
    index_scores     a program: the largest scores, each of all heads
    gradients        a program
    patches          a call whose mask lists keys, as many short sequences
    reproducible     bits that depend on nothing beside a row; `fixed_blocks`

A program says what a range of queries adds to each result; `_run` runs it.

Here are the scores of a call, tile by tile: scale -> softcap -> bias -> mask; and the options that they follow.
A small call of one tile is computed here too, by the textbook formula, without the objects that cut a call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from .._libraries import LARGEST, astype_if_needed, dtype_name
from .._libraries.base import TangentRules
from .._libraries.protocols import Array, Dtype, Namespace, Shape, Ufuncs
from .._run import (
    avoid_zero_sum,
    differentiable_product,
    faster_product,
    is_finite,
    key_leading_slice,
    matmul_grouped,
    multiply_columns,
)
from .._tiles import (
    Allowed,
    KeyValueSource,
    LeadingSlice,
    RowBlock,
    Tile,
    both,
    is_masked,
    slice_leading,
    tuning,
)
from .._tiles.grid import ScoreGrid
from .._tiles.plan import Plan
from ..masks.algebra import AllOf, Pattern

if TYPE_CHECKING:
    from .._run.buffers import CallBuffers
    from ..biases.algebra import Term
    from .dropout import Dropout


ResultName: TypeAlias = Literal["output", "lse", "lse_parts", "checksum"]
"""What a call may ask for: the output, (..., Hq, L, Ev); the log-sum-exp, (..., Hq, L, 1), or two numbers that
add up to it, (..., Hq, L, 2); and numbers (n, 1) of which one is NaN or inf if one of the others is."""


class BoundOptions(NamedTuple):
    """The options of a call, checked against a grid and converted to its library: an option is a field here.

    Beside them, what has been found out about the inputs.
    """

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
        """Return the scores of a tile with the biases, and the pairs of `allowed` that no bias masks.

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


class ComputedTile(NamedTuple):
    """A tile in which some pair may attend, and what is computed of it. Its arrays may lie in buffers."""

    tile: Tile
    scores: Array
    """(..., Hq, rows, columns), -inf where a pair may not attend."""
    allowed: Allowed
    """The pairs that may attend."""
    products: Array
    """The soft-capped products without biases and mask; the scores, unless a caller of `computed_tiles` keeps
    these."""


class Scores(NamedTuple):
    """All that the scores are computed from. Nothing is computed until a tile is asked for."""

    grid: ScoreGrid
    query: Array
    """(..., Hq, L, E)."""
    key: KeyValueSource
    """(..., H, S, E)."""
    options: BoundOptions
    leading: LeadingSlice | None = None
    """The batch entries and heads that these scores are for; None is all of the grid."""
    block: RowBlock | None = None
    """The queries of an iteration of a compiler's loop; None outside of such loops."""
    known_tiles: dict[tuple[range, int, bool], list[tuple[Tile, Allowed]]] | None = None
    """The tiles of ranges of queries, if all heads, or equal calls, have the same: then they are found once.
    Two threads may find the same tiles at once; one of the equal lists stays."""
    buffers: CallBuffers | None = None
    """The buffers in which the arrays of each tile are computed; with None, each tile allocates new arrays."""

    @property
    def xp(self) -> Namespace:
        return self.grid.xp

    @property
    def tangent_rules(self) -> TangentRules | None:
        """What gives products derivatives of their own; None if the library does not differentiate the call."""
        rules = self.grid.library.tangent_rules
        return rules if rules is not None and rules.may_record(self.grid.access) else None

    @property
    def may_be_kept(self) -> bool:
        """Whether a function may keep the scores of a tile."""
        return self.options.has_functions

    @property
    def group(self) -> int:
        """The number of query heads for each key head."""
        return self.query.shape[-3] // (self.key.heads or 1)

    @property
    def leading_shape(self) -> Shape:
        """The lengths of the axes (..., Hq) that these scores are for."""
        return self.grid.leading_shape if self.leading is None else tuple(map(len, self.leading))

    def slice_leading(self, leading: LeadingSlice | None) -> Scores:
        """Return the scores of some batch entries and heads."""
        if leading is None:
            return self
        return self._replace(
            query=slice_leading(self.query, leading),
            key=self.key.slice_leading(key_leading_slice(leading, self.group)),
            options=self.options.slice_leading(leading),
            leading=leading,
        )

    def for_tiles(self) -> Scores:
        """Return the scores with what the tiles of a call share computed already."""
        return self._replace(options=self.options.for_tiles(self.grid))

    def in_block(self, block: RowBlock) -> Scores:
        """Return the scores of an iteration of a loop."""
        return self._replace(block=block)

    def in_memory(self, buffers: CallBuffers | None, *, shares_tiles: bool) -> Scores:
        """Return the scores of many tiles, in buffers if there are some; known are those of this call."""
        known: Any = {} if shares_tiles and self.options.mask.is_shared else None
        return self._replace(buffers=buffers, known_tiles=known)

    def tile(self, rows: range, columns: range) -> Tile:
        return Tile(rows, columns, self.grid, self.leading, self.block, placement=self.grid.placement)

    def key_range(self, rows: range) -> range:
        """Return the keys that the queries of `rows` may attend, in one piece."""
        _, keys = self.grid.sides
        return self.options.mask.key_range(self.tile(rows, keys)) if self.options.has_mask else keys

    def tiles(self, rows: range, plan: Plan, *, trims: bool = False) -> Iterable[tuple[Tile, Allowed]]:
        """Return the tiles of `rows` in which some pair may attend, with the answer of the mask.

        With `trims` a tile lacks the first and the last queries that attend to none of its keys.
        """
        if self.known_tiles is None:
            return self._tiles(rows, plan, trims)
        tiles = self.known_tiles.get(key := (rows, plan.first_key, trims))
        if tiles is None:
            if len(self.known_tiles) >= tuning.MOST_ROWS_KNOWN:
                # No lock: a thread that has read a list keeps it, and one that misses it finds the tiles again.
                self.known_tiles.clear()
            tiles = self.known_tiles[key] = [*self._tiles(rows, plan, trims)]
        if self.leading is None or not (self.options.biases or self.options.dropout):
            return tiles
        # The arrays of biases are sliced for the heads of this part.
        return ((tile._replace(leading=self.leading), allowed) for tile, allowed in tiles)

    def _tiles(self, rows: range, plan: Plan, trims: bool) -> Iterator[tuple[Tile, Allowed]]:
        mask = self.options.mask
        for columns in plan.column_ranges(self.key_range(rows)):
            tile = self.tile(rows, columns)
            if trims and self.options.has_mask:
                tile = self.tile(mask.query_range(tile), columns)
            allowed = mask.allowed_in(tile) if tile.rows or not trims else False
            if allowed is not False:
                yield tile, allowed

    def computed_tiles(
        self, rows: range, plan: Plan, query: Array, *, leaves_mask: bool = False, keeps_products: bool = False
    ) -> Iterator[ComputedTile]:
        """Yield the tiles of `rows` in which some pair may attend, with their scores, from a `scaled_query`.

        With `leaves_mask` the tiles are trimmed, and the mask is left to the caller, who sets exponentials to
        zero. The next tile uses the buffers of the tile before.
        """
        keys, factors = self.key.factored_slices(self.grid, transposed=True)
        has_biases = len(self.options.biases) > 0
        rules = self.tangent_rules
        if rules is not None and not self.options.may_mask:
            rules = None
        for tile, allowed in self.tiles(rows, plan, trims=leaves_mask):
            part = query if tile.rows == rows else query[rows_within(tile, rows)]
            of_keys = None if factors is None else factors(tile.columns)
            s = capped = self.products(part, keys(tile.columns), allowed, rules, of_keys)
            attends: Allowed = True if leaves_mask else allowed
            if has_biases or attends is not True:
                s, attends = self.with_biases(tile, capped, attends)
            if not keeps_products:  # or their memory, as large as the scores, would be held until the next tile
                capped = s
            yield ComputedTile(tile, s, allowed if leaves_mask else attends, capped)

    def scaled_query(self, rows: range) -> Array:
        """Return the queries times the scale, (..., Hq, rows, E): once for each row, not for each tile."""
        tile, scale = self.tile(rows, range(1)), self.options.scale
        # Before the scale: a half query times the scale would be rounded.
        query = astype_if_needed(self.xp, tile.slice_queries(self.query), self.grid.dtype)
        if isinstance(scale, float):
            return query * scale
        scale = self.xp.astype(tile.slice(scale), self.grid.dtype, copy=False)
        if self.tangent_rules is None or not self.options.may_mask:
            return query * scale
        return differentiable_product(self.tangent_rules, self.xp, operator.mul, query, scale)

    def products(
        self,
        query: Array,
        transposed_keys: Array,
        allowed: Allowed = True,
        rules: TangentRules | None = None,
        factors: Array | None = None,
    ) -> Array:
        """Return the soft-capped products of a `scaled_query` and keys (..., H, E, columns) times `factors`."""
        xp, softcap = self.grid.xp, self.options.softcap
        buffer = None if self.buffers is None else self.buffers.scores
        if rules is None:
            multiply: Callable[..., Array] = matmul_grouped
            if self.grid.is_reproducible:
                from .fixed_blocks import multiply_keys as multiply  # few programs need it
            # The library first: a trace must not ask about lengths. Long calls are spared the function.
            elif self.grid.library.has_ufuncs and query.shape[-2] <= tuning.MOST_ROWS_ALONE:
                multiply = faster_product(query, self.key.heads, transposed_keys.shape[-1]) or multiply
            scores = multiply(xp, query, transposed_keys, buffer)
        else:
            needs_products = self.options.needs_products
            scores = differentiable_product(
                rules,
                xp,
                partial(matmul_grouped, xp),
                query,
                transposed_keys,
                allowed if needs_products else True,
                drops_nonfinite=needs_products and any(bias.can_mask for bias in self.options.biases),
            )
            if self.options.has_functions:
                # A function may multiply by an array of the caller, whose gradient a masked NaN would reach.
                scores = self.without_masked(scores, allowed)
        if factors is not None:
            scores = multiply_columns(xp, scores, factors, in_place=buffer is not None)
        if softcap is None:
            return scores
        if buffer is None:
            return xp.tanh(scores / softcap) * softcap
        scores /= softcap
        scores = buffer.functions.tanh(scores, out=scores)
        scores *= softcap
        return scores

    def slope(self, capped: Array, allowed: Allowed) -> Array | None:
        """Return the derivative of the softcap, 1 - tanh^2, from `products`; None if there is no softcap.

        It is 1 where a pair may not attend, whose product may be NaN or inf although the inputs are finite.
        """
        if self.options.softcap is None:
            return None
        tanh = self.without_masked(capped, allowed) / self.options.softcap
        return -(tanh * tanh) + 1.0

    def are_right(self, *arrays: Array) -> bool | None:
        """Return whether no NaN or inf of a masked pair has got into results; None of traced ones.

        Only if one has, they are worth a second pass with a guard: see `_run`.
        """
        if not self.options.may_mask:  # each NaN and inf belongs to the results
            return True
        return is_finite(self.xp, arrays)

    def without_masked(self, array: Array, allowed: Allowed) -> Array:
        """Return an array of a tile, with 0 where a pair may not attend."""
        return array if isinstance(allowed, bool) else self.xp.where(allowed, array, 0.0)

    def with_biases(self, tile: Tile, scores: Array, allowed: Allowed) -> tuple[Array, Allowed]:
        """Return scores with the biases, -inf where a pair may not attend; and which pairs may."""
        scores, allowed = self.options.biased(tile, scores, allowed, in_place=self.buffers is not None)
        return scores if isinstance(allowed, bool) else self.xp.where(allowed, scores, -math.inf), allowed


def rows_within(tile: Tile, rows: range) -> tuple[object, ...]:
    """Return the index of a tile's queries in an array (..., rows, width)."""
    return (..., slice(tile.rows.start - rows.start, tile.rows.stop - rows.start), slice(None))


def _without_hidden_nan(bias: Term, tile: Tile, scores: Array) -> tuple[Array, Allowed]:
    """Return scores with 0 where a function of the caller masks a pair, and which pairs it does not mask.

    0 * NaN is NaN in the gradients of the arrays that the function reads. Scores that are finite, or that the
    library does not differentiate, stay as they are.
    """
    grid, rules = tile.grid, tile.grid.library.tangent_rules
    if rules is None:
        return scores, True
    # A device is not waited for to look at the values.
    is_harmless = not rules.may_record(grid.access) if grid.access.waits else is_finite(grid.xp, [scores])
    if is_harmless:
        return scores, True
    unmasked = bias.apply(tile, scores)[1]
    if isinstance(unmasked, bool):
        return scores, unmasked
    unmasked = rules.constant(unmasked)  # one library multiplies with 0 also behind a comparison
    return grid.xp.where(unmasked, scores, 0.0), unmasked


class OneTile(NamedTuple):
    """The textbook formula for a small call of one tile, and what it needs besides query, key and value.

    For a few hundred scores, the formula takes less time than the objects that cut a call into tiles: with
    them, a call of 2 heads and 8 x 8 scores takes 2.3 times as long, and a step of a decoder with 64 keys 1.9
    times (one core). So what depends only on shapes and options is computed once for equal calls.
    """

    xp: Namespace
    functions: Ufuncs
    scale: float
    keys: slice | None
    """The keys that some query may attend to; None is all of them."""
    allowed: Array | None
    """The pairs that may attend; None is all of them."""
    multiply: Callable[[Namespace, Array, Array], Array]
    """Multiplies the query and the transposed keys."""
    least: float
    """The most negative finite score, for the maximum of a row without keys."""

    def attend(self, query: Array, key: Array, value: Array) -> Array | None:
        """Return the output; None if a masked NaN or inf may be in it."""
        xp, functions = self.xp, self.functions
        if self.keys is not None:
            key, value = key[..., self.keys, :], value[..., self.keys, :]
        s = self.multiply(xp, query * self.scale, functions.swapaxes(key, -1, -2))
        if self.allowed is not None:
            s = xp.where(self.allowed, s, -math.inf)
        s -= functions.maximum.reduce(s, axis=-1, keepdims=True, initial=self.least)
        p = functions.exp(s, out=s)
        l = functions.add.reduce(p, axis=-1, keepdims=True)
        o = matmul_grouped(xp, p, value)
        o /= avoid_zero_sum(l)
        # A masked NaN or inf shows in the sum. Keys outside of `keys` are never read.
        is_clean = self.allowed is None or math.isfinite(functions.add.reduce(o, axis=None))
        return o if is_clean else None


def one_tile(scores: Scores, plan: Plan, dtype: Dtype) -> OneTile | None:
    """Return the formula of a call; None if the call has other options, several tiles or no key."""
    grid, options = scores.grid, scores.options
    if not options.is_plain or dtype != grid.dtype:
        return None
    if not grid.library.has_ufuncs or not plan.is_small or not grid.keys:  # without a key, a tile may be large
        return None
    keys, allowed = None, None
    if options.has_mask:
        # The answer of the mask is kept with the call, so the call must be small; that for one query is.
        is_small = scores.known_tiles is not None or plan.queries == 1
        tiles = [*scores.tiles(range(plan.queries), plan)] if is_small else []
        if len(tiles) != 1:
            return None
        [(tile, answer)] = tiles
        if len(tile.columns) < plan.keys:
            keys = slice(tile.columns.start, tile.columns.stop)
        if not isinstance(answer, bool):
            allowed = answer
    columns = grid.keys if keys is None else keys.stop - keys.start
    multiply = faster_product(scores.query, scores.key.heads, columns) or matmul_grouped
    least = -LARGEST[dtype_name(grid.dtype)]
    return OneTile(grid.xp, cast(Ufuncs, grid.xp), cast(float, options.scale), keys, allowed, multiply, least)
