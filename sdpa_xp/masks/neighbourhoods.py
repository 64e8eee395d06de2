"""Masks of places in space: a token of an image or of a volume attends to the tokens around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from .._checks.integers import as_lists, exceeds
from .._checks.keywords import check_choice, check_flag, check_integer, explains_keywords
from .._libraries.protocols import Array, Namespace
from .._tiles import Allowed, Tile, both, either, tuning
from .._tiles.grid import CallGrid, ScoreGrid
from .._tiles.key_lists import Patches
from ..errors import ArgumentTypeError, ArgumentValueError
from .algebra import FormulaPattern, Mask, Pattern
from .patches import CutAxis, cut_space

T = TypeVar("T")
NAME = "neighbourhood"


@explains_keywords
def neighbourhood(
    shape: Sequence[int],
    radius: int | Sequence[int] | None = None,
    *,
    window: int | Sequence[int] | None = None,
    dilation: int | Sequence[int] = 1,
    periodic: bool | Sequence[bool] = False,
    causal: bool | Sequence[bool] = False,
    borders: Literal["shifted", "cut"] = "shifted",
    prefix_tokens: int = 0,
) -> Mask:
    """Return a mask of neighbours in space: a token attends to those around it, in 1, 2 or 3 dimensions.

        neighbourhood((5,), 1)   borders="cut"   periodic=True   causal=True   prefix_tokens=1
            1 1 1 0 0            1 1 0 0 0       1 1 0 0 1       1 0 0 0 0     1 1 1 1 1 1
            1 1 1 0 0            1 1 1 0 0       1 1 1 0 0       1 1 0 0 0     1 1 1 1 0 0
            0 1 1 1 0            0 1 1 1 0       0 1 1 1 0       1 1 1 0 0     1 1 1 1 0 0
            0 0 1 1 1            0 0 1 1 1       0 0 1 1 1       0 1 1 1 0     1 0 1 1 1 0
            0 0 1 1 1            0 0 0 1 1       1 0 0 1 1       0 0 1 1 1     1 0 0 1 1 1
                                                                               1 0 0 1 1 1

    Args:
        shape: The number of places along each axis, such as (height, width) of an image. The tokens lie in C
            order: the last axis changes fastest. L and S are at most the product plus `prefix_tokens`.
        radius: How far a token sees on either side: 3 is a window of 7. One number, or one for each axis.
        window: Instead of `radius`, the number of neighbours along an axis with the token itself, likewise. If
            it is even, one more lies before the token than behind it, as with NATTEN's `kernel_size`.
        dilation: The distance between neighbours, at least 1, likewise.
        periodic: Whether the last place of an axis lies beside its first, as longitudes do, likewise.
        causal: Whether the window of an axis ends at the token, as with NATTEN's `is_causal`, likewise. Such a
            window is never moved, and holds fewer places at the start of the axis.
        borders: At the ends of other axes that are not periodic, "shifted" moves the window inwards, as in
            NATTEN; "cut" leaves out what would lie outside.
        prefix_tokens: The number of tokens in front of the places, such as a class token and registers, which
            attend to all tokens, and to which all attend.

    Returns:
        The mask. Tiles without neighbours are skipped.

    Raises:
        TypeError: An argument is not of the types above.
        ValueError: `shape` has not 1 to 3 axes, an argument has not one element for each axis, there are more
            tokens than places, `radius` and `window` are both passed or both missing, an axis is causal and
            periodic, or window * dilation is above the length of an axis that is neither cut nor causal.

    Examples:
        >>> from sdpa_xp import masks
        >>> mask = masks.neighbourhood((4, 4), 1)
        >>> masks.to_array(mask, (16, 16))[5].reshape(4, 4).astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 0],
               [0, 0, 0, 0]])

    References:
        Hassani et al., "Neighborhood Attention Transformer", arXiv 2204.07143, section 3.1; with dilation,
        Hassani and Shi, arXiv 2209.15001, section 3.1.
    """
    shape = as_lists(shape)
    if not isinstance(shape, tuple | list):
        rule = "`shape` must be the number of places along each axis, such as (height, width)"
        raise ArgumentTypeError(NAME, rule, {"shape": repr(shape)})
    lengths = tuple(check_integer(NAME, f"shape[{axis}]", n, least=1) for axis, n in enumerate(shape))
    if not 1 <= len(lengths) <= 3:
        raise ArgumentValueError(NAME, "`shape` must have 1 to 3 axes", {"shape": shape})
    check_choice(NAME, "borders", borders, ("shifted", "cut"))
    if (radius is None) == (window is None):
        rule = "`radius` or `window` must be passed, and not both"
        raise ArgumentValueError(NAME, rule, {"radius": radius, "window": window})
    if window is None:
        radii = _of_axes("radius", cast("int | Sequence[int]", radius), len(lengths))
        windows = [2 * check_integer(NAME, "radius", n, least=0) + 1 for n in radii]
    else:
        windows = [check_integer(NAME, "window", n, least=1) for n in _of_axes("window", window, len(lengths))]
    steps = [check_integer(NAME, "dilation", n, least=1) for n in _of_axes("dilation", dilation, len(lengths))]
    around, ordered = (
        [check_flag(NAME, name, flag) for flag in _of_axes(name, flags, len(lengths))]
        for name, flags in (("periodic", periodic), ("causal", causal))
    )
    count = check_integer(NAME, "prefix_tokens", prefix_tokens, least=0)
    if any(map(all, zip(around, ordered, strict=True))):
        rule = "`causal` must be False along a periodic axis, where no place is the first"
        raise ArgumentValueError(NAME, rule, {"causal": causal, "periodic": periodic})
    of_axes = _shortest(windows), _shortest(steps), _shortest(around), _shortest(ordered)
    mask = Neighbourhood(lengths, *of_axes, borders, count)
    for axis in mask.axes:
        if axis.kind != "cut" and axis.window * axis.step > axis.length:
            rule = "`shape` must have room for the neighbours of a token: window * dilation places"
            got = {"shape": shape, "window": mask.window, "dilation": mask.dilation}
            is_shifted = axis.kind == "shifted"
            hint = 'borders="cut" leaves out neighbours that lie outside.' if is_shifted else ""
            raise ArgumentValueError(NAME, rule, got, hint)
    return mask


def _of_axes(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """Return one value for each axis."""
    value = as_lists(value)
    if not isinstance(value, tuple | list):
        return (cast(T, value),) * count
    if len(value) != count:
        rule = f"`{name}` must have one element for each axis of `shape`"
        raise ArgumentValueError(NAME, rule, {name: value, "axes": count})
    return value


def _shortest(values: Sequence[T]) -> T | tuple[T, ...]:
    """Return one value if it is the same for all axes, so that equal masks have equal arguments."""
    return values[0] if len({*values}) == 1 else (*values,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Neighbourhood(Mask, FormulaPattern):
    """Made by `neighbourhood`."""

    name = NAME
    counts = "slots"
    ignores_heads = True
    is_shared = True
    shape: tuple[int, ...]
    window: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    periodic: bool | tuple[bool, ...] = False
    causal: bool | tuple[bool, ...] = False
    borders: Literal["shifted", "cut"] = "shifted"
    prefix_tokens: int = 0

    def bind(self, grid: CallGrid) -> Pattern:
        places = math.prod(self.shape) + self.prefix_tokens
        for letter, count in zip("LS", grid.lengths("attn_mask.shape"), strict=True):
            if exceeds(grid.function, "attn_mask.shape", count, places):
                rule = f"`attn_mask.shape` must have a place for each {'key' if letter == 'S' else 'query'}"
                got = {"attn_mask.shape": self.shape, "places": places, letter: count}
                raise ArgumentValueError(grid.function, rule, got)
        return self

    @property
    def axes(self) -> Iterator[Axis]:
        inner, options = math.prod(self.shape), (self.window, self.dilation, self.periodic, self.causal)
        of_axes = (x if isinstance(x, tuple) else (x,) * len(self.shape) for x in options)
        for length, window, step, around, ordered in zip(self.shape, *of_axes, strict=True):
            inner //= length
            left = window - 1 if ordered else window // 2
            kind = "periodic" if around else "cut" if ordered else self.borders
            yield Axis(length, left, window - 1 - left, step, kind, inner)

    def patches(self, grid: ScoreGrid, others: tuple[Pattern, ...] = ()) -> Patches | None:
        # Lists of keys are of a whole space: a call of a cache, or of some entries, reads ranges. So does one
        # with tokens before the places, which attend to more keys than a list has.
        is_whole = grid.placement is None and grid.queries == grid.keys == math.prod(self.shape)
        if others or not is_whole or grid.position.least or grid.part is not None or self.prefix_tokens:
            return None
        axes = [
            CutAxis(axis.length, axis.left, axis.right, axis.step, axis.kind == "periodic")
            for axis in self.axes
        ]
        size = tuning.ONE_CORE_PATCH if grid.access.uses_our_threads else tuning.ALL_CORES_PATCH
        return cut_space(axes, size, self)

    def formula(self, tile: Tile) -> Allowed:
        allowed: Allowed = True
        query, key, before = tile.query_index, tile.key_index, self.prefix_tokens
        for axis in self.axes:
            if axis.has_all:
                continue
            of_queries, of_keys = (axis.places(index - before if before else index) for index in (query, key))
            allowed = both(allowed, axis.allowed(tile.grid.xp, of_queries, of_keys))
        return either(allowed, (query < before) | (key < before)) if before else allowed

    def uniform(self, tile: Tile) -> bool | None:
        return None if self.key_range(tile) else False

    def key_range(self, tile: Tile) -> range:
        if tile.positions is not None:
            return tile.columns
        return self._near(tile.first_position, tile.last_position, tile.columns, widest=False)

    def query_range(self, tile: Tile) -> range:
        _, position, most = tile.grid.position
        if tile.positions is not None or position != most:
            return tile.rows
        rows = range(tile.rows.start + position, tile.rows.stop + position)
        near = self._near(tile.columns.start, tile.columns.stop - 1, rows, widest=True)
        return range(near.start - position, near.stop - position)

    def _near(self, first: int, last: int, among: range, *, widest: bool) -> range:
        """Return those `among` tokens that lie near the tokens from `first` to `last` along the first axis."""
        axis = next(self.axes)  # it changes slowest: its neighbours are one range of tokens
        before = self.prefix_tokens
        if first < before:
            return among
        places = ((token - before) // axis.inner for token in (first, last))
        start, stop = (place * axis.inner + before for place in axis.near(*places, widest=widest))
        near = range(max(among.start, start), min(among.stop, stop))
        if among.start >= before:
            return near
        return range(among.start, max(near.stop if near else 0, min(among.stop, before)))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the places: which of its places are neighbours."""

    length: int
    left: int
    """The number of neighbours before a place."""
    right: int
    step: int
    kind: Literal["shifted", "cut", "periodic"]
    inner: int
    """The number of tokens for each place of the axis."""

    @property
    def window(self) -> int:
        """The number of neighbours along the axis."""
        return self.left + 1 + self.right

    @property
    def has_all(self) -> bool:
        """Whether all places are neighbours of each other."""
        return self.step == 1 and (
            min(self.left, self.right) >= self.length - 1 or (self.kind != "cut" and self.window == self.length)
        )

    def places(self, index: Array) -> Array:
        """Return the place of each token."""
        place = index if self.inner == 1 else index // self.inner
        return place % self.length

    def allowed(self, xp: Namespace, query: Array, key: Array) -> Array:
        """Return whether a place of the axis is a neighbour of another one."""
        if self.kind == "periodic":
            ahead, behind = (key - query) % self.length, (query - key) % self.length
            return self._within_reach(ahead, self.right) | self._within_reach(behind, self.left)
        # All neighbours of a place have its remainder when divided by `step`: they are one group.
        number, other, last = query, key, cast(Array, self.length - self.window)
        if self.step > 1:
            number, other = query // self.step, key // self.step
            last = (query % self.step * -1 + self.length - 1) // self.step + 1 - self.window  # of its group
        first = number - self.left
        if self.kind == "shifted":
            first = xp.where(first < 0, first * 0, first)  # zeros in a shape that a graph need not know
            first = xp.where(first > last, last, first)
        near = (other >= first) & (other < first + self.window)
        return near & (key % self.step == query % self.step) if self.step > 1 else near

    def _within_reach(self, distance: Array, reach: int) -> Array:
        # `== 0` would be a bool for type checkers.
        return (distance <= reach * self.step) & (distance % self.step < 1)

    def near(self, first: int, last: int, *, widest: bool) -> tuple[int, int]:
        """Return the places, from the first up to the second, that have all neighbours of `first` to `last`.

        With `widest`, those whose neighbours they are: a shifted window reaches farther at a border.
        """
        before, behind = (self.right, self.left) if widest else (self.left, self.right)
        start, stop = first - before * self.step, last + behind * self.step + 1
        if self.kind == "periodic":
            return (start, stop) if start >= 0 and stop <= self.length else (0, self.length)
        if self.kind == "shifted":
            whole = self.window * self.step
            if widest:
                start, stop = first - whole, last + whole + 1
            else:
                start, stop = min(start, self.length - whole), max(stop, whole)
        return max(start, 0), min(stop, self.length)
