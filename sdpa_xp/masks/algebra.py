"""What a mask is, and how masks combine.

A mask is a lightweight object that says which pairs may attend. Bound to the grid of a call it becomes a
pattern, which answers for one tile at a time, so that no L x S array is built.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from .._checks.arrays import check_plain_array
from .._checks.score_arrays import check_boolean, check_operand, frozen
from .._libraries import is_array, library_of
from .._libraries.protocols import AnyArray, Array
from .._tiles import Allowed, Tile, TilePlace, both, collapse_uniform, either
from .._tiles.grid import CallGrid, ScoreGrid
from .._tiles.modifier import ScoreModifier
from ..errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from .._tiles.key_lists import Patches
    from .._tiles.on_device import BlockBounds


DEEPEST = 150
"""The largest depth of nested operators. Each costs a few nested Python calls, of which Python allows 1000."""


class Pattern(ABC):
    """A mask that is bound to the grid of a call."""

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {}
    """The axes of the scores along which the axes of an array lie, if it does not broadcast to the scores."""

    @abstractmethod
    def allowed_in(self, tile: Tile, /) -> Allowed:
        """Return which pairs of the tile may attend; an array broadcasts to (..., Hq, rows, columns)."""

    @property
    def is_shared(self) -> bool:
        """Whether all batch entries and heads have the same answers, few of them arrays: tasks share these."""
        return False

    def uniform(self, _tile: Tile, /) -> bool | None:
        """Return the answer if it is known to be the same for every pair; None if only `allowed_in` can tell.

        No array of the size of the tile is built for it.
        """
        return None

    def key_bounds(self, _tile: Tile, /) -> tuple[float, float]:
        """Return the first key that some query of the tile may attend, and the last + 1; infinite if unknown.

        They follow from the numbers of the mask, and may be values of a graph, which holds no `range` of them.
        """
        return float("-inf"), float("inf")

    def key_range(self, tile: Tile, /) -> range:
        """Return one range of the tile's keys outside of which no query attends; tiles outside are skipped."""
        start, stop = self.key_bounds(tile)
        return range(int(max(tile.columns.start, start)), int(min(tile.columns.stop, stop)))

    def query_range(self, tile: Tile, /) -> range:
        """Return one range of the tile's queries outside of which none attends to a key of the tile."""
        return tile.rows

    def patches(self, _grid: ScoreGrid, _others: tuple[Pattern, ...] = (), /) -> Patches | None:
        """Return blocks of queries that each read a list of keys; None if ranges of keys serve as well.

        A pair has to be in the `others` too.
        """
        return None


class FormulaPattern(Pattern, ABC):
    """A pattern that computes its formula for the tiles in which `uniform` does not know the answer."""

    def allowed_in(self, tile: Tile) -> Allowed:
        answer = self.uniform(tile)
        return self.formula(tile) if answer is None else answer

    @abstractmethod
    def formula(self, tile: Tile, /) -> Allowed:
        """Return which pairs of the tile may attend, an array that broadcasts to (..., Hq, rows, columns)."""


@dataclass(frozen=True, slots=True)
class Joined(Pattern, ABC):
    """Patterns that one operator joins."""

    patterns: tuple[Pattern, ...] = ()

    @property
    def is_shared(self) -> bool:
        return all(pattern.is_shared for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class AllOf(Joined):
    """A pair may attend iff it is in every pattern; without patterns every pair may."""

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed: Allowed = True
        for pattern in self.patterns:
            allowed = both(allowed, pattern.allowed_in(tile))
            if allowed is False:  # the other patterns need not be computed
                break
        return allowed

    def uniform(self, tile: Tile) -> bool | None:
        answers = [pattern.uniform(tile) for pattern in self.patterns]
        # Two patterns may each have pairs in a tile, and no key in common.
        if False in answers or not self.key_range(tile):
            return False
        return None if None in answers else True

    def key_range(self, tile: Tile) -> range:
        return _intersection([tile.columns, *(pattern.key_range(tile) for pattern in self.patterns)])

    def query_range(self, tile: Tile) -> range:
        return _intersection([tile.rows, *(pattern.query_range(tile) for pattern in self.patterns)])

    def patches(self, grid: ScoreGrid, others: tuple[Pattern, ...] = ()) -> Patches | None:
        for n, pattern in enumerate(self.patterns):
            rest = self.patterns[:n] + self.patterns[n + 1 :] + others
            if (patches := pattern.patches(grid, rest)) is not None:
                return patches
        return None


@dataclass(frozen=True, slots=True)
class AnyOf(Joined):
    """A pair may attend iff it is in one of the patterns."""

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed: Allowed = False
        for pattern in self.patterns:
            allowed = either(allowed, pattern.allowed_in(tile))
            if allowed is True:
                break
        return allowed

    def uniform(self, tile: Tile) -> bool | None:
        answers = [pattern.uniform(tile) for pattern in self.patterns]
        return True if True in answers else None if None in answers else False

    # One range holds all: what lies between two of them is computed, and masked.

    def key_range(self, tile: Tile) -> range:
        return _hull([pattern.key_range(tile) for pattern in self.patterns])

    def query_range(self, tile: Tile) -> range:
        return _hull([pattern.query_range(tile) for pattern in self.patterns])


@dataclass(frozen=True, slots=True)
class NoneOf(Pattern):
    """A pair may attend iff it is not in the pattern."""

    pattern: Pattern

    # It has no `key_range`: the complement of one range of keys is two.

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed = self.pattern.allowed_in(tile)
        return not allowed if isinstance(allowed, bool) else ~allowed

    @property
    def is_shared(self) -> bool:
        return self.pattern.is_shared

    def uniform(self, tile: Tile) -> bool | None:
        answer = self.pattern.uniform(tile)
        return None if answer is None else not answer


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPattern(Pattern):
    """A pair may attend iff an array, which broadcasts to (..., Hq, L, S), is True there."""

    array: Array
    bounds: BlockBounds | None = None
    """1 where all elements of a block are True, 0 where none is; None if a device was not asked."""

    def allowed_in(self, tile: Tile) -> Allowed:
        if self.bounds is not None and (answer := self.uniform(tile)) is not None:
            return answer
        return collapse_uniform(tile, tile.slice(self.array))

    def uniform(self, tile: Tile) -> bool | None:
        if self.bounds is not None:
            least, most = self.bounds.within(tile.rows, tile.columns)
            return bool(least) if least == most else None
        answer = self.allowed_in(tile) if tile.grid.may_read(self.array) else None
        return answer if isinstance(answer, bool) else None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPattern(Pattern):
    """A pattern that is asked about another tile."""

    # Only a device may know the place, and positions are not read: it has no `uniform`, and bounds no range.

    place: TilePlace
    pattern: Pattern

    def allowed_in(self, tile: Tile) -> Allowed:
        return self.pattern.allowed_in(self.place.placed_tile(tile))


def _intersection(ranges: list[range]) -> range:
    return range(max(r.start for r in ranges), min(r.stop for r in ranges))


def _hull(ranges: list[range]) -> range:
    """Return the smallest range that contains all of `ranges`."""
    nonempty = [r for r in ranges if r]
    return range(min(r.start for r in nonempty), max(r.stop for r in nonempty)) if nonempty else range(0)


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
