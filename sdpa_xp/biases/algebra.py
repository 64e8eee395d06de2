"""What a bias is, and how biases combine.

A bias is a small value that says what happens to the scores of the pairs. Bound to the pairs of a call it is a
term, which answers for one tile at a time, so that no L x S array is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import cast

from sdpa_xp import checks
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.masks.algebra import Allowed
from sdpa_xp.pairs import Pairs
from sdpa_xp.tiles import Tile
from sdpa_xp.totals import Learned
from sdpa_xp.values import Value


class Term(ABC):
    """A bias that is bound to the pairs of a call."""

    @abstractmethod
    def apply(self, tile: Tile, scores: Array, /) -> tuple[Array, Allowed]:
        """The scores (..., Hq, rows, columns) with the bias, and the pairs that it does not mask."""

    @property
    def learned(self) -> Learned | None:
        """What the caller gave as a floating array, for `gradient`; None where it is no array."""
        return None

    def gradient(self, _tile: Tile, _scores: Array, _gradient: Array, /) -> Array | None:
        """What a tile adds to the gradient of what is `learned`, from the `gradient` of its `scores`.

        That of the scores before the bias is the same: a term that does more than to add is refused.
        """
        return None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bias(Value, ABC):
    """What is added to the scores. Biases combine with `+`, also with arrays.

    The functions of `sdpa_xp.biases` make them, and `bias` takes them. They are immutable and hold no L x S
    array but one that was given.

    Examples:
        >>> from sdpa_xp import biases
        >>> biases.alibi(8) + biases.alibi([0.5] * 8)
        alibi(8) + alibi((0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5))
    """

    @property
    def parts(self) -> tuple[Bias, ...]:
        """The biases that `+` joined to this one."""
        return ()

    @abstractmethod
    def bind(self, pairs: Pairs, /) -> tuple[Term, ...]:
        """The terms of this bias over `pairs`, in their order; refuses what does not fit them."""

    def __add__(self, other: Bias | AnyArray) -> Bias:
        return _summed(self, as_bias("biases", "bias", other))

    def __radd__(self, other: AnyArray) -> Bias:
        return _summed(as_bias("biases", "bias", other), self)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sum(Bias):
    """One bias after the other."""

    name = "+"
    biases: tuple[Bias, ...]

    @property
    def parts(self) -> tuple[Bias, ...]:
        return self.biases

    def bind(self, pairs: Pairs) -> tuple[Term, ...]:
        return tuple(term for bias in self.parts for term in bias.bind(pairs))

    def __repr__(self) -> str:
        return " + ".join(map(str, self.parts))


def _summed(*biases: Bias) -> Bias:
    """Join biases by `+`; a sum among them becomes part of the chain, so that none is inside another."""
    return Sum(sum((bias.parts if isinstance(bias, Sum) else (bias,) for bias in biases), ()))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FromArray(Bias):
    """A floating array that broadcasts to (..., Hq, L, S)."""

    name = "from_array"
    array: AnyArray
    argument: str = field(default="bias", repr=False)
    """What messages call it."""

    def bind(self, pairs: Pairs) -> tuple[Term, ...]:
        array = cast(Array, self.array)
        pairs.fits(self.argument, array)
        checks.broadcasts(pairs.function, self.argument, array.shape, pairs.shape, "(..., Hq, L, S)")
        return (Given(pairs.cut(array, 3)),)


def as_bias(function: str, name: str, value: object) -> Bias:
    """A bias as it is; an array as what is added."""
    if isinstance(value, Bias):
        return value
    checks.operand(function, name, value, "a bias or a floating array")
    return FromArray(checks.plain_array(function, name, value), name)


class Added(Term):
    """A term that adds something to the scores."""

    @abstractmethod
    def added(self, tile: Tile, /) -> Array:
        """What is added, in the accumulation dtype; -inf masks its pair."""

    def apply(self, tile: Tile, scores: Array) -> tuple[Array, Allowed]:
        added = self.added(tile)
        return scores + added, ~is_masked(added)


@dataclass(frozen=True, slots=True, eq=False)
class Given(Added):
    """An array that broadcasts to (..., Hq, L, S)."""

    array: Array

    def added(self, tile: Tile) -> Array:
        return tile.pairs.xp.astype(tile.cut(self.array), tile.pairs.dtype, copy=False)

    @property
    def learned(self) -> Learned:
        shape = (*[1] * (3 - self.array.ndim), *self.array.shape)
        return Learned(shape, ("rows" if shape[-2] > 1 else None, "columns" if shape[-1] > 1 else None))

    def gradient(self, _tile: Tile, _scores: Array, gradient: Array) -> Array:
        return gradient


def is_masked(scores: Array) -> Array:
    """Where a score or a bias is -inf; a NaN is not."""
    return scores <= float("-inf")
