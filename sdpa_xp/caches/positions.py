"""The positions of the tokens in a KVCache, and masks and biases that know them.

A slot is where a token lies in the memory, a position is where it stands in its sequence. The two differ after
old tokens were dropped, in drafts that branch, and where texts of different lengths are padded on the left.
Then the i and j of the caller's masks and biases are positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from .._call.options import CallOptions
from .._checks.arrays import broadcast, check_one_device, check_one_library
from .._checks.integers import check_integer_rows, check_integers, check_one_each
from .._checks.keywords import check_integer
from .._checks.messages import brief
from .._checks.score_arrays import THE_BATCH, check_broadcasts
from .._libraries import FLOATING, computing, dtype_name, is_array, is_number, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Shape
from .._tiles.modifier import ScoreModifier
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Allowed, Tile, TokenPositions
from ..biases.algebra import Bias, Sum, Term
from ..errors import ArgumentValueError
from ..masks.algebra import Combined, Mask
from ..masks.patterns import Pattern, PatternAtPositions
from ..positional.positions import ArrayFactory, Consecutive, PositionsLike, are_readable
from ..positional.rotation import Positions

TokenPositionsLike: TypeAlias = int | PositionsLike | Sequence[Sequence[int]]
"""The positions of some tokens as a caller passes them: the first, or all."""


def factory_like(function: str, array: Array) -> ArrayFactory:
    """Return the factory of positions for the library and device of an array."""
    library = library_of(array)
    return ArrayFactory(function, library.namespace(array), library.device(array), {"like": array})


def check_start(function: str, first: object, positions: object, length: int, like: Array) -> Positions:
    """Check the positions of the first `length` tokens, either all of them or the `first` for each entry."""
    check_one_start(function, first, positions)
    if positions is not None:
        return check_positions(function, positions, length, like.shape[:-3], like)
    if is_number(first):
        return Consecutive(check_integer(function, "first_position", first))
    values = _integers(function, "first_position", first, like)
    check_broadcasts(function, "first_position", values.shape, like.shape[:-3], THE_BATCH)
    return Consecutive(values)


def check_one_start(function: str, first_position: object, positions: object) -> None:
    """Check that positions are given in one way."""
    is_zero = isinstance(first_position, int) and first_position == 0
    if positions is not None and not is_zero:
        rule = "`first_position` and `positions` must not both be given"
        raise ArgumentValueError(function, rule, {"first_position": first_position})


def check_positions(
    function: str, positions: object, length: int, batch: Shape, like: Array, like_name: str = "key"
) -> Positions:
    """Check the positions of `length` tokens: that of the first token, or all of them as (..., length)."""
    if is_number(positions):
        return Consecutive(check_integer(function, "positions", positions))
    values = _integers(function, "positions", positions, like, like_name)
    check_one_each(function, "positions", values.shape, (*batch, length), "n")
    # No positions have no last one, after which appended tokens would go on.
    return Consecutive(0) if isinstance(length, int) and length == 0 else values


def positions_after(positions: Positions, length: int) -> Consecutive:
    """Return the positions that follow those of `length` tokens."""
    if isinstance(positions, Consecutive):
        return positions.moved(length)
    return Consecutive(positions[..., -1] + 1)


def joined_positions(
    function: str, like: Array, old: Positions, length: int, new: Positions, count: int
) -> Positions:
    """Return the positions of `length` tokens and of `count` tokens that are appended to them."""
    # Positions that go on stay two numbers, so that most caches never have an array of positions.
    if isinstance(old, Consecutive) and isinstance(new, Consecutive) and _is_same(old.moved(length), new):
        return old
    if isinstance(length, int) and length == 0:
        return new
    xp = namespace_of(like)
    parts = [positions_array(function, like, *part) for part in ((old, length), (new, count))]
    batch = broadcast(parts[0].shape[:-1], parts[1].shape[:-1]) or ()
    parts = [
        part if part.shape[:-1] == batch else xp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts
    ]
    return xp.concat(parts, axis=-1)


def positions_array(function: str, like: Array, positions: Positions, length: int) -> Array:
    """Return the positions of `length` tokens as int32, (length,) or (..., length), on the device of `like`."""
    if not isinstance(positions, Consecutive):
        return positions
    return factory_like(function, like).consecutive(positions, length)


def last_positions(positions: Positions, length: int, count: int) -> Positions:
    """Return the last positions of `length` tokens; consecutive ones go on in front of the first token."""
    if isinstance(positions, Consecutive):
        return positions.moved(length - count)
    return positions[..., length - count :]  # without an end, a graph knows how many these are


def positions_without(positions: Positions, length: int, first: int, last: int) -> Positions:
    """Return the positions of `length` tokens without the first and the last of them."""
    if isinstance(positions, Consecutive):
        return positions.moved(first) if first else positions
    if isinstance(length, int) and first + last == length:  # the position of the next token is left
        return Consecutive(positions[..., -1] + 1 if first == length else positions[..., first])
    return positions[..., first : -last if last else None]


def check_in_cache(function: str, queries: int, tokens: int) -> None:
    """Check that queries are the last tokens of a cache that has a position for each of them."""
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "queries that are not the last tokens of the cache need `positions`"
        raise ArgumentValueError(function, rule, {"L": queries, "tokens": tokens})


def check_slots(function: str, name: str, value: object, limit: int, letter: str, like: Array) -> Array:
    """Check numbers from 0 up to `limit`, (n,) or (B, n); they are not read if a device would have to wait."""
    index = _integers(function, name, value, like, "cache.key")
    if are_readable(index) and isinstance(limit, int) and 0 not in index.shape:
        xp = namespace_of(index)
        least, most = int(xp.min(index)), int(xp.max(index))
        if least < 0 or most >= limit:
            rule, number = f"`{name}` must be from 0 to {letter} - 1", least if least < 0 else most
            raise ArgumentValueError(function, rule, {name: number, letter: limit})
    return index


def elements_at(array: Array, index: Array, axis: int) -> Array:
    """Return elements (n,) of an axis; or (B, n), where each batch entry has its own."""
    xp = namespace_of(array)
    if index.ndim < 2:
        return xp.take(array, index, axis=axis)
    if array.ndim < -axis + 1:  # one row of positions for all batch entries
        array = xp.broadcast_to(array, (index.shape[0], *array.shape))
    # `take_along_axis` is part of the standard since 2024.12, and not every library has it.
    return xp.stack([xp.take(array[n, ...], index[n, ...], axis=axis) for n in range(index.shape[0])], axis=0)


def positions_of_entries(positions: Positions, index: Array, batch: Shape) -> Positions:
    """Return the positions of some batch entries, which are numbers on the first of the batch axes."""

    def rows_of(array: Array, axes: int) -> Array:
        if array.ndim < axes or (_is_one(array.shape[0]) and not _is_one(batch[0])):  # the same for all entries
            return array
        return namespace_of(array).take(array, index, axis=0)

    if not isinstance(positions, Consecutive):
        return rows_of(positions, len(batch) + 1)
    first, shift = positions
    return positions if isinstance(first, int | list) else Consecutive(rows_of(first, len(batch)), shift)


def _is_one(length: object) -> bool:
    return isinstance(length, int) and length == 1


def shown_positions(positions: Positions) -> dict[str, str]:
    """Return the argument of a cache that gives it these positions, for a repr; none if it is the default."""
    if not isinstance(positions, Consecutive):
        return {"positions": brief(positions)}
    first, shift = positions
    if isinstance(first, int) and isinstance(shift, int):
        return {"first_position": str(first + shift)} if first + shift else {}
    return {} if isinstance(first, int | list) else {"first_position": f"{brief(first)} + {shift}"}


def _is_same(one: Consecutive, other: Consecutive) -> bool:
    """Return whether both are known to be the same; a length of a graph is only compared with a length."""
    if all(isinstance(number, int) for number in (*one, *other)):
        return sum(cast(tuple[int, int], one)) == sum(cast(tuple[int, int], other))
    return one.first is other.first and type(one.shift) is type(other.shift) and one.shift == other.shift


def _integers(function: str, name: str, value: Any, like: Array, like_name: str = "key") -> Array:
    """Return integers as int32, in the library and on the device of `like`, which messages call `like_name`."""
    library = library_of(like)
    xp, device = library.namespace(like), library.device(like)
    with computing(like):
        if is_array(value):
            check_one_library(function, {like_name: like, name: value})
            check_one_device(function, {like_name: like, name: value})
        elif isinstance(value, range):
            value = list(value)
        elif isinstance(value, list | tuple) and any(isinstance(row, list | tuple | range) for row in value):
            rows = check_integer_rows(function, name, value)
            lengths = [len(row) for row in rows]
            if len({*lengths}) > 1:
                rule = f"the rows of `{name}` must have one length"
                raise ArgumentValueError(function, rule, {"lengths": lengths})
            return xp.asarray(rows, dtype=xp.int32, device=device)
        # A device or a jit is not waited for: values that are not read are not checked either.
        is_read = not is_array(value) or are_readable(value)
        return cast(Array, check_integers(function, name, value, xp, device, traced=not is_read).values)


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _AtPositions(ScoreModifier):
    """A mask or a bias whose i and j are positions of the tokens."""

    name = "at_positions"
    counts = "slots"
    modifiers: tuple[Any]
    query_positions: AnyArray
    key_positions: AnyArray

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.modifiers

    def has_known_gradients(self) -> bool:
        # A term is asked for its gradient at places, not at positions.
        (modifier,) = self.modifiers
        arrays = [cast(Array, array) for _, array in modifier.arrays()]
        return bool(modifier.has_known_gradients()) and all(dtype_name(x.dtype) not in FLOATING for x in arrays)

    def _bind_at(self, grid: ScoreGrid) -> tuple[Any, TokenPositions]:
        """Return what the mask or the bias is bound to, and the positions, of the grid's batch entries."""
        xp = grid.xp
        queries, keys = (
            xp.expand_dims(grid.slice_entries(cast(Array, array), 1), axis=-2)
            for array in (self.query_positions, self.key_positions)
        )
        positions = TokenPositions(
            grid.in_all_axes(queries, 1), grid.in_all_axes(xp.expand_dims(keys, axis=-2))
        )
        return self.modifiers[0].bind(replace(grid, has_positions=True)), positions


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskAtPositions(_AtPositions, Mask):
    def bind(self, grid: ScoreGrid) -> Pattern:
        return PatternAtPositions(*self._bind_at(grid))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BiasAtPositions(_AtPositions, Bias):
    def bind(self, grid: ScoreGrid) -> tuple[Term, ...]:
        terms, positions = self._bind_at(grid)
        return tuple(TermAtPositions(term, positions) for term in terms)


@dataclass(frozen=True, slots=True, eq=False)
class TermAtPositions(Term):
    term: Term
    positions: TokenPositions

    @property
    def is_of_caller(self) -> bool:
        return self.term.is_of_caller

    def apply(self, tile: Tile, scores: Array, *, in_place: bool = False) -> tuple[Array, Allowed]:
        return self.term.apply(tile._replace(positions=self.positions), scores, in_place=in_place)
