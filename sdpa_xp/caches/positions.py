"""The positions of the tokens of a KVCache: consecutive ones from a first one, or an array.

A slot is where a token lies in the memory, a position is where it stands in its sequence. The two differ after
old tokens were dropped, in drafts that branch, and where texts of different lengths are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from .._checks import brief, integers
from .._checks.arrays import broadcast, check_one_device, check_one_library
from .._checks.score_arrays import THE_BATCH, check_broadcasts, check_integers, check_one_each
from .._libraries import computing, is_array, library_of, namespace_of
from .._libraries.protocols import Array, Shape
from ..errors import ArgumentValueError
from ..positional.positions import ArrayFactory, Consecutive, PositionsLike, are_readable
from ..positional.rotation import Positions

TokenPositionsLike: TypeAlias = int | PositionsLike | Sequence[Sequence[int]]
"""The position of the first token, or of all."""


def factory_like(function: str, array: Array) -> ArrayFactory:
    """Return the factory of positions for the library and device of an array."""
    library = library_of(array)
    return ArrayFactory(function, library.namespace(array), library.device(array), {"like": array})


def start(function: str, first: object, positions: object, length: int, like: Array) -> Positions:
    """Check the positions of the first `length` tokens, either all of them or the `first` for each entry."""
    check_one_start(function, first, positions)
    if positions is not None:
        return check(function, positions, length, like.shape[:-3], like)
    values = _integers(function, "first_position", first, like)
    if not isinstance(values, int):
        check_broadcasts(function, "first_position", values.shape, like.shape[:-3], THE_BATCH)
    return Consecutive(values)


def check_one_start(function: str, first_position: object, positions: object) -> None:
    """Check that positions are given in one way."""
    is_zero = isinstance(first_position, int) and first_position == 0
    if positions is not None and not is_zero:
        rule = "`first_position` and `positions` must not both be given"
        raise ArgumentValueError(function, rule, {"first_position": first_position})


def check(
    function: str, positions: object, length: int, batch: Shape, like: Array, like_name: str = "key"
) -> Positions:
    """Check the positions of `length` tokens: that of the first token, or all of them as (..., length)."""
    values = _integers(function, "positions", positions, like, like_name)
    if isinstance(values, int):
        return Consecutive(values)
    check_one_each(function, "positions", values.shape, (*batch, length), "n")
    # No positions have no last one, after which appended tokens would go on.
    return Consecutive(0) if isinstance(length, int) and length == 0 else values


def after(positions: Positions, length: int) -> Consecutive:
    """Return the positions that follow those of `length` tokens."""
    if isinstance(positions, Consecutive):
        return positions.moved(length)
    return Consecutive(positions[..., -1] + 1)


def joined(function: str, like: Array, old: Positions, length: int, new: Positions, count: int) -> Positions:
    """Return the positions of `length` tokens and of `count` tokens that are appended to them."""
    # Positions that go on stay two numbers, so that most caches never have an array of positions.
    if isinstance(old, Consecutive) and isinstance(new, Consecutive) and _is_same(old.moved(length), new):
        return old
    if isinstance(length, int) and length == 0:
        return new
    xp, parts = namespace_of(like), [as_array(function, like, *part) for part in ((old, length), (new, count))]
    batch = broadcast(*(part.shape[:-1] for part in parts)) or ()
    parts = [
        part if part.shape[:-1] == batch else xp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts
    ]
    return xp.concat(parts, axis=-1)


def as_array(function: str, like: Array, positions: Positions, length: int) -> Array:
    """Return the positions of `length` tokens as int32, (length,) or (..., length), on the device of `like`."""
    if not isinstance(positions, Consecutive):
        return positions
    return factory_like(function, like).consecutive(positions, length)


def last(function: str, positions: Positions, length: int, count: int) -> Positions:
    """Return the last positions of `length` tokens; consecutive ones go on in front of the first token."""
    if isinstance(positions, Consecutive):
        return positions.moved(length - count)
    check_in_cache(function, count, length)
    return positions[..., length - count :]  # without an end, a graph knows how many these are


def without(positions: Positions, length: int, first: int, last: int) -> Positions:
    """Return the positions of `length` tokens without the first and the last of them."""
    if isinstance(positions, Consecutive):
        return positions.moved(first) if first else positions
    if isinstance(length, int) and first + last == length:  # the position of the next token is left
        return Consecutive(positions[..., -1] + 1 if first == length else positions[..., first])
    return positions[..., first : -last if last else None]


def check_slots(function: str, name: str, value: object, limit: int, letter: str, like: Array) -> Array:
    """Check numbers from 0 up to `limit`, (n,) or (B, n); they are not read if a device would have to wait."""
    index = cast(Array, _integers(function, name, value, like, "cache.key"))
    bounds = library_of(index).bounds(index) if are_readable(index) and isinstance(limit, int) else None
    if bounds is not None:
        least, most = bounds
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


def of_entries(positions: Positions, index: Array, batch: Shape) -> Positions:
    """Return the positions of some batch entries, which are numbers on the first of the batch axes."""
    is_consecutive = isinstance(positions, Consecutive)
    array: Any = positions.first if isinstance(positions, Consecutive) else positions
    if is_array(array) and array.ndim == len(batch) + (not is_consecutive):
        ones = [isinstance(length, int) and length == 1 for length in (array.shape[0], batch[0])]
        if ones != [True, False]:  # else the same for all entries
            array = namespace_of(array).take(array, index, axis=0)
    return positions._replace(first=array) if isinstance(positions, Consecutive) else array


def shown(positions: Positions) -> dict[str, str]:
    """Return the argument of a cache that gives it these positions, for a repr; none if it is the default."""
    if not isinstance(positions, Consecutive):
        return {"positions": brief(positions)}
    first, shift = positions
    if isinstance(first, int):
        return {"first_position": str(first + shift)} if isinstance(shift, int) and first + shift else {}
    return {"first_position": f"{brief(first)} + {shift}"}


def check_in_cache(function: str, queries: int, tokens: int) -> None:
    """Check that queries are the last tokens of a cache that has a position for each of them."""
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "queries that are not the last tokens of the cache need `positions`"
        raise ArgumentValueError(function, rule, {"L": queries, "tokens": tokens})


def _is_same(one: Consecutive, other: Consecutive) -> bool:
    """Return whether both are known to be the same; a length of a graph is only compared with a length."""
    if all(isinstance(number, int) for number in (*one, *other)):
        return sum(cast(tuple[int, int], one)) == sum(cast(tuple[int, int], other))
    return one.first is other.first and type(one.shift) is type(other.shift) and one.shift == other.shift


def _integers(function: str, name: str, value: Any, like: Array, like_name: str = "key") -> int | Array:
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
            rows = integers.check_integer_rows(function, name, value)
            lengths = [len(row) for row in rows]
            if len({*lengths}) > 1:
                rule = f"the rows of `{name}` must have one length"
                raise ArgumentValueError(function, rule, {"lengths": lengths})
            return xp.asarray(rows, dtype=xp.int32, device=device)
        # A device or a jit is not waited for: values that are not read are not checked either.
        is_read = not is_array(value) or are_readable(value)
        return check_integers(function, name, value, xp, device, traced=not is_read).values
