"""Trace a formula: it is array-API code, and a graph has an array API.

So each mask and bias is exported without a lowering, also the caller's: it is bound to a grid and asked about a
tile as in the library, and both have values of the graph here. A function of the indices is called with values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from sdpa_xp._checks.keywords import LARGEST_INTEGER
from sdpa_xp._checks.score_arrays import Integers, check_broadcasts
from sdpa_xp._libraries.protocols import TRACED
from sdpa_xp._programs import BoundOptions
from sdpa_xp._tiles import Tile, both
from sdpa_xp._tiles.grid import FAR, CallGrid, FirstPosition
from sdpa_xp.biases import Bias
from sdpa_xp.biases.algebra import Sum
from sdpa_xp.errors import ArgumentTypeError, message_of, summary
from sdpa_xp.masks import Mask
from sdpa_xp.masks.algebra import AllOf

from .. import _arrays as xp
from .._arrays import ops
from .._arrays.numpy_and_torch import MissingFunctionError
from .._call.operands import Initializer, Input, kind_of, with_operands
from .._dtypes.dtype import INTEGERS, Dtype
from .._graph import Graph, GraphValue
from ..spec import as_lengths
from .tile import GraphTile, TileRange

T = TypeVar("T")
AllowedPairs: TypeAlias = GraphValue | bool
"""Boolean, broadcasts to (..., Hq, rows, columns). True if every pair may attend, False if none may."""
both_allow: Callable[[AllowedPairs, AllowedPairs], AllowedPairs] = cast(Any, both)
"""Returns the pairs that both allow."""

TRACING_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, NotImplementedError)
"""What code raises that computes with values of a graph and needs more than they have."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FormulaGrid(CallGrid):
    """The grid of scores of a call, as masks and biases see it when they are bound.

    A length that only a run knows is a value of the graph: a formula may compute with it, but not branch on it.
    """

    tile: GraphTile

    @cached_property
    def position(self) -> FirstPosition:
        position = self.tile.lengths.position  # writes nodes, which few formulas need
        if isinstance(position, int):
            return FirstPosition(position, position, position)
        return FirstPosition(cast(Any, self.tile.here(position)), -FAR, FAR)

    @cached_property
    def queries(self) -> Any:
        return self._length(self.tile.call.sizes.queries, "queries")

    @cached_property
    def keys(self) -> Any:
        return self._length(self.tile.call.sizes.keys, "keys")

    def _length(self, length: int | str, which: str) -> int | GraphValue:
        return length if isinstance(length, int) else self.tile.here(getattr(self.tile.lengths, which))

    def check_integers(
        self, name: str, value: object, least: int = -LARGEST_INTEGER, most: int | str = LARGEST_INTEGER
    ) -> Integers:
        values = self.tile.integers(name, value, least, most)
        known = [values] if isinstance(values, int) else value
        if isinstance(known, tuple | list) and known:
            return Integers(cast(Any, values), min(known), max(known))
        return Integers(cast(Any, values), -math.inf, math.inf)  # only a run knows them: no tile is skipped

    def check_lengths(self, name: str, value: object, letter: Literal["L", "S"]) -> Integers:
        return self.check_integers(name, value, 0, self._size(letter))

    def check_offset(self, name: str, value: object) -> Integers:
        return self.check_integers(name, value)

    def check_ids(self, name: str, value: object, letter: Literal["L", "S"], hint: str = "") -> Any:
        return self.tile.ids(name, value, self._size(letter), hint)

    def check_scores_shape(self, name: str, array: Any) -> Any:
        return self._broadcast(name, array, self.tile.call.sizes.scores_shape, "(..., Hq, L, S)")

    def check_heads_shape(self, name: str, array: Any) -> Any:
        return ops.with_ones(self._broadcast(name, array, self.batch_and_heads, "(..., Hq)"), 2)

    def _size(self, letter: str) -> int | str:
        return self.tile.call.sizes.queries if letter == "L" else self.tile.call.sizes.keys

    def lengths(self, name: str, letters: str = "LS") -> list[int]:
        sizes = {letter: self._size(letter) for letter in "LS"}
        known = [size for letter, size in sizes.items() if letter in letters and isinstance(size, int)]
        if len(known) < len(letters) or self.tile.call.cached:
            rule = f"`{name}` must be used without a cache, and with lengths that are numbers and not names"
            raise ArgumentTypeError(self.function, rule, sizes)
        return known

    def distances(self) -> tuple[float, float]:
        lengths = queries, keys, position = self.queries, self.keys, self.position.values
        if self.has_positions or not all(map(self.library.is_known, lengths)):
            return -math.inf, math.inf
        return 1 - queries - position, keys - 1 - position

    def put(self, numbers: Sequence[float], dtype: Any) -> Any:
        return self.tile.graph.constant(numbers, str(dtype))

    def slice_entries(self, array: Any, _axes: int, /) -> Any:
        return self._value(array)

    def in_all_axes(self, array: Any, last: int = 0) -> Any:
        return ops.with_ones(self._value(array), last) if last else array

    def arange(self, start: Any, stop: Any) -> Any:
        return xp.arange(start, stop)

    def head_index(self) -> Any:
        return self.tile.indices[1]

    def _value(self, array: Any) -> GraphValue:
        is_operand = isinstance(array, Input | Initializer)
        return self.tile.operand(array) if is_operand else self.tile.graph.operand(array)

    def _broadcast(self, name: str, array: Any, target: tuple[int, ...], letters: str) -> GraphValue:
        value = self._value(array)
        check_broadcasts(self.function, name, as_lengths(value.dims), target, letters)
        return value


