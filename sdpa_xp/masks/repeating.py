"""Masks that repeat along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from sdpa_xp._checks.keywords import check_integer, explains_keywords
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Allowed, Tile
from sdpa_xp.masks.algebra import Mask, Pattern


@explains_keywords
def chunked(size: int) -> Mask:
    """Return a mask of chunks: query i attends to key j if i // size == j // size.

        chunked(2)            causal() & chunked(2)
            1 1 0 0 0             1 0 0 0 0
            1 1 0 0 0             1 1 0 0 0
            0 0 1 1 0             0 0 1 0 0
            0 0 1 1 0             0 0 1 1 0
            0 0 0 0 1             0 0 0 0 1

    Shapes:
        `L` queries, `S` keys.

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

    Shapes:
        `L` queries, `S` keys.

    Args:
        step: The distance between keys attended to, at least 1. 1 attends to every key.

    Returns:
        The mask. By itself it saves no work, because every tile has some pairs that may attend.

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
class Chunked(Mask, Pattern):
    """Made by `chunked`. It has nothing to bind, so it is its own pattern."""

    name = "chunked"
    ignores_heads = True
    size: int

    def bind(self, _grid: ScoreGrid) -> Pattern:
        return self

    def allowed_in(self, tile: Tile) -> Allowed:
        answer = self.uniform(tile)
        return tile.query_index // self.size == tile.key_index // self.size if answer is None else answer

    def uniform(self, tile: Tile) -> bool | None:
        if tile.positions is not None:
            return None
        first, last = tile.first_position // self.size, tile.last_position // self.size
        start, stop = tile.columns.start // self.size, (tile.columns.stop - 1) // self.size
        # A tile within one chunk needs no array, and tiles without a common chunk are skipped.
        if last < start or stop < first:
            return False
        return True if first == last == start == stop else None

    def key_range(self, tile: Tile) -> range:
        start, stop = (
            tile.first_position // self.size * self.size,
            (tile.last_position // self.size + 1) * self.size,
        )
        return range(max(start, tile.columns.start), min(stop, tile.columns.stop))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dilated(Mask, Pattern):
    """Made by `dilated`. It has nothing to bind, so it is its own pattern."""

    name = "dilated"
    counts = "distances"
    ignores_heads = True
    step: int

    def bind(self, _grid: ScoreGrid) -> Pattern:
        return self

    def allowed_in(self, tile: Tile) -> Allowed:
        answer = self.uniform(tile)
        return tile.query_index % self.step == tile.key_index % self.step if answer is None else answer

    def uniform(self, _tile: Tile) -> bool | None:
        return True if self.step == 1 else None
