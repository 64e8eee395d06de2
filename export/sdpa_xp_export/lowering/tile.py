"""A tile of a call: some queries against some keys, for which masks and biases are computed.

Its lengths are values of the graph, or of the body of a loop: queries, keys, and what a cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from sdpa_xp._checks.keywords import LARGEST_INTEGER, check_integer
from sdpa_xp._checks.score_arrays import check_broadcasts
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp.masks import Mask

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.mask_analysis import cuts_keys, hides_keys
from .._call.operands import GraphOperand, Initializer, Input
from .._dtypes.dtype import INTEGERS
from .._graph import Graph, GraphValue, broadcasts_to
from ..spec import SymbolicShape, as_lengths

BEYOND = 2**30
"""Further than any length; numbers are cut off here, since onnxruntime compares larger ones wrong."""


class GraphLengths:
    """The lengths of a call as values of its graph; each is written when it is first asked for."""

    def __init__(self, graph: Graph, call: ExportCall) -> None:
        self.graph = graph
        self.call = call

    def length(self, name: int | str) -> GraphValue:
        """Return the length of that name, (1,): the Shape of an input that has it."""
        return self.graph.length(name)

    def number(self, name: int | str) -> GraphValue:
        """Return the length of that name, a scalar."""
        return ops.scalar(self.length(name))

    @cached_property
    def queries(self) -> GraphValue:
        """L, a scalar."""
        return self.number(self.call.sizes.queries)

    @cached_property
    def keys(self) -> GraphValue:
        """S, a scalar: the length of all keys, those of the cache among them."""
        return self.number(self.call.sizes.keys)

    @cached_property
    def kept_keys(self) -> GraphValue:
        """The number of keys that are left when those behind the last query are cut off."""
        return xp.minimum(self.queries, self.keys, exact=False) if cuts_keys(self.call) else self.keys

    @cached_property
    def key_count(self) -> GraphValue:
        """`kept_keys` as (1,)."""
        return xp.expand_dims(self.kept_keys, axis=0)

    @cached_property
    def more_keys(self) -> GraphValue:
        """S - L, (1,)."""
        return self.length(self.call.sizes.keys) - self.length(self.call.sizes.queries)

    @cached_property
    def filled(self) -> GraphValue | None:
        """The number of real tokens of a padded cache, with the new ones, (B, 1, 1, 1); None without one."""
        call = self.call
        if call.past_lengths is None:
            return None
        past = self.graph.argument("past_lengths").astype("int64")
        return ops.with_ones(past + self._new_keys(), 3)

    @cached_property
    def position(self) -> GraphValue | int:
        """The position of the first query among the keys: 0; with a cache, the last query is the last token."""
        if not self.call.cached:
            return 0
        return (self.keys if self.filled is None else self.filled) - self.queries

    def extreme(self, op: str, integers: GraphValue, *, shifts: bool = False) -> GraphValue:
        """integers of any shape, which may shift queries -> ReduceMin or ReduceMax of them, (1,)."""
        del shifts  # here no length bounds them
        flat = xp.reshape(xp.clip(integers, -BEYOND, BEYOND), (-1,))
        return ops.reduce(op, flat)

    def _new_keys(self) -> GraphValue:
        return self.length(self.call.key.shape[self.call.length_axis])


class LengthsInBody(GraphLengths):
    """The lengths of a call in the body of a loop, read there: a GPU's provider keeps them on the host.

    They are read from the query and the keys that the body captures anyway. onnxruntime warns of a body that
    captures both a Cast and its input.
    """

    def __init__(self, graph: Graph, outer: GraphLengths, query: GraphValue, key: GraphValue) -> None:
        super().__init__(graph, outer.call)
        self.outer = outer
        self.key = graph.here(key)
        graph.here(query)  # now the graph knows where to read the lengths

    @cached_property
    def key_count(self) -> GraphValue:
        return ops.length_of(self.key, self.key.ndim - 2)

    @cached_property
    def kept_keys(self) -> GraphValue:
        return ops.scalar(self.key_count)

    def extreme(self, op: str, integers: GraphValue, *, shifts: bool = False) -> GraphValue:
        """integers of the outer graph -> the length of an array that is as long as the extreme says, (1,).

        Only a Shape gives a body an integer that follows from data without a wait in each step. A length is not
        negative, so L is added in between; what is cut off at -L and S bounds no key. A query of a cache may
        stand at -L to S before it is shifted, so there both are L + S.
        """
        lengths = self.outer
        queries, keys = (lengths.length(name) for name in (self.call.sizes.queries, self.call.sizes.keys))
        added = self.length(self.call.sizes.queries)
        if shifts and self.call.cached:
            queries = keys = queries + keys
            added = added + self.length(self.call.sizes.keys)
        extreme = xp.clip(lengths.extreme(op, integers), -queries, keys, exact=False)
        marks = xp.arange(0, ops.scalar(extreme + queries), length="shape marks")
        return ops.length_of(self.graph.here(marks), 0) - added


class LengthsAsData(GraphLengths):
    """The lengths of a call for arithmetic with indices, which a GPU computes: moved there before a loop."""

    def __init__(self, host: GraphLengths) -> None:
        super().__init__(host.graph, host.call)
        self.host = host

    def number(self, name: int | str) -> GraphValue:
        number = self.host.number(name)
        return number if isinstance(name, int) else _as_data(number)

    @cached_property
    def kept_keys(self) -> GraphValue:
        return self.host.kept_keys

    @cached_property
    def position(self) -> GraphValue | int:
        if self.filled is not None:
            return self.filled - self.queries
        position = self.host.position
        return position if isinstance(position, int) else _as_data(position)

    def _new_keys(self) -> GraphValue:
        return self.number(self.call.key.shape[self.call.length_axis])


def _as_data(length: GraphValue) -> GraphValue:
    """A length -> the same number: a Range of one, which takes its bounds from the host, and gives data."""
    return ops.scalar(xp.arange(length, length + 1, length=1))


_WRITTEN = {
    "key_lengths": "masks.padding({})",
    "query_lengths": "masks.padding(None, {})",
    "length": "masks.prefix({})",
}
"""How the integers of an argument are passed, if not by its name."""


@dataclass(frozen=True, slots=True)
class TileRange:
    """Queries or keys of a tile: from the first of `bounds` up to the second; without these, all of them."""

    kind: Literal["queries", "keys"]
    length: int | str
    bounds: tuple[GraphValue, GraphValue] | None = None
    """(1,) each."""


@dataclass(frozen=True, slots=True)
class KeyMask:
    """The keys that no query attends, as some masks of the call say."""

    allowed: GraphValue
    """Boolean, (..., 1, S)."""
    added: GraphValue
    """0 or -inf, (..., 1, S), in the dtype of the scores."""


@dataclass(frozen=True, eq=False)
class GraphTile:
    """Some queries against some keys; its values are written into `graph`, which may be the body of a loop."""

    lengths: GraphLengths
    graph: Graph
    row_range: TileRange
    column_range: TileRange
    masks: tuple[Mask, ...]
    key_mask: KeyMask | None = None
    """What is masked apart from `masks`, in keys and values that are 0 there."""
    folds: tuple[GraphValue, GraphValue] | None = None
    """The shapes for `matmul_grouped`, if only a run says how many heads the tile has."""
    in_body: LengthsInBody | None = None
    """The lengths in this graph if it is the body of a loop."""
    outer: GraphTile | None = None
    """The tile of all pairs, in the graph around the loop."""

    @property
    def host(self) -> GraphLengths:
        """The lengths of the call for arithmetic with lengths, as values of this graph."""
        return self.in_body or self.lengths

    @property
    def whole(self) -> GraphTile:
        """The tile of all pairs, in the graph around the loop if this graph is the body of one."""
        return self.outer or self

    @classmethod
    def of_all_pairs(cls, lengths: GraphLengths, key: GraphValue) -> GraphTile:
        """Return the tile of all queries against all of `key`, (..., S, E), or against what was left of it."""
        call, keys = lengths.call, TileRange("keys", key.dims[-2])
        return cls(lengths, lengths.graph, TileRange("queries", call.sizes.queries), keys, call.masks)

    @property
    def hides_keys(self) -> bool:
        """Whether some key of the tile may be attended by none of its queries."""
        return hides_keys(self.call)

    @property
    def call(self) -> ExportCall:
        return self.lengths.call

    @cached_property
    def rows(self) -> GraphValue:
        """Numbers of the queries, (rows,)."""
        return self._numbers(self.row_range)

    @cached_property
    def columns(self) -> GraphValue:
        """Numbers of the keys, (columns,)."""
        return self._numbers(self.column_range)

    @property
    def row_numbers(self) -> GraphValue:
        """Numbers of the rows, (rows,), which are negative where no query is."""
        return self.rows

    def blocks_of_queries(self, size: int) -> tuple[GraphValue, GraphValue]:
        """Return the first block of so many queries that the tile meets, and how many it may meet; scalars."""
        count = xp.floor_divide(self.host.queries + (size - 1), size, exact=False)
        return self.graph.constant(0, "int64"), count

    @property
    def row(self) -> GraphValue:
        """Numbers of the queries, (rows, 1)."""
        return xp.expand_dims(self.rows, axis=-1)

    @property
    def query_index(self) -> GraphValue:
        """Positions of the queries among the keys, (rows, 1); (B, 1, rows, 1) if batch entries differ."""
        position = self.lengths.position
        return self.row if isinstance(position, int) else self.row + self.here(position)

    @property
    def key_index(self) -> GraphValue:
        """Positions of the keys, (1, columns); (B, 1, 1, columns) if batch entries differ."""
        return xp.expand_dims(self.columns, axis=0)

    @property
    def indices(self) -> tuple[GraphValue, GraphValue]:
        """Batch entry and head, which broadcast to (..., Hq, rows, columns)."""
        sizes, graph = self.call.sizes, self.graph
        # The graph is written for a known number of heads, so that no node has to count them.
        heads = graph.constant([[[head]] for head in range(sizes.query_heads)], "int64")
        return self.here(self.whole.entries), heads

    @cached_property
    def entries(self) -> GraphValue:
        """Numbers of the batch entries, (..., 1, 1, 1)."""
        batch = self.call.sizes.batch
        count = self.graph.constant(1, "int64")
        lengths = [self.lengths.length(length) for length in batch]
        for length in lengths:
            count = count * ops.scalar(length)
        ones = [self.graph.constant([1], "int64")] * 3
        target = xp.concat([*lengths, *ones])
        return xp.reshape(xp.arange(0, count, length="all entries"), target, dims=(*batch, 1, 1, 1))

    def here(self, value: GraphValue) -> GraphValue:
        """Return a value of the outer graph as one of this graph."""
        return self.graph.here(value)

    def operand(self, operand: GraphOperand) -> GraphValue:
        """Return an input or an initializer of the call as a value."""
        return self.here(self.lengths.graph.argument(operand.name))

    def integers(
        self, name: str, value: object, least: int = -LARGEST_INTEGER, most: int | str = LARGEST_INTEGER
    ) -> GraphValue | int:
        """Return one integer, or one for each batch entry as (..., 1, 1, 1); "lower_right" is S - L.

        Known integers must be at least `least` and at most `most`, if that is no name of a length.
        """
        if isinstance(value, str) and value == "lower_right":
            queries, keys = self.call.sizes.queries, self.call.sizes.keys
            if self.call.cached:  # it moves the queries to the last tokens already
                return 0
            if isinstance(queries, int) and isinstance(keys, int):
                return keys - queries
            return self.here(self.lengths.keys) - self.here(self.lengths.queries)
        _check_range(self.graph.function, name, value, least, most)
        if isinstance(value, int):
            return value
        vector = self.vector(name, value)
        batch = self.call.sizes.batch
        if vector.dims == (1,) and not batch:  # as the library takes one for a call without batch
            return xp.reshape(vector, (1, 1, 1), dims=(1, 1, 1))
        _check_batch_integers(self.graph.function, name, vector.dims, batch)
        return ops.with_ones(vector, 3)

    def ids(self, name: str, value: object, length: int | str, hint: str) -> GraphValue:
        """Return ids of tokens, (..., length)."""
        ids = self.vector(name, value)
        target = (*self.call.sizes.batch, length)
        if ids.dims[-1:] != (length,) or not broadcasts_to(ids.dims, target):
            rule = f"`{name}` must have one integer for each token"
            got = {f"{name.rpartition('.')[2]}.shape": ids.dims, "expected": target}
            raise ArgumentValueError(self.graph.function, rule, got, hint)
        return ids

    def vector(self, name: str, value: object) -> GraphValue:
        """Return integers as a value: a list of them, an input or an initializer."""
        if isinstance(value, Input | Initializer | GraphValue):
            if str(value.dtype) not in INTEGERS:
                rule = f"`{name}` must hold integers"
                raise ArgumentTypeError(self.graph.function, rule, {f"{name}.dtype": value.dtype})
            return (value if isinstance(value, GraphValue) else self.operand(value)).astype("int64")
        if isinstance(value, tuple | list):
            numbers = [
                check_integer(self.graph.function, f"{name}[{index}]", number)
                for index, number in enumerate(value)
            ]
            return self.graph.constant(numbers, "int64")
        rule = f"`{name}` must be an integer, a list of them, or a TensorSpec"
        raise ArgumentTypeError(self.graph.function, rule, {name: repr(value)})

    def cut(self, value: GraphValue) -> GraphValue:
        """Return the tile's part of a value that broadcasts to (..., Hq, L, S); an axis of 1 stays as it is."""
        return self._cut(self._cut(value, -2, self.row_range), -1, self.column_range)

    def cut_queries(self, query: GraphValue) -> GraphValue:
        """Return the tile's part of a query, (..., L, E)."""
        return self._cut(query, -2, self.row_range)

    @staticmethod
    def _cut(value: GraphValue, axis: int, part: TileRange) -> GraphValue:
        if part.bounds is None or value.ndim < -axis or value.dims[axis] == 1:
            return value
        return ops.cut(value, part.bounds, axis, part.length)

    def _numbers(self, part: TileRange) -> GraphValue:
        start: GraphValue | int = 0
        if part.bounds is None:
            stop = self.host.queries if part.kind == "queries" else self.host.kept_keys
        else:
            stop, start = map(ops.scalar, part.bounds[::-1])
        numbers: GraphValue = xp.arange(start, stop, length=part.length)
        return numbers