def grid_fields(tile: GraphTile) -> dict[str, Any]:
    """Return the fields of the grid of a call, which a run puts on its device; it is for the whole batch."""
    call, graph = tile.call, tile.graph
    return {
        "tile": tile,
        "function": graph.function,
        "library": graph.library,
        "xp": xp,
        "device": None,
        "dtype": Dtype(call.accumulation_dtype),
        "input_dtype": Dtype(call.query.dtype),
        "access": TRACED,
        "batch": call.sizes.batch,
        "heads": call.sizes.query_heads,
    }


class FormulaTile(Tile):
    """A tile of a graph, as patterns and terms see it when they are asked about it; its arrays are values."""

    @classmethod
    def of_grid(cls, grid: FormulaGrid) -> FormulaTile:
        """Return the tile that a grid is for."""
        return cls(_range_of(grid.tile.row_range), _range_of(grid.tile.column_range), cast(Any, grid))

    @property
    def _tile(self) -> GraphTile:
        return cast(FormulaGrid, self.grid).tile

    @property
    def row_index(self) -> Any:
        return self._tile.row

    @property
    def query_index(self) -> Any:
        return self._tile.query_index if self.positions is None else self.slice(self.positions.queries)

    @property
    def key_index(self) -> Any:
        return self._tile.key_index if self.positions is None else self.slice(self.positions.keys)

    @property
    def indices(self) -> tuple[Any, Any, Any, Any]:
        return *self._tile.indices, self.query_index, self.key_index

    @property
    def first_position(self) -> int:
        return -FAR if self._tile.call.cached else self.rows.start

    @property
    def last_position(self) -> int:
        return FAR if self._tile.call.cached else self.rows.stop - 1

    @property
    def shape(self) -> Any:
        return (*self.grid.batch_and_heads, *self._tile.rows.dims, *self._tile.columns.dims)

    def slice(self, array: Any) -> Any:
        return self._tile.cut(self._tile.graph.operand(array))

    def slice_queries(self, array: Any) -> Any:
        return self._tile.cut_queries(self._tile.graph.operand(array))

    def slice_heads(self, array: T) -> T:
        return array

    def slice_integers(self, integers: Integers) -> Integers:
        return integers


