"""A mask for a tree of drafts: a token attends to the context, to its ancestors in the tree, and to itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._checks import shown
from .._checks.integers import as_lists
from .._checks.keywords import check_integer, explains_keywords
from .._checks.score_arrays import Integers, IntegersLike, check_offset
from .._libraries.protocols import AnyArray, Array, Shape
from .._tiles import Allowed, Tile
from .._tiles.grid import CallGrid
from ..errors import ArgumentTypeError, ArgumentValueError
from .algebra import FormulaPattern, Mask, Pattern
from .tables import joined, nested_shape, rows_of_tables, with_rows


@explains_keywords
def tree(parents: Sequence[Any] | AnyArray, *, offset: IntegersLike | Literal["lower_right"] = 0) -> Mask:
    """Return a mask of a tree of drafts: query i attends to the context, to its ancestors, and to itself.

        parents 0: -1   tree(parents, offset=2), 2 keys of context
                1: 0        1 1  1 0 0 0
                2: 0        1 1  1 1 0 0
                3: 1        1 1  1 0 1 0
                            1 1  1 1 0 1

    Args:
        parents: The number of the draft that each draft follows, below its own; -1 for those that follow the
            context. A list of L integers, nested lists (..., L) of a tree for each batch entry, or an integer
            array.
        offset: The position of the first draft among the keys, as for `causal`. In a cache they are the last
            tokens, whatever their positions.

    Returns:
        The mask. Keys behind the drafts are not attended to.

    Raises:
        TypeError: `parents` or the offset are not integers, or `parents` are not known inside a jit.
        ValueError: A parent is below -1 or not before its draft, or there is not one for each query; or the
            trees or the offset do not fit the batch.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.tree([-1, 0, 0, 1]), (4, 4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 1, 0, 1]])

    References:
        Miao et al., "SpecInfer", arXiv 2305.09781, section 4.2. Cai et al., "Medusa", arXiv 2401.10774,
        section 2.1.2.
    """
    drafts = as_lists(parents)
    if not isinstance(drafts, tuple | list):
        rule = "`parents` must be a list of integers, nested lists, or an array of them with known values"
        raise ArgumentTypeError("tree", rule, {"parents": shown(parents)})
    trees = with_rows("tree", "parents", drafts, nested_shape(drafts), _checked_parents)
    return DraftTree(trees, check_offset("tree", offset))


def _checked_parents(name: str, parents: Sequence[Any]) -> tuple[int, ...]:
    numbers = tuple(check_integer("tree", f"{name}[{n}]", parent, least=-1) for n, parent in enumerate(parents))
    for draft, parent in enumerate(numbers):
        if parent >= draft:
            rule = f"`{name}[{draft}]` must be below {draft}: a draft stands behind its parent"
            raise ArgumentValueError("tree", rule, {f"{name}[{draft}]": parent})
    return numbers


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DraftTree(Mask):
    """Made by `tree`."""

    name = "tree"
    counts = "slots"
    ignores_heads = True
    parents: tuple[Any, ...]
    offset: IntegersLike | Literal["lower_right"] = 0

    def bind(self, grid: CallGrid) -> Pattern:
        grid.lengths("attn_mask.parents", "L")  # a graph with a cache is refused
        offset = grid.check_offset("attn_mask.offset", self.offset)
        xp, (*batch, count) = grid.xp, nested_shape(self.parents)
        walks = [preorder(parents) for parents in joined((self.parents,), len(batch) + 1)]
        numbers = grid.put([number for first, _ in walks for number in first], xp.int32)
        entered = grid.check_ids("attn_mask.parents", xp.reshape(numbers, (*batch, count)), "L")
        number = xp.expand_dims(entered, axis=-1)
        number = grid.in_all_axes(xp.expand_dims(number, axis=-3) if batch else number)
        walks = [walks[n] for n in grid.entry_numbers(len(walks))]
        # One more stands for the keys behind the drafts, whose descendants are none.
        first = grid.put([number for first, _ in walks for number in (*first, 0)], number.dtype)
        last = grid.put([number for _, last in walks for number in (*last, -1)], number.dtype)
        return Ancestors(number, first, last, entered.shape[:-1], count, offset)


@dataclass(frozen=True, slots=True, eq=False)
class Ancestors(FormulaPattern):
    """A pair may attend iff the key is in the context, or the query is the key or one of its descendants.

    A walk through the tree that visits parents before children gives each draft a number, and a draft and its
    descendants consecutive numbers: from its own to the last of them.
    """

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"first": (None,), "last": (None,)}
    queries: Array
    """The number of each query, (L, 1) or (..., 1, L, 1)."""
    first: Array
    last: Array
    """Of each draft of all trees, one tree behind the other."""
    batch: Shape
    """The lengths of the axes (...) that have trees of their own."""
    count: int
    offset: Integers

    def formula(self, tile: Tile) -> Allowed:
        xp, start = tile.grid.xp, tile.slice_integers(self.offset).values + tile.grid.position.values
        draft = tile.key_index - start
        index = xp.where(draft > self.count, self.count, xp.where(draft < 0, 0, draft))
        number = tile.slice(self.queries)
        index = rows_of_tables(tile, index, (*self.batch, 1), self.count + 1, 1)
        shape = (1, -1) if index.ndim == 2 else index.shape
        first, last = (
            xp.reshape(xp.take(ends, xp.reshape(index, (-1,)), axis=0), shape)
            for ends in (self.first, self.last)
        )
        return (draft < 0) | ((first <= number) & (number <= last))

    @property
    def is_shared(self) -> bool:
        return isinstance(self.offset.values, int) and math.prod(self.batch) == 1

    def uniform(self, tile: Tile) -> bool | None:
        if tile.positions is not None:
            return None
        offset = tile.slice_integers(self.offset)
        if tile.columns.stop <= offset.least + tile.grid.position.least:
            return True
        return None if self.key_range(tile) else False

    def key_range(self, tile: Tile) -> range:
        if tile.positions is not None:
            return tile.columns
        last = tile.slice_integers(self.offset).most + tile.grid.position.most
        return range(tile.columns.start, int(min(tile.columns.stop, last + self.count)))


def preorder(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the number of each node in a walk that visits parents first, and that of its last descendant."""
    # Two loops, no recursion: a chain of drafts is a tree as deep as it has drafts.
    sizes = [1] * len(parents)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    first, next_child = [0] * len(parents), [0] * (len(parents) + 1)  # the last is the root of all
    for node, parent in enumerate(parents):
        first[node] = next_child[parent]
        next_child[parent] += sizes[node]
        next_child[node] = first[node] + 1
    return first, [number + size - 1 for number, size in zip(first, sizes, strict=True)]
