"""What a mask is, and how masks combine.

A mask is a lightweight object that says which pairs may attend. Bound to the grid of a call it becomes a
pattern (`patterns.py`).

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from .._checks.arrays import check_plain_array
from .._checks.integers import frozen
from .._checks.score_arrays import check_boolean, check_operand
from .._libraries import is_array, library_of
from .._libraries.protocols import AnyArray, Array
from .._tiles.grid import CallGrid
from .._tiles.modifier import ScoreModifier
from ..errors import ArgumentTypeError, ArgumentValueError
from .patterns import AllOf, AnyOf, ArrayPattern, NoneOf, Pattern

DEEPEST = 150
"""The largest depth of nested operators. Each costs a few nested Python calls, of which Python allows 1000."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mask(ScoreModifier, ABC):
    """A mask: which query may attend to which key.

    The functions of `sdpa_xp.masks` return masks. They are immutable: arrays in them are copied.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.causal() & ~masks.prefix(2)
        causal() & ~prefix(2)
    """

    @property
    def hides_whole_keys(self) -> bool:
        """Whether it hides a key from all queries and heads of a batch entry or from none, so that a graph may
        leave the key out."""
        return False

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows."""
        from .._display import sampled_mask  # only notebooks need it

        return sampled_mask(self, lambda tile: self.bind(tile.grid).allowed_in(tile))

    def _key_of_array(self, array: Any) -> object:
        return library_of(array).frozen_key(array)

    @abstractmethod
    def bind(self, grid: CallGrid, /) -> Pattern:
        """Check the arguments against `grid`, and return the pattern."""

    def __and__(self, other: Mask | AnyArray) -> Mask:
        return _joined(And, self, as_operand(other))

    def __rand__(self, other: AnyArray) -> Mask:
        return _joined(And, as_operand(other), self)

    def __or__(self, other: Mask | AnyArray) -> Mask:
        return _joined(Or, self, as_operand(other))

    def __ror__(self, other: AnyArray) -> Mask:
        return _joined(Or, as_operand(other), self)

    def __invert__(self) -> Mask:
        return self.parts[0] if isinstance(self, Not) else Not((self,))  # ~~mask is the mask

    def __add__(self, other: object) -> NoReturn:
        rule, hint = "masks cannot be added", "Combine masks with `&`, `|` and `~`."
        raise ArgumentTypeError("masks", rule, {"mask": self}, hint)

    __radd__ = __add__

    def __bool__(self) -> bool:
        rule, hint = "a mask is neither true nor false", "Combine masks with `&`, `|` and `~`."
        raise ArgumentTypeError("masks", rule, {"mask": self}, hint)


class FormulaMask(Mask, Pattern):
    """A mask that has nothing to bind to a call, so it is its own pattern."""

    __slots__ = ()

    def bind(self, _grid: CallGrid) -> Pattern:
        return self


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Combined(Mask, ABC):
    """Masks joined by one operator. A chain of one operator is one object, so that it is not nested deeper."""

    parts: tuple[Mask, ...] = field()  # or the property of the base class would be its default
    depth: int = field(init=False, repr=False)
    """The depth of nested operators."""

    def __post_init__(self) -> None:
        depth = 1
        for mask in self.parts:  # a loop, since torch.compile traces no `max` of a generator
            depth = max(depth, 1 + mask.depth) if isinstance(mask, Combined) else depth
        object.__setattr__(self, "depth", depth)  # frozen: no other way to set a field that follows from others
        if depth > DEEPEST:
            rule = f"masks must be nested at most {DEEPEST} operators deep"
            hint = "A chain of one operator counts once; `masks.from_function` computes anything else."
            raise ArgumentValueError("masks", rule, {"depth": depth}, hint)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class And(Combined):
    """The pairs that are in every mask."""

    name = "&"

    def bind(self, grid: CallGrid) -> Pattern:
        return AllOf(tuple(mask.bind(grid) for mask in self.parts))

    def __repr__(self) -> str:
        return " & ".join(f"({mask})" if isinstance(mask, Or) else str(mask) for mask in self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Or(Combined):
    """The pairs that are in one of the masks or in several."""

    name = "|"

    def bind(self, grid: CallGrid) -> Pattern:
        return AnyOf(tuple(mask.bind(grid) for mask in self.parts))

    def __repr__(self) -> str:
        return " | ".join(f"({mask})" if isinstance(mask, And) else str(mask) for mask in self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Not(Combined):
    """The pairs that are not in the mask."""

    name = "~"

    def bind(self, grid: CallGrid) -> Pattern:
        return NoneOf(self.parts[0].bind(grid))

    def __repr__(self) -> str:
        (mask,) = self.parts
        return f"~({mask})" if isinstance(mask, And | Or) else f"~{mask}"


def _joined(operator: type[And | Or], *masks: Mask) -> Mask:
    """Join masks by `&` or `|`; masks that the same operator joined before become part of the chain."""
    return operator(sum((mask.parts if isinstance(mask, operator) else (mask,) for mask in masks), ()))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ArrayMask(Mask):
    """The pairs where a boolean array is True."""

    name = "from_array"
    counts = "slots"
    ignores_heads = True
    boolean: AnyArray
    argument: str = field(default="attn_mask", repr=False)
    """The name of the array in messages."""

    @property
    def hides_whole_keys(self) -> bool:
        return all(length == 1 for length in cast(Array, self.boolean).shape[-3:-1])  # (B, 1, 1, S) or (S,)

    def bind(self, grid: CallGrid) -> Pattern:
        array = cast(Array, self.boolean)
        check_boolean(grid.function, self.argument, array)
        array = grid.check_scores_shape(self.argument, array)
        return ArrayPattern(array, grid.block_bounds(array))


def as_mask(function: str, name: str, value: object, argument: str = "attn_mask") -> Mask:
    """Convert a boolean array to a Mask, called `argument` in messages; masks pass through unchanged."""
    if isinstance(value, Mask):
        return value
    check_operand(function, name, value, "a mask or a boolean array")
    return ArrayMask(check_plain_array(function, name, value), argument)


def as_operand(value: object) -> Mask:
    """Convert what an operator joins to a mask; an array is copied, since the result outlives the operator."""
    return as_mask("masks", "mask", frozen(value) if is_array(value) else value)