def all_allowed(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    """masks -> And of the pairs that they allow, and of the real keys of a padded cache; False as a value."""
    allowed: AllowedPairs = True
    for mask in masks:
        with traced("attn_mask", mask, grid := FormulaGrid(**grid_fields(tile))) as pattern:
            answer = pattern.allowed_in(FormulaTile.of_grid(grid))
        if getattr(answer, "dtype", "bool" if isinstance(answer, bool) else "") != "bool":
            rule = f"the formula of {type(mask).__name__} must return a condition (`attn_mask`)"
            raise ArgumentTypeError(tile.graph.function, rule, {"its result": type(answer).__name__})
        allowed = both_allow(allowed, answer)
    if tile.lengths.filled is not None:
        allowed = both_allow(allowed, tile.key_index < tile.here(tile.lengths.filled))
    return tile.graph.constant(False, "bool") if allowed is False else allowed


def biased(tile: GraphTile, scores: GraphValue, allowed: AllowedPairs) -> tuple[GraphValue, AllowedPairs]:
    """scores -> scores with one bias after the other, and the pairs of `allowed` that no bias masks."""
    biases = tile.call.biases
    if not biases:
        return scores, allowed
    bias = biases[0] if len(biases) == 1 else Sum(tuple(biases))
    grid = FormulaGrid(**grid_fields(tile))
    with traced("bias", bias, grid) as terms:
        of_library: Any = BoundOptions(AllOf(), terms, 1.0, None, None)
        total, unmasked = of_library.biased(FormulaTile.of_grid(grid), scores, allowed)
    return total, unmasked


@contextmanager
def traced(name: str, modifier: Mask | Bias, grid: FormulaGrid) -> Iterator[Any]:
    """Yield what a mask or a bias is bound to."""
    try:
        yield _with_values(modifier, grid.tile).bind(grid)
    except _StoppedError as stopped:
        raise stopped.error from stopped.error.__cause__
    except TRACING_ERRORS as error:
        message = message_of(error)
        is_own = message is not None and message.function == grid.function
        if message and is_own and message.argument.startswith((name, *modifier.arguments)):
            raise  # a check of an argument
        what = f"the formula of {type(modifier).__name__} (`{name}`)"
        hint = (
            "Use `tile.query_index`, `tile.key_index`, `tile.slice`, operators, and the functions of "
            "`tile.grid.xp`. A length that is a name is no number for a formula."
        )
        raise untraceable(grid.function, what, error, hint) from error


def _with_values(modifier: Any, tile: GraphTile) -> Any:
    """Return a mask or a bias with values of the graph instead of the operands of the call."""
    is_of_caller = not kind_of(modifier)

    def value_of(_: str, argument: Any) -> Any:
        if isinstance(argument, Mask | Bias):
            return _with_values(argument, tile)
        if callable(argument) and not is_of_caller:
            return partial(
                _call_index_function, tile.graph, argument, "bool" if isinstance(modifier, Mask) else ""
            )
        if isinstance(argument, Initializer) and argument.dtype in INTEGERS and not is_of_caller:
            return argument  # the library's own asks the grid for them, which knows and checks the numbers
        return tile.operand(argument) if isinstance(argument, Input | Initializer) else argument

    return with_operands(modifier, value_of)


def _range_of(part: TileRange) -> range:
    """Return the queries or keys of a tile if they are known, else a range that holds them."""
    return range(part.length) if part.bounds is None and isinstance(part.length, int) else range(FAR)


def untraceable(public_function: str, what: str, error: Exception, hint: str) -> TypeError:
    """Return the error for code that `error` stopped; `what` names it, and `hint` says what it may use."""
    rule = f"{what} must be one that can be traced to ONNX"
    message = message_of(error)
    if message is not None and message.function == public_function:  # it says what values of a graph lack
        return ArgumentTypeError(public_function, f"{rule}: {message.rule}", message.got, message.hint)
    if isinstance(error, MissingFunctionError):
        return TypeError(f"{public_function}: {rule}: {error}")
    return ArgumentTypeError(public_function, rule, {"its error": summary(error)}, hint)


class _StoppedError(Exception):
    """An error of a function of the caller, which the library would word for arrays."""

    def __init__(self, error: TypeError) -> None:
        super().__init__(error)
        self.error = error


def _call_index_function(graph: Graph, function: Callable[..., Any], dtype: str, *arguments: GraphValue) -> Any:
    """Return what a function makes of values: a value of `dtype`, or a bool for a condition that is constant.

    Args:
        graph: The graph that it computes in.
        function: A `mask_mod` or a `score_mod`.
        dtype: "bool" for a condition, "" for the dtype of the scores.
        arguments: The indices; for a `score_mod` the scores first.
    """
    name, dtype = ("attn_mask", dtype) if dtype else ("bias", arguments[0].elem_type)
    try:
        with graph.values_alone():
            result = function(*arguments)
    except TRACING_ERRORS as error:
        hint = "Use operators and the functions of `index.__array_namespace__()`."
        wrong = untraceable(graph.function, f"the function of `{name}`", error, hint)
        wrong.__cause__ = error
        raise _StoppedError(wrong) from error
    if isinstance(result, bool | np.bool_) and dtype == "bool":
        return bool(result)
    if not isinstance(result, GraphValue) or (result.elem_type == "bool") != (dtype == "bool"):
        kind = "a condition" if dtype == "bool" else "scores"
        rule = f"the function of `{name}` must return {kind}"
        got = result.elem_type if isinstance(result, GraphValue) else type(result).__name__
        raise _StoppedError(ArgumentTypeError(graph.function, rule, {"its result": got}))
    return result.astype(dtype)