def _check_range(function: str, name: str, value: object, least: int, most: int | str) -> None:
    """Refuse integers that the library refuses, if they are known now; those of an input are not."""
    most = most if isinstance(most, int) else LARGEST_INTEGER
    known = value.numbers.ravel().tolist() if isinstance(value, Initializer) else value
    for number in known if isinstance(known, tuple | list) else [known]:
        if isinstance(number, int | np.integer) and not least <= number <= most:
            rule = f"`{name}` must be " + (f"at least {least}" if number < least else f"at most {most}")
            raise ArgumentValueError(function, rule, {name: int(number)})


def _check_batch_integers(function: str, name: str, shape: SymbolicShape, batch: SymbolicShape) -> None:
    """Check that integers of `shape` broadcast to the batch; `name` is the argument, as attn_mask.offset."""
    if batch and len(shape) <= len(batch) and not broadcasts_to(shape, batch):
        lengths = ", ".join(f'"{length}"' if isinstance(length, str) else str(length) for length in batch)
        spec = f'TensorSpec("int64", ({lengths}{"," if len(batch) == 1 else ""}))'
        argument = name.rpartition(".")[2]
        hint = f"Write {_WRITTEN.get(argument, f'{argument}={{}}').format(spec)}."
        rule = f"`{name}` must have one integer for each batch entry"
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, "batch": batch}, hint)
    check_broadcasts(function, name, as_lengths(shape), as_lengths(batch), "(...), one per batch entry")
