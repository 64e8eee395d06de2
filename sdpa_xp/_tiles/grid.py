"""What masks and biases ask of the grid of the scores, while they are bound to it and about a tile: a protocol.

`ScoreGrid` answers for arrays, and the exporter's `FormulaGrid` for values of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

from .._checks.arrays import check_floating
from .._checks.integers import Integers
from .._checks.keywords import LARGEST_INTEGER
from .._checks.score_arrays import check_added_dtype
from .._libraries import may_read
from .._libraries.base import Library
from .._libraries.protocols import Access, Array, Device, Dtype, Namespace, Shape

if TYPE_CHECKING:  # few grids are on a device
    from .on_device import BlockBounds, PaddedLengths, Questions

FAR = 2**62
"""Beyond any length."""


class WindowBounds(NamedTuple):
    """What is known, before the run, of a window of the grid of which only a run knows where it lies or ends.

    In a program on several devices each device has its own place. In a program for all lengths the window is
    the grid: its compiler knows a length by its symbol alone, and masks are asked about a tile that goes on to
    `FAR`.
    """

    queries: int
    keys: int
    query_start: Array | None = None
    """The first query of the window; None is the first of the grid."""
    key_start: Array | None = None


class FirstPosition(NamedTuple):
    """The position of the first query among the keys, which caches set; batch entries may differ."""

    values: int | Array
    """One for all, or one for each batch entry, (n, 1, 1, 1)."""
    least: int
    most: int


AT_FIRST_KEY = FirstPosition(0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CallGrid(Protocol):
    """What the arrays of a call are, and how masks and biases check their arguments and convert them."""

    function: str
    """The public function that was called, for messages."""
    library: Library
    xp: Namespace
    device: Device
    dtype: Dtype
    """The accumulation dtype."""
    input_dtype: Dtype
    """The dtype of the query, which biases may have too; None if there is no query."""
    access: Access
    batch: Shape
    heads: int
    """Query heads."""
    has_positions: bool = False
    """Whether tokens have positions of their own, so that the lengths do not bound the distances."""
    questions: Questions | None = None
    """What masks and biases ask of a device while they are bound; None if they are not to ask."""
    placement: WindowBounds | None = None
    """The whole grid, if a compiler knows a length by its symbol alone."""

    @property
    def batch_and_heads(self) -> Shape:
        """(..., Hq)."""
        return (*self.batch, self.heads)

    @property
    def padding(self) -> PaddedLengths | None:
        """The lengths of the batch entries, if they are padded."""
        return None

    def at_positions(self) -> Self:
        """Return the grid of tokens that have positions of their own."""
        return replace(self, has_positions=True)

    def may_read(self, *arrays: Array) -> bool:
        """Return whether values of the call and of `arrays` can be read now, without waiting for a device."""
        return may_read(self.access, *arrays)

    def check_dtype(self, name: str, array: Array) -> None:
        """Refuse an array that is added to the scores, and has a wider dtype than they and the query."""
        check_floating(self.function, name, array)
        if self.input_dtype is not None:
            check_added_dtype(self.function, name, array, self.input_dtype, self.dtype)

    def block_bounds(self, array: Array) -> BlockBounds | None:
        """Return the bounds of an array that broadcasts to the scores, if a device is asked for them now.

        A small array is not asked about: no tile of it could be skipped. An empty one has no bounds.
        """
        if self.questions is None or array.ndim < 2 or 0 in array.shape:
            return None
        from .on_device import SIDE, ask_block_bounds

        is_small = max(array.shape[-2:]) <= SIDE
        return None if is_small else ask_block_bounds(self.questions, self.xp, array)

    def bounds(self, _integers: Array, /) -> Sequence[int] | None:
        """Return the least and the most of some integers; None if they are not known yet, as in a graph."""
        return None

    def check_integers(self, name: str, value: object, least: int = -LARGEST_INTEGER) -> Integers:
        """Check one integer for all batch entries, or one for each: an int or (..., 1, 1, 1)."""

    def check_lengths(self, name: str, value: object, letter: Literal["L", "S"]) -> Integers:
        """Check integers as `check_integers` does, which are at least 0 and at most L or S."""

    def check_offset(self, name: str, value: object) -> Integers:
        """Check the shift of a diagonal to the right, in keys: integers, or "lower_right"."""

    def check_ids(self, name: str, value: object, letter: Literal["L", "S"], hint: str = "") -> Array:
        """Check an id for each query or key, (..., L) or (..., S)."""

    def check_scores_shape(self, name: str, array: Array) -> Array:
        """Check an array that broadcasts to the scores."""

    def check_heads_shape(self, name: str, array: Array) -> Array:
        """Check an array that broadcasts to (..., Hq); returns it as (..., Hq, 1, 1)."""

    def lengths(self, name: str, letters: str = "LS") -> list[int]:
        """Return how far the places of the queries and of the keys go; a graph may not know it."""

    def distances(self) -> tuple[float, float]:
        """Return the smallest and the largest j - i of the pairs; infinite if they are not known."""

    def put(self, numbers: Sequence[float], dtype: Dtype) -> Array:
        """Return a list of numbers as an array."""

    def entry_numbers(self, count: int) -> Sequence[int]:
        """Return the numbers of the grid's batch entries among `count`, or the one number of 1 for all."""
        return range(count)

    def slice_entries(self, array: Array, axes: int, /) -> Array:
        """Return the part of `array` for the grid's batch entries; behind the batch axis stand `axes` axes."""

    def in_all_axes(self, array: Array, last: int = 0) -> Array:
        """Return an array with `last` new axes behind its own, and with all axes if it must have them."""

    def head_index(self) -> Array:
        """Return the number of each query head, (Hq, 1, 1)."""

    def arange(self, start: Any, stop: Any) -> Array:
        """Return the integers from `start` up to `stop`."""
