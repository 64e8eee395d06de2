"""Masks by length: ragged batches and prefixes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._checks.keywords import explains_keywords
from .._checks.score_arrays import Integers, IntegersLike, frozen_integers
from .._tiles import Allowed, Tile
from .._tiles.grid import CallGrid
from .algebra import AllOf, FormulaPattern, Mask, Pattern


@explains_keywords
def padding(key_lengths: IntegersLike | None, query_lengths: IntegersLike | None = None) -> Mask:
    """Return a padding mask: the queries of batch entry b may attend to key j if j < key_lengths[b].

        key_lengths=[3, 5], S=5:  entry 0   1 1 1 0 0      entry 1   1 1 1 1 1

    Args:
        key_lengths: The number of real keys among the S; the keys after them are padding. One integer for
            each batch entry, as a list or an integer array that broadcasts to (...), or one for all. 0 is
            allowed. None means that all keys are real. With a cache, count past and new tokens together.
        query_lengths: The number of real queries among the L, in the same forms. The output of the others is 0.

    Returns:
        The mask. Padding may hold any values, including NaN.

    Raises:
        TypeError: The lengths are not integers, or belong to another library.
        ValueError: A length is negative or beyond S (or L), or the lengths do not fit the batch.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.padding([1, 3]), (2, 1, 1, 3)).astype(int)[:, 0, 0]
        array([[1, 0, 0],
               [1, 1, 1]])

    References:
        key_value_seq_lengths of jax.nn.dot_product_attention; nonpad_kv_seqlen of ONNX Attention-24.
    """
    return Padding(*frozen_integers("padding", key_lengths=key_lengths, query_lengths=query_lengths))


@explains_keywords
def prefix(length: IntegersLike) -> Mask:
    """Return a mask of the first keys: every query may attend to key j if j < length.

    `causal() | prefix(n)` is the mask of a prefix language model, whose first n tokens attend to each other.

        causal() | prefix(2)
            1 1 0 0
            1 1 0 0
            1 1 1 0
            1 1 1 1

    Args:
        length: The number of keys in the prefix, which may exceed S. Pass one integer, or one for each batch
            entry as a list or an integer array that broadcasts to (...). With a cache, j is the position of a
            key, so `~prefix(0)` hides padding at negative positions.

    Raises:
        TypeError: The length is not an integer, or belongs to another library.
        ValueError: The length is negative, or does not fit the batch.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal() | masks.prefix(2), (3, 3)).astype(int)
        array([[1, 1, 0],
               [1, 1, 0],
               [1, 1, 1]])

    References:
        Raffel et al., "T5", arXiv 1910.10683, section 3.2.1, figure 3.
    """
    return Prefix(*frozen_integers("prefix", length=length))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Padding(Mask):
    """Made by `padding`."""

    name = "padding"
    counts = "slots"
    key_lengths: IntegersLike | None
    query_lengths: IntegersLike | None = None
    names: tuple[str, str] = field(default=("attn_mask.key_lengths", "attn_mask.query_lengths"), repr=False)
    """The names of the lengths in messages."""

    @property
    def hides_whole_keys(self) -> bool:
        return self.query_lengths is None and self.key_lengths is not None

    def bind(self, grid: CallGrid) -> Pattern:
        patterns: list[Pattern] = []
        if self.key_lengths is not None:
            patterns.append(KeysBefore(grid.check_lengths(self.names[0], self.key_lengths, "S")))
        if self.query_lengths is not None:
            patterns.append(QueriesBefore(grid.check_lengths(self.names[1], self.query_lengths, "L")))
        return AllOf(tuple(patterns))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prefix(Mask):
    """Made by `prefix`."""

    name = "prefix"
    hides_whole_keys = True
    length: IntegersLike

    def bind(self, grid: CallGrid) -> Pattern:
        return KeysBefore(grid.check_integers("attn_mask.length", self.length, least=0))


@dataclass(frozen=True, slots=True, eq=False)
class KeysBefore(FormulaPattern):
    """Key j may be attended to iff j < length."""

    length: Integers

    def formula(self, tile: Tile) -> Allowed:
        return tile.key_index < tile.slice_integers(self.length).values

    def uniform(self, tile: Tile) -> bool | None:
        if tile.positions is not None:  # they are not read
            return None
        return _all_before(tile.slice_integers(self.length), tile.columns)

    def key_bounds(self, tile: Tile) -> tuple[float, float]:
        return float("-inf"), tile.slice_integers(self.length).most


@dataclass(frozen=True, slots=True, eq=False)
class QueriesBefore(FormulaPattern):
    """Query i attends iff i < length, counted from the first query, whatever its position among the keys."""

    length: Integers

    def formula(self, tile: Tile) -> Allowed:
        return tile.row_index < tile.slice_integers(self.length).values

    def uniform(self, tile: Tile) -> bool | None:
        return _all_before(tile.slice_integers(self.length), tile.rows)

    def key_range(self, tile: Tile) -> range:
        return tile.columns if tile.rows.start < tile.slice_integers(self.length).most else range(0)


def _all_before(length: Integers, tokens: range) -> bool | None:
    """Return whether all tokens are before a length; None if for some. Unread it is -inf to inf."""
    return True if tokens.stop <= length.least else False if tokens.start >= length.most else None
