"""What a bias is, and how biases combine.

A bias is a small value that says what happens to the scores of the pairs. Bound to the pairs of a call it is a
term, which answers for one tile at a time, so that no L x S array is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar, cast

from sdpa_xp import checks, namespace
from sdpa_xp.masks.algebra import Allowed
from sdpa_xp.pairs import Pairs
from sdpa_xp.protocols import AnyArray, Array
from sdpa_xp.tiles import Tile


class Term(ABC):
    """A bias that is bound to the pairs of a call."""

    @abstractmethod
    def apply(self, tile: Tile, scores: Array, /) -> tuple[Array, Allowed]:
        """The scores (..., Hq, rows, columns) with the bias, and the pairs that it does not mask."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bias(ABC):
    """What is added to the scores. Biases combine with `+`, also with arrays.

    They are immutable and hold no L x S array but one that was given. `bind` and `arrays` are for the
    library.

    Examples:
        >>> from sdpa_xp import biases
        >>> biases.alibi(8) + biases.alibi([0.5] * 8)
        alibi(8) + alibi((0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5))
    """

    name: ClassVar[str] = ""
    __array_ufunc__: ClassVar[None] = None  # so that NumPy's `array + bias` asks the bias

    @abstractmethod
    def bind(self, pairs: Pairs, /) -> tuple[Term, ...]:
        """The terms of this bias over `pairs`, in their order; refuses what does not fit them."""

    def arrays(self) -> Iterator[tuple[str, object]]:
        """The arrays that the bias holds, by the names of its arguments."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Bias):
                yield from value.arrays()
            elif namespace.is_array(value):
                yield each.name, value

    def __add__(self, other: Bias | AnyArray) -> Bias:
        return Sum(self, _operand(other))

    def __radd__(self, other: AnyArray) -> Bias:
        return Sum(_operand(other), self)

    def __repr__(self) -> str:
        return checks.call_of(self, self.name)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sum(Bias):
    """One bias after the other."""

    one: Bias
    other: Bias

    def bind(self, pairs: Pairs) -> tuple[Term, ...]:
        return self.one.bind(pairs) + self.other.bind(pairs)

    def __repr__(self) -> str:
        return f"{self.one} + {self.other}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FromArray(Bias):
    """A floating array that broadcasts to (..., Hq, L, S)."""

    name = "from_array"
    array: AnyArray
    argument: str = field(default="bias", repr=False)
    """What messages call it."""

    def bind(self, pairs: Pairs) -> tuple[Term, ...]:
        array = cast(Array, self.array)
        checks.floating(pairs.function, self.argument, array)
        if pairs.input_dtype is not None:
            checks.added_dtype(pairs.function, self.argument, array, pairs.input_dtype, pairs.dtype)
        checks.broadcasts(pairs.function, self.argument, array.shape, pairs.shape, "(..., Hq, L, S)")
        return (Given(pairs.cut(array, 3)),)


def as_bias(function: str, name: str, value: object) -> Bias:
    """A bias as it is; an array as what is added."""
    return value if isinstance(value, Bias) else FromArray(checks.plain_array(function, name, value), name)


def _operand(value: object) -> Bias:
    checks.operand("biases", "bias", value, Bias, "a bias or a floating array")
    return as_bias("biases", "bias", value)


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


def is_masked(scores: Array) -> Array:
    """Where a score or a bias is -inf; a NaN is not."""
    return scores <= float("-inf")
