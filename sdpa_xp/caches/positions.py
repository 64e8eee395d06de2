"""The positions of the tokens in a cache.

A slot is where a token lies in the memory, a position is where it stands in its sequence. The two differ after
old tokens were dropped, in drafts that branch, and where texts of different lengths are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from sdpa_xp import _checks as checks
from sdpa_xp._call.options import CallOptions
from sdpa_xp._libraries import device_of, is_array, is_number, namespace_of, quiet
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp._tiles.modifier import ScoreModifier
from sdpa_xp.biases import Bias
from sdpa_xp.biases.positioned import bias_at
from sdpa_xp.masks import Mask
from sdpa_xp.masks.positioned import mask_at, reads_positions
from sdpa_xp.positional.positions import ArrayFactory, Consecutive, PositionsLike, are_readable
from sdpa_xp.positional.rotation import Positions

TokenPositionsLike: TypeAlias = int | PositionsLike | Sequence[Sequence[int]]
"""The positions of some tokens as a caller passes them: the first, or all."""


def factory_like(function: str, array: Array) -> ArrayFactory:
    """Return the factory of positions for the library and device of an array."""
    return ArrayFactory(function, namespace_of(array), device_of(array), {"like": array})


def check_first(function: str, first: object, like: Array) -> Consecutive:
    """Check the position of the first token: one integer, or one for each batch entry of `like`."""
    if is_number(first):
        return Consecutive(checks.integer(function, "first_position", first))
    values = _integers(function, "first_position", first, like)
    checks.broadcasts(function, "first_position", values.shape, like.shape[:-3], checks.THE_BATCH)
    return Consecutive(values)


def check_positions(
    function: str, positions: object, length: int, batch: Shape, like: Array, like_name: str = "key"
) -> Positions:
    """Check the positions of `length` tokens: that of the first token, or all of them as (..., length)."""
    if is_number(positions):
        return Consecutive(checks.integer(function, "positions", positions))
    values = _integers(function, "positions", positions, like, like_name)
    checks.one_each(function, "positions", values.shape, (*batch, length), "n")
    return Consecutive(0) if isinstance(length, int) and length == 0 else values


def positions_after(positions: Positions, length: int) -> Consecutive:
    """Return the positions that follow those of `length` tokens."""
    if isinstance(positions, Consecutive):
        return positions.moved(length)
    return Consecutive(positions[..., -1] + 1)


def joined_positions(
    factory: ArrayFactory, old: Positions, length: int, new: Positions, count: int
) -> Positions:
    """Return the positions of `length` tokens and of `count` tokens that are appended to them."""
    if isinstance(old, Consecutive) and isinstance(new, Consecutive) and _is_same(old.moved(length), new):
        return old
    if isinstance(length, int) and length == 0:
        return new
    xp = factory.xp
    parts = [positions_array(factory, old, length), positions_array(factory, new, count)]
    batch = checks.broadcast(parts[0].shape[:-1], parts[1].shape[:-1]) or ()
    parts = [
        part if part.shape[:-1] == batch else xp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts
    ]
    return xp.concat(parts, axis=-1)


def positions_array(factory: ArrayFactory, positions: Positions, length: int) -> Array:
    """Return the positions of `length` tokens as int32, (length,) or (..., length)."""
    return factory.consecutive(positions, length) if isinstance(positions, Consecutive) else positions


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


def check_slots(function: str, name: str, value: object, limit: int, letter: str, like: Array) -> Array:
    """Check numbers from 0 up to `limit`, (n,) or (B, n); they are not read if a device would have to wait."""
    index = _integers(function, name, value, like, "cache.key")
    if are_readable(index) and isinstance(limit, int) and 0 not in index.shape:
        xp = namespace_of(index)
        checks.among(function, name, int(xp.min(index)), int(xp.max(index)), limit, letter)
    return index


def elements_at(array: Array, index: Array, axis: int, token_axis: int) -> Array:
    """Return elements (n,) of an axis; or (B, n), where each batch entry has its own."""
    xp = namespace_of(array)
    if index.ndim < 2:
        return xp.take(array, index, axis=axis)
    if array.ndim < -token_axis + 1:  # one row of positions for all batch entries
        array = xp.broadcast_to(array, (index.shape[0], *array.shape))
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
        return {"positions": checks.brief(positions)}
    first, shift = positions
    if isinstance(first, int) and isinstance(shift, int):
        return {"first_position": str(first + shift)} if first + shift else {}
    return {} if isinstance(first, int | list) else {"first_position": f"{checks.brief(first)} + {shift}"}


def options_at(options: CallOptions, queries: Array, keys: Array, *, consecutive: bool) -> CallOptions:
    """Return options whose masks and biases count positions of the queries, (..., L), and keys, (..., S)."""
    mask, bias = options.attn_mask, options.bias
    if isinstance(mask, Mask):
        mask = mask_at(mask, queries, keys, consecutive=consecutive)
    if isinstance(bias, Bias):
        bias = bias_at(bias, queries, keys, consecutive=consecutive)
    return options._replace(attn_mask=mask, bias=bias)


def count_positions(options: CallOptions, *, consecutive: bool) -> bool:
    """Return whether a mask or a bias of the options counts positions, which are not the slots."""
    return any(
        isinstance(option, ScoreModifier) and reads_positions(option, consecutive=consecutive)
        for option in (options.attn_mask, options.bias)
    )


def _is_same(one: Consecutive, other: Consecutive) -> bool:
    """Return whether both are known to be the same; a length of a graph is only compared with a length."""
    if all(isinstance(number, int) for number in (*one, *other)):
        return sum(cast(tuple[int, int], one)) == sum(cast(tuple[int, int], other))
    return one.first is other.first and type(one.shift) is type(other.shift) and one.shift == other.shift


def _integers(function: str, name: str, value: Any, like: Array, like_name: str = "key") -> Array:
    """Return integers as int32, in the library and on the device of `like`, which messages call `like_name`."""
    with quiet(like):
        return _converted(function, name, value, like, like_name)


def _converted(function: str, name: str, value: Any, like: Array, like_name: str) -> Array:
    xp, device = namespace_of(like), device_of(like)
    if is_array(value):
        checks.one_library(function, {like_name: like, name: value})
        checks.one_device(function, {like_name: like, name: value})
    elif isinstance(value, range):
        value = list(value)
    elif isinstance(value, list | tuple) and any(isinstance(row, list | tuple | range) for row in value):
        rows = checks.integer_rows(function, name, value)
        return xp.asarray(rows, dtype=xp.int32, device=device)
    is_read = not is_array(value) or are_readable(value)
    return cast(Array, checks.integers(function, name, value, xp, device, traced=not is_read).values)
