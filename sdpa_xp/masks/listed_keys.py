"""A mask of listed keys: each query, or each block of queries, has a list of the keys that it attends to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from .._checks import shown
from .._checks.keywords import LARGEST_INTEGER, check_block_size, explains_keywords
from .._checks.score_arrays import THE_BATCH, check_broadcasts, check_ids, frozen_integers, is_integral
from .._libraries import astype_if_needed, dtype_name, has_override, is_array, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Shape
from .._libraries.trees import leaves
from .._tiles import Allowed, Tile, collapse_uniform, either, tuning
from .._tiles.grid import CallGrid, ScoreGrid
from .._tiles.key_lists import KeyLists
from ..errors import ArgumentTypeError, ArgumentValueError
from . import Band, Chunked, Dilated
from .algebra import AllOf, Joined, Mask, NoneOf, Pattern
from .lengths import KeysBefore
from .tables import rows_of_tables


@explains_keywords
def keys(indices: AnyArray, block_size: int | tuple[int, int] = 1) -> Mask:
    """Return a mask of lists: query i attends to the keys indices[..., i, :].

        indices  0 -1      1 0 0 0
                 0  1      1 1 0 0
                 2  0      1 0 1 0
                 3  3      0 0 0 1

    Args:
        indices: (..., h, L, k), or (L, k) for all heads and batch entries: an integer array of the library of
            the query. h divides Hq: each list is for Hq / h consecutive query heads. A negative index is
            padding, and a repeated index counts once. A query without an index attends to no key.
        block_size: The tokens of a block, or its (queries, keys). If it is not 1, indices are numbers of
            blocks of keys, and there is a list for each block of queries. In a cache, blocks of keys count its
            tokens, and blocks of queries count the new tokens.

    Returns:
        The mask. Alone, or joined by `&` to masks such as `causal()` and `sliding_window(...)`, it is not
            asked about tiles: attention copies the listed keys of a few queries at a time, and time and memory
            grow with L * k. Gradients, weights and statistics take the time of all pairs; so do calls with a
            bias, sinks, a soft cap or dropout, and paged or quantised caches.

    Raises:
        TypeError: `indices` is not an integer array, or belongs to another library.
        ValueError: There is not one list for each query, the lists do not fit the heads or the batch, or an
            index is beyond the last key. Inside a jit, such an index is padding.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import masks
        >>> lists = np.asarray([[0, -1], [0, 1], [2, 0], [3, 3]])
        >>> masks.to_array(masks.keys(lists), (4, 4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [0, 0, 0, 1]])

    References:
        DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section 2.1, for the keys of each query. Yuan et al.,
        "Native Sparse Attention", arXiv 2502.11089, section 3.3.2, for blocks of keys.
    """
    size = check_block_size("keys", block_size)
    rule = "`indices` must be integers, an array (..., h, L, k) or (L, k)"
    if not (is_array(indices) and is_integral(indices)) and not has_override(indices):
        got = {"indices.dtype": indices.dtype} if is_array(indices) else {"indices": shown(indices)}
        raise ArgumentTypeError("keys", rule, got)
    if len(indices.shape) < 2:
        raise ArgumentValueError("keys", rule, {"indices.shape": indices.shape})
    return Keys(frozen_integers("keys", indices=indices)[0], size)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Keys(Mask):
    """Made by `keys`."""

    name = "keys"
    counts = "slots"
    indices: AnyArray
    block_size: tuple[int, int] = (1, 1)

    def bind(self, grid: CallGrid) -> Pattern:
        name, shape, (rows, columns) = "attn_mask.indices", self.indices.shape, self.block_size
        (keys,) = grid.lengths(name, "S")  # a graph with a cache, or of open lengths, is refused
        check_broadcasts(grid.function, name, shape[:-3], grid.batch, THE_BATCH)
        queries, heads = cast(Any, grid).queries, shape[-3] if len(shape) > 2 else 1
        if heads == 0 or grid.heads % heads or shape[-2] != -(-queries // rows):
            rule = f"`{name}` must have a list for each query or block of queries, and for heads that divide Hq"
            got = {
                f"{name}.shape": shape,
                "Hq": grid.heads,
                "L": queries,
                "attn_mask.block_size": self.block_size,
            }
            raise ArgumentValueError(grid.function, rule, got)
        indices = grid.slice_entries(cast(Array, self.indices), 3)
        numbers = check_ids(grid.function, name, indices, grid.xp, grid.device)
        bounds, xp = grid.bounds(numbers), namespace_of(numbers)
        if bounds is not None:
            least, most = map(int, bounds)
            most = (
                least + 2**64 if least < 0 and dtype_name(indices.dtype).startswith("u") else most
            )  # it wrapped around
            if most * columns >= keys:
                rule = f"`{name}` must be below S, or below the number of blocks of keys"
                got = {name: most, "S": keys, "attn_mask.block_size": self.block_size}
                raise ArgumentValueError(grid.function, rule, got)
        if dtype_name(numbers.dtype) == "int64":  # else int32 would wrap it around
            numbers = xp.clip(numbers, -1, LARGEST_INTEGER)
        # Of no elements, -1 could be any number; and a number of a compiler need not be known.
        count = math.prod(indices.shape[:-1]) if 0 in [n for n in shape if isinstance(n, int)] else -1
        lists = xp.reshape(astype_if_needed(xp, numbers, xp.int32), (count, shape[-1]))
        return ListedKeys(lists, (*indices.shape[:-3], heads), shape[-2], self.block_size, grid.heads, keys)


@dataclass(frozen=True, slots=True, eq=False)
class ListedKeys(Pattern):
    """A pair may attend iff the number of its block of keys is in the list of its block of queries.

    It is the patches of a call as well: each block of queries with its list.
    """

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"lists": (None, None)}
    lists: Array
    """(n * blocks, k)."""
    shape: Shape
    """The lengths of the axes (..., h) that have lists of their own; n is their product."""
    blocks: int
    size: tuple[int, int]
    heads: int
    """Query heads."""
    all_keys: int
    joined: tuple[Pattern, ...] = ()
    """What a pair has to be in too, for patches."""

    def allowed_in(self, tile: Tile) -> Allowed:
        count, size = self.lists.shape[-1], self.size[1]
        if not (count and self.all_keys):
            return False
        xp, lists = namespace_of(self.lists), self._of_tile(tile)
        if library_of(lists).sets_elements and tile.placement is None and tile.grid.may_read(lists):
            return collapse_uniform(tile, _spread(lists, tile.columns, size))
        key = tile.key_index if size == 1 else tile.key_index // size
        # In parts, so that few times the elements of a tile are compared at once. A graph must not grow with
        # the lists, so there are at most 64.
        step = -(-count // 64)
        if tile.placement is None:  # else a length may be a symbol
            known = [n for n in self.shape if isinstance(n, int)]  # not the open batch of a graph
            pairs = len(tile.rows) * len(tile.columns) * math.prod(known)
            step = max(step, tuning.DEVICE.scores // max(pairs, 1))
        allowed: Allowed = False
        for start in range(0, count, step):
            part = xp.expand_dims(lists[..., start : min(start + step, count)], axis=-2)
            equal = cast(Array, part == xp.expand_dims(key, axis=-1))
            allowed = either(allowed, xp.any(equal, axis=-1))
        return collapse_uniform(tile, cast(Array, allowed))

    def _of_tile(self, tile: Tile) -> Array:
        """Return the list of each query of a tile, (..., rows, k)."""
        xp, rows = namespace_of(self.lists), tile.row_index // self.size[0]
        numbers = rows_of_tables(tile, rows, self.shape, self.blocks, self.heads)
        of_rows = xp.take(self.lists, xp.reshape(numbers, (-1,)), axis=0)
        return xp.reshape(of_rows, (*numbers.shape[:-1], self.lists.shape[-1]))

    def patches(self, grid: ScoreGrid, others: tuple[Pattern, ...] = ()) -> ListedKeys | None:
        is_plain = grid.placement is None and grid.part is None and isinstance(grid.position.values, int)
        is_read = is_plain and self.lists.shape[-1] > 0 and all(map(_reads_indices, others))
        return replace(self, joined=others) if is_read else None

    @property
    def others(self) -> Pattern:
        return AllOf(self.joined)

    @property
    def queries(self) -> int:
        return self.size[0]

    @property
    def keys(self) -> int:
        return self.lists.shape[-1] * self.size[1]

    def group(self, group: int) -> int:
        return math.gcd(group, self.heads // self.shape[-1])

    def key_lists(self, grid: ScoreGrid) -> KeyLists:
        xp, rows = namespace_of(self.lists), self.size[0]
        numbers = xp.sort(self.lists, axis=-1)
        is_new = cast(Array, numbers[:, 1:] != numbers[:, :-1])
        is_real = (numbers >= 0) & (numbers < -(-self.all_keys // self.size[1]))
        is_real = is_real & xp.concat([is_real[:, :1], is_new], axis=-1)
        # Padding reads the last key of its list, so that it brings in no NaN which the list has not.
        last = xp.max(xp.where(is_real, numbers, 0), axis=-1, keepdims=True)
        queries = grid.arange(0, self.blocks * rows)
        queries = xp.where(queries < grid.queries, queries, grid.queries - 1)  # copies that no place reads
        queries = xp.reshape(queries, (self.blocks, rows))
        is_full = grid.may_read(is_real) and bool(xp.all(is_real))
        return KeyLists(
            queries,
            xp.where(is_real, numbers, last),
            grid.arange(0, grid.queries),
            None if is_full else is_real,
            self.shape,
            self.size[1],
            self.all_keys,
        )


def _reads_indices(pattern: Pattern) -> bool:
    """Return whether a pattern reads nothing of a tile but `query_index` and `key_index`, of any shape."""
    if isinstance(pattern, Joined):
        return all(map(_reads_indices, pattern.patterns))
    if isinstance(pattern, NoneOf):
        return _reads_indices(pattern.pattern)
    return isinstance(pattern, Band | Chunked | Dilated | KeysBefore) and not [*leaves(pattern)]


def _spread(lists: Array, columns: range, size: int) -> Array:
    """Return where lists (..., rows, k) of blocks of keys name the keys of `columns`."""
    xp, device = namespace_of(lists), library_of(lists).device(lists)
    *leading, length = lists.shape
    start, count = columns.start // size, -(-columns.stop // size) - columns.start // size
    blocks = xp.reshape(lists, (math.prod(leading), length)) - start
    row, place = xp.nonzero((blocks >= 0) & (blocks < count))
    flags = xp.zeros((blocks.shape[0], count), dtype=xp.bool, device=device)
    flags[row, blocks[row, place]] = True
    if size > 1:
        index = xp.arange(columns.start, columns.stop, dtype=xp.int32, device=device)
        flags = xp.take(flags, index // size - start, axis=-1)
    return xp.reshape(flags, (*leading, len(columns)))
