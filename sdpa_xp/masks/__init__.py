"""Masks: which query may attend to which key. They combine with `&`, `|` and `~`, also with boolean arrays.

Pass any of them as `attn_mask`, for any `L` queries and `S` keys. No L x S array is built, and fully masked
tiles are skipped. Lengths, offsets and ids are checked when a call uses the mask.

    masks.sliding_window(255, 0, offset="lower_right")  # the last queries of S keys; a cache needs no offset
    masks.causal() & masks.padding(key_lengths=[3, 7])  # a ragged batch
    masks.causal() | masks.prefix(10)  # a prefix LM
    masks.causal() & masks.document([0, 0, 1, 1, 1])  # packed sequences

With array-api-strict, put the mask on the left of an array.

Masks by the positions of a query and a key are here; a file of others is loaded when one of them is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .._checks.keywords import check_integer, explains_keywords
from .._checks.score_arrays import Integers, IntegersLike, check_offset
from .._tiles import Allowed, Tile, both
from .._tiles.grid import CallGrid
from .._tiles.modifier import loaded
from .algebra import FormulaMask, FormulaPattern, Mask, Pattern

if TYPE_CHECKING:
    from .block_masks import blocks
    from .custom import from_array, from_function, to_array
    from .documents import document
    from .lengths import padding, prefix
    from .listed_keys import keys
    from .neighbourhoods import neighbourhood
    from .trees import tree

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chunked",
    "dilated",
    "document",
    "from_array",
    "from_function",
    "keys",
    "neighbourhood",
    "padding",
    "prefix",
    "sliding_window",
    "to_array",
    "tree",
]

_FILES = {
    "block_masks": "blocks",
    "custom": "from_array from_function to_array",
    "documents": "document",
    "lengths": "padding prefix",
    "listed_keys": "keys",
    "neighbourhoods": "neighbourhood",
    "trees": "tree",
}
"""The files that are loaded when one of their names is first used."""

if not TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        return loaded(__name__, name, _FILES)


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__


@explains_keywords
def causal(offset: IntegersLike | Literal["lower_right"] = 0) -> Mask:
    """Return a causal mask: query i attends to key j if j <= i + offset.

        offset 0, L=3 S=5     "lower_right" (offset 2)
            1 0 0 0 0             1 1 1 0 0
            1 1 0 0 0             1 1 1 1 0
            1 1 1 0 0             1 1 1 1 1

    Args:
        offset: The position of the first query among the keys: 0 aligns the upper left corner, as
            `is_causal=True` does, and "lower_right", S - L, lets the last query attend to all keys. Or any
            integer, or one for each batch entry, as a list or an integer array that broadcasts to (...).

    Raises:
        TypeError: The offset is not an integer.
        ValueError: The offset is another string, or does not fit the batch.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal("lower_right"), (2, 3)).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.3.
    """
    return Causal(check_offset("causal", offset))


@explains_keywords
def sliding_window(
    left: int | None, right: int | None, *, offset: IntegersLike | Literal["lower_right"] = 0
) -> Mask:
    """Return a sliding window: query i attends to key j if i + offset - left <= j <= i + offset + right.

        left 1, right 0       left 1, right 1
            1 0 0 0 0             1 1 0 0 0
            1 1 0 0 0             1 1 1 0 0
            0 1 1 0 0             0 1 1 1 0

    Args:
        left: The number of keys before its own position that a query attends to. None means all of them.
        right: The number of keys after its own position, or None; 0 gives a causal window.
        offset: The position of the first query among the keys, as for `causal`.

    Returns:
        The mask. Tiles outside the window are skipped, so the work grows linearly with L.

    Raises:
        TypeError: `left`, `right` or the offset is not an integer.
        ValueError: `left` or `right` is negative, or the offset does not fit, as for `causal`.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.sliding_window(1, 0), (3, 4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0]])

    References:
        Beltagy et al., "Longformer", arXiv 2004.05150, section 3.1. Jiang et al., "Mistral 7B",
        arXiv 2310.06825, section 2, counts the query's own key: a window of W there is left = W - 1, right = 0.
    """
    return SlidingWindow(_width("left", left), _width("right", right), check_offset("sliding_window", offset))


@explains_keywords
def chunked(size: int) -> Mask:
    """Return a mask of chunks: query i attends to key j if i // size == j // size.

        chunked(2)            causal() & chunked(2)
            1 1 0 0 0             1 0 0 0 0
            1 1 0 0 0             1 1 0 0 0
            0 0 1 1 0             0 0 1 0 0
            0 0 1 1 0             0 0 1 1 0
            0 0 0 0 1             0 0 0 0 1

    Args:
        size: The number of keys in a chunk, at least 1. Query 0 and key 0 begin the first chunk. With a cache,
            i and j are positions in the sequence.

    Returns:
        The mask. Tiles outside of the chunks on the diagonal are skipped.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.chunked(2), (3, 3)).astype(int)
        array([[1, 1, 0],
               [1, 1, 0],
               [0, 0, 1]])

    References:
        Child et al., "Sparse Transformers", arXiv 1904.10509, section 4.3. Llama 4 calls it chunked attention.
    """
    return Chunked(check_integer("chunked", "size", size, least=1))


@explains_keywords
def dilated(step: int) -> Mask:
    """Return a mask with gaps: query i attends to key j if their distance is a multiple of `step`.

        dilated(2)            sliding_window(2, 2) & dilated(2)
            1 0 1 0 1             1 0 1 0 0
            0 1 0 1 0             0 1 0 1 0
            1 0 1 0 1             1 0 1 0 1

    Args:
        step: The distance between keys attended to, at least 1. 1 attends to every key.

    Returns:
        The mask. By itself it saves no work, because every tile has pairs that may attend.

    Raises:
        TypeError: `step` is not an integer.
        ValueError: `step` is below 1.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.dilated(2), (2, 3)).astype(int)
        array([[1, 0, 1],
               [0, 1, 0]])

    References:
        Beltagy et al., "Longformer", arXiv 2004.05150, section 3.1, figure 2c.
    """
    return Dilated(check_integer("dilated", "step", step, least=1))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Causal(Mask):
    """Made by `causal`."""

    name = "causal"
    counts = "distances"
    ignores_heads = True
    offset: IntegersLike | Literal["lower_right"] = 0

    def bind(self, grid: CallGrid) -> Pattern:
        return Band(None, grid.check_offset("attn_mask.offset", self.offset))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """Made by `sliding_window`."""

    name = "sliding_window"
    counts = "distances"
    ignores_heads = True
    left: int | None
    right: int | None
    offset: IntegersLike | Literal["lower_right"] = 0

    def bind(self, grid: CallGrid) -> Pattern:
        offset = grid.check_offset("attn_mask.offset", self.offset)
        low = None if self.left is None else offset.plus(-self.left)
        return Band(low, None if self.right is None else offset.plus(self.right))


@dataclass(frozen=True, slots=True, eq=False)
class Band(Pattern):
    """A query at i attends to key j iff i + low <= j <= i + high; None is open."""

    low: Integers | None
    high: Integers | None

    def allowed_in(self, tile: Tile) -> Allowed:
        above, below = self._sides(tile)
        if above is False or below is False:
            return False
        allowed: Allowed = True
        # A side that all pairs keep needs no array.
        if above is None and self.low is not None:
            allowed = tile.query_index + tile.slice_integers(self.low).values <= tile.key_index
        if below is None and self.high is not None:
            allowed = both(allowed, tile.query_index + tile.slice_integers(self.high).values >= tile.key_index)
        return allowed

    @property
    def is_shared(self) -> bool:
        return all(side is None or isinstance(side.values, int) for side in (self.low, self.high))

    def uniform(self, tile: Tile) -> bool | None:
        answers = self._sides(tile)
        return False if False in answers else None if None in answers else True

    def key_bounds(self, tile: Tile) -> tuple[float, float]:
        low, high = self._slice(tile)
        start = float("-inf") if low is None else tile.first_position + low.least
        return start, float("inf") if high is None else tile.last_position + (high.most + 1)

    def query_range(self, tile: Tile) -> range:
        start, stop, position = tile.rows.start, tile.rows.stop, tile.grid.position
        low, high = self._slice(tile)
        if high is not None:  # the first query that attends to the first key
            start = int(max(start, tile.columns.start - high.most - position.most))
        if low is not None:  # the last query that attends to the last key
            stop = int(min(stop, tile.columns.stop - low.least - position.least))
        return range(start, stop)

    def _slice(self, tile: Tile) -> tuple[Integers | None, Integers | None]:
        return self.low and tile.slice_integers(self.low), self.high and tile.slice_integers(self.high)

    def _sides(self, tile: Tile) -> tuple[bool | None, bool | None]:
        """Return whether i + low <= j, and j <= i + high, hold for all pairs or for none; None if for some.

        The least and the largest distance of the tile decide: no array is built.
        """
        (nearest, farthest), (low, high) = tile.distances, self._slice(tile)
        above = True if low is None or low.most <= nearest else False if low.least > farthest else None
        below = True if high is None or farthest <= high.least else False if nearest > high.most else None
        return above, below


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Chunked(FormulaMask, FormulaPattern):
    """Made by `chunked`."""

    name = "chunked"
    ignores_heads = True
    size: int

    def formula(self, tile: Tile) -> Allowed:
        return tile.query_index // self.size == tile.key_index // self.size

    def uniform(self, tile: Tile) -> bool | None:
        if tile.positions is not None:
            return None
        first, last = tile.first_position // self.size, tile.last_position // self.size
        start, stop = tile.columns.start // self.size, (tile.columns.stop - 1) // self.size
        # A tile within one chunk needs no array, and tiles without a common chunk are skipped.
        if last < start or stop < first:
            return False
        return True if first == last == start == stop else None

    def key_bounds(self, tile: Tile) -> tuple[float, float]:
        start, stop = tile.first_position // self.size, tile.last_position // self.size + 1
        return start * self.size, stop * self.size


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dilated(FormulaMask, FormulaPattern):
    """Made by `dilated`."""

    name = "dilated"
    counts = "distances"
    ignores_heads = True
    step: int

    def formula(self, tile: Tile) -> Allowed:
        return tile.query_index % self.step == tile.key_index % self.step

    def uniform(self, _tile: Tile) -> bool | None:
        return True if self.step == 1 else None


def _width(name: str, keys: int | None) -> int | None:
    hint = "None is a side without a limit."
    return None if keys is None else check_integer("sliding_window", name, keys, least=0, hint=hint)
