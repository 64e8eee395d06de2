"""What a mask is, and how masks combine.

A mask is a small value that says which pairs may attend. Bound to the pairs of a call it is a pattern, which
answers for one tile at a time, so that no L x S array is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from sdpa_xp import checks
from sdpa_xp._libraries import is_traced
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.pairs import Pairs
from sdpa_xp.tiles import Tile
from sdpa_xp.values import Value

Allowed: TypeAlias = bool | Array
"""True: every pair of the tile may attend. False: none may. An array: those where it is True."""
DEEPEST = 150
"""How many operators may be inside each other. A call nests a few functions for each; Python allows 1000."""


class Pattern(ABC):
    """A mask that is bound to the pairs of a call."""

    @abstractmethod
    def on(self, tile: Tile, /) -> Allowed:
        """Which pairs of the tile may attend; an array broadcasts to (..., Hq, rows, columns)."""

    def reach(self, tile: Tile, /) -> range:
        """A part of the tile's keys, in one piece, outside of which its queries attend none."""
        return tile.columns

    def reached_by(self, tile: Tile, /) -> range:
        """A part of the tile's queries, in one piece, outside of which none attends any of its keys."""
        return tile.rows


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mask(Value, ABC):
    """Which pairs of queries and keys may attend.

    The functions of `sdpa_xp.masks` make masks, and `attn_mask` takes them. They combine with `&`, `|` and
    `~`, also with boolean arrays. They are immutable and hold no L x S array but one that was given.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.causal() & ~masks.prefix(2)
        causal() & ~prefix(2)
    """

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that an operator joined to this one."""
        return ()

    @abstractmethod
    def bind(self, pairs: Pairs, /) -> Pattern:
        """The pattern of this mask over `pairs`; refuses what does not fit them."""

    def __and__(self, other: Mask | AnyArray) -> Mask:
        return _joined(And, self, as_mask("masks", "mask", other))

    def __rand__(self, other: AnyArray) -> Mask:
        return _joined(And, as_mask("masks", "mask", other), self)

    def __or__(self, other: Mask | AnyArray) -> Mask:
        return _joined(Or, self, as_mask("masks", "mask", other))

    def __ror__(self, other: AnyArray) -> Mask:
        return _joined(Or, as_mask("masks", "mask", other), self)

    def __invert__(self) -> Mask:
        return self.masks[0] if isinstance(self, Not) else Not((self,))

    def __bool__(self) -> bool:
        rule, hint = "a mask is neither true nor false", "Combine masks with `&`, `|` and `~`."
        raise TypeError(checks.message("masks", rule, {"mask": self}, hint))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Combined(Mask, ABC):
    """Masks joined by one operator; a chain of the same operator is one value, so that it nests no deeper."""

    masks: tuple[Mask, ...]
    depth: int = field(init=False, repr=False)
    """How many operators are inside each other."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def __post_init__(self) -> None:
        depth = 1
        for mask in self.masks:  # a loop, since torch.compile traces no `max` of a generator
            depth = max(depth, 1 + mask.depth) if isinstance(mask, Combined) else depth
        object.__setattr__(self, "depth", depth)
        if depth > DEEPEST:
            rule = f"masks must be nested at most {DEEPEST} operators deep"
            hint = "A chain of one operator counts once; `masks.from_function` computes anything else."
            raise ValueError(checks.message("masks", rule, {"depth": depth}, hint))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class And(Combined):
    """The pairs that every mask lets attend."""

    name = "&"

    def bind(self, pairs: Pairs) -> Pattern:
        return AllOf(tuple(mask.bind(pairs) for mask in self.parts))

    def __repr__(self) -> str:
        return " & ".join(f"({mask})" if isinstance(mask, Or) else str(mask) for mask in self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Or(Combined):
    """The pairs that one of the masks lets attend."""

    name = "|"

    def bind(self, pairs: Pairs) -> Pattern:
        return AnyOf(tuple(mask.bind(pairs) for mask in self.parts))

    def __repr__(self) -> str:
        return " | ".join(f"({mask})" if isinstance(mask, And) else str(mask) for mask in self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Not(Combined):
    """The pairs that the mask does not let attend."""

    name = "~"

    def bind(self, pairs: Pairs) -> Pattern:
        return NoneOf(self.parts[0].bind(pairs))

    def __repr__(self) -> str:
        (mask,) = self.parts
        return f"~({mask})" if isinstance(mask, And | Or) else f"~{mask}"


def _joined(operator: type[And | Or], *masks: Mask) -> Mask:
    """Join masks by `&` or `|`; what the same operator joined before becomes part of the chain."""
    return operator(sum((mask.parts if isinstance(mask, operator) else (mask,) for mask in masks), ()))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FromArray(Mask):
    """The pairs where a boolean array is True."""

    name = "from_array"
    boolean: AnyArray
    argument: str = field(default="attn_mask", repr=False)
    """What messages call it."""

    def bind(self, pairs: Pairs) -> Pattern:
        array = cast(Array, self.boolean)
        checks.boolean(pairs.function, self.argument, array)
        checks.broadcasts(pairs.function, self.argument, array.shape, pairs.shape, "(..., Hq, L, S)")
        return Given(pairs.cut(array, 3))


def as_mask(function: str, name: str, value: object, argument: str = "attn_mask") -> Mask:
    """A mask as it is; an array as the mask of its True elements, which is called `argument` from then on."""
    if isinstance(value, Mask):
        return value
    checks.operand(function, name, value, "a mask or a boolean array")
    return FromArray(checks.plain_array(function, name, value), argument)


@dataclass(frozen=True, slots=True)
class AllOf(Pattern):
    """A pair may attend iff each pattern lets it; without patterns every pair may."""

    patterns: tuple[Pattern, ...] = ()

    def on(self, tile: Tile) -> Allowed:
        allowed: Allowed = True
        for pattern in self.patterns:
            allowed = both(allowed, pattern.on(tile))
            if allowed is False:
                break
        return allowed

    def reach(self, tile: Tile) -> range:
        return _common([tile.columns, *(pattern.reach(tile) for pattern in self.patterns)])

    def reached_by(self, tile: Tile) -> range:
        return _common([tile.rows, *(pattern.reached_by(tile) for pattern in self.patterns)])


@dataclass(frozen=True, slots=True)
class AnyOf(Pattern):
    """A pair may attend iff one of the patterns lets it."""

    patterns: tuple[Pattern, ...]

    def on(self, tile: Tile) -> Allowed:
        allowed: Allowed = False
        for pattern in self.patterns:
            allowed = either(allowed, pattern.on(tile))
            if allowed is True:
                break
        return allowed

    def reach(self, tile: Tile) -> range:
        return _hull([pattern.reach(tile) for pattern in self.patterns])

    def reached_by(self, tile: Tile) -> range:
        return _hull([pattern.reached_by(tile) for pattern in self.patterns])


@dataclass(frozen=True, slots=True)
class NoneOf(Pattern):
    """A pair may attend iff the pattern does not let it."""

    pattern: Pattern

    def on(self, tile: Tile) -> Allowed:
        allowed = self.pattern.on(tile)
        return not allowed if isinstance(allowed, bool) else ~allowed


@dataclass(frozen=True, slots=True, eq=False)
class Given(Pattern):
    """Where an array that broadcasts to (..., Hq, L, S) is True."""

    array: Array

    def on(self, tile: Tile) -> Allowed:
        return settled(tile, tile.cut(self.array))


def _common(ranges: list[range]) -> range:
    return range(max(each.start for each in ranges), min(each.stop for each in ranges))


def _hull(ranges: list[range]) -> range:
    """The smallest range that holds each of `ranges`."""
    some = [each for each in ranges if each]
    return range(min(each.start for each in some), max(each.stop for each in some)) if some else range(0)


def settled(tile: Tile, allowed: Array) -> Allowed:
    """True or False where `allowed` says the same of every pair; a traced array cannot be looked at."""
    xp = tile.pairs.xp
    if tile.pairs.traced or is_traced(allowed):
        return allowed
    if not bool(xp.any(allowed)):
        return False
    return True if bool(xp.all(allowed)) else allowed


def both(one: Allowed, other: Allowed) -> Allowed:
    """The pairs that both answers let attend."""
    if one is False or other is False:
        return False
    if one is True:
        return other
    if other is True:
        return one
    return one & other


def either(one: Allowed, other: Allowed) -> Allowed:
    """The pairs that one of the answers lets attend."""
    if one is True or other is True:
        return True
    if one is False:
        return other
    if other is False:
        return one
    return one | other
