"""All pairs of a call in a graph, and a tile of them: what masks and biases are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from sdpa_xp import checks
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.mask_analysis import cuts_keys
from sdpa_xp_export._call.operands import GraphOperand, Initializer, Input
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export.lowering import counting
from sdpa_xp_export.spec import addends

FUNCTION = "export_attention"


class GraphLengths:
    """The lengths of a call as values of its graph; each is written when it is first asked for."""

    def __init__(self, graph: Graph, call: ExportCall) -> None:
        self.graph = graph
        self.call = call
        self._known: dict[int | str, GraphValue] = {}

    def length(self, name: int | str) -> GraphValue:
        """The length of that name, (1,): the SymbolicShape of an input that has it."""
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    @cached_property
    def queries(self) -> GraphValue:
        """L, a scalar."""
        return ops.scalar(self.length(self.call.sizes.queries))

    @cached_property
    def keys(self) -> GraphValue:
        """S, a scalar: the length of the keys, with those of the cache."""
        return ops.scalar(self.length(self.call.sizes.keys))

    @cached_property
    def kept_keys(self) -> GraphValue:
        """How many keys are left when those behind the last query are cut off."""
        return counting.smaller(self.queries, self.keys) if cuts_keys(self.call) else self.keys

    @cached_property
    def filled(self) -> GraphValue | None:
        """How many tokens of a padded cache are real, with the new ones, (B, 1, 1, 1); None for other calls."""
        call = self.call
        if call.past_lengths is None:
            return None
        past = self.graph.argument("past_lengths", call.past_lengths).astype("int64")
        axis = -2 if call.layout == checks.HLE else -3
        return ops.reshape(past + self.length(call.key.shape[axis]), (0, 1, 1, 1), (*past.shape, 1, 1, 1))

    @cached_property
    def position(self) -> GraphValue | int:
        """Where the first query stands among the keys: 0, or so that the last query is the last token."""
        if not self.call.cached:
            return 0
        return (self.keys if self.filled is None else self.filled) - self.queries

    def whole(self, key: GraphValue) -> GraphTile:
        """All queries against all of `key`, (..., S, E), or of what was left of it."""
        return GraphTile(
            self, self.graph, TileRange("queries", self.call.sizes.queries), TileRange("keys", key.shape[-2])
        )

    def _read(self, name: int | str) -> GraphValue:
        if isinstance(name, int) or name.isdecimal():
            return self.graph.constant([int(name)], "int64")
        for argument, spec in self.call.inputs.items():
            if name in spec.shape:
                axis = spec.shape.index(name)
                value = self.graph.argument(argument, spec)
                return self.graph.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
        if self.call.past_key is not None and name == str(self.call.sizes.keys):  # a sum, perhaps of sums
            axis = -2 if self.call.layout == checks.HLE else -3
            return self.length(self.call.past_key.shape[axis]) + self.length(self.call.key.shape[axis])
        one, *others = (self.length(part) for part in addends(name))
        for other in others:
            one = one + other
        return one


@dataclass(frozen=True, slots=True)
class TileRange:
    """Queries or keys of a tile: from `start` to `stop`, (1,) each, or all that there are."""

    of: str
    length: int | str
    start: GraphValue | None = None
    stop: GraphValue | None = None

    @property
    def whole(self) -> bool:
        return self.start is None


class GraphTile:
    """Some queries against some keys; its values are written into `graph`, the body of a loop perhaps."""

    def __init__(self, pairs: GraphLengths, graph: Graph, rows: TileRange, columns: TileRange) -> None:
        self.pairs = pairs
        self.graph = graph
        self.row_range = rows
        self.column_range = columns

    @property
    def call(self) -> ExportCall:
        return self.pairs.call

    @cached_property
    def rows(self) -> GraphValue:
        """Numbers of the queries, (rows,)."""
        return self._numbers(self.row_range)

    @cached_property
    def columns(self) -> GraphValue:
        """Numbers of the keys, (columns,)."""
        return self._numbers(self.column_range)

    @property
    def row(self) -> GraphValue:
        """Numbers of the queries, (rows, 1)."""
        return ops.unsqueeze(self.rows, -1)

    @property
    def query_index(self) -> GraphValue:
        """Where the queries stand among the keys, (rows, 1); (B, 1, rows, 1) where entries differ."""
        position = self.pairs.position
        return self.row if isinstance(position, int) else self.row + self.here(position)

    @property
    def key_index(self) -> GraphValue:
        """Numbers of the keys, (1, columns)."""
        return ops.unsqueeze(self.columns, 0)

    @property
    def indices(self) -> tuple[GraphValue, GraphValue, GraphValue, GraphValue]:
        """b, h, i and j, which broadcast to (..., Hq, rows, columns)."""
        sizes, graph = self.call.sizes, self.graph
        heads = graph.constant([[[head]] for head in range(sizes.query_heads)], "int64")
        return self._entries(), heads, self.query_index, self.key_index

    def here(self, value: GraphValue) -> GraphValue:
        """A value of the outer graph, to compute with in this one."""
        return self.graph.here(value)

    def operand(self, held: GraphOperand) -> GraphValue:
        """An input or an initializer of the call."""
        outer = self.pairs.graph
        if isinstance(held, Input):
            return self.here(outer.argument(held.name, held.spec))
        return self.here(outer.weight(held.name, held.numbers))

    def integers(self, name: str, value: object) -> GraphValue | int:
        """One integer, or one a batch entry as (..., 1, 1, 1); "lower_right" is S - L."""
        if value == "lower_right" and isinstance(value, str):
            return 0 if self.call.cached else self.here(self.pairs.keys) - self.here(self.pairs.queries)
        if isinstance(value, int):
            return value
        found = self.vector(name, value)
        batch = self.call.sizes.batch
        shape = cast(tuple[int, ...], found.shape)
        if shape == (1,) and not batch:
            return ops.reshape(found, (1, 1, 1), (1, 1, 1))
        checks.broadcasts(FUNCTION, name, shape, batch, "(...), one a batch entry")
        return ops.reshape(found, (*[0] * len(shape), 1, 1, 1), (*shape, 1, 1, 1))

    def vector(self, name: str, value: object) -> GraphValue:
        """Integers: a list of them, an input or an initializer."""
        if isinstance(value, Input | Initializer):
            if value.dtype not in INTEGERS:
                rule = f"`{name}` must hold integers"
                raise TypeError(checks.message(FUNCTION, rule, {f"{name}.dtype": value.dtype}))
            return self.operand(value).astype("int64")
        if isinstance(value, tuple | list):
            numbers = [checks.integer(FUNCTION, f"{name}[{at}]", each) for at, each in enumerate(value)]
            return self.graph.constant(numbers, "int64")
        rule = f"`{name}` must be an integer, a list of them, or a TensorSpec"
        raise TypeError(checks.message(FUNCTION, rule, {name: repr(value)}))

    def cut(self, value: GraphValue) -> GraphValue:
        """The tile's part of what broadcasts to (..., Hq, L, S); an axis of 1 stays as it is."""
        return self._cut(self._cut(value, -2, self.row_range), -1, self.column_range)

    @staticmethod
    def _cut(value: GraphValue, axis: int, part: TileRange) -> GraphValue:
        if part.start is None or part.stop is None or value.ndim < -axis or value.shape[axis] == 1:
            return value
        return ops.cut(value, (part.start, part.stop), axis, part.length)

    def _numbers(self, part: TileRange) -> GraphValue:
        if part.start is not None and part.stop is not None:
            return ops.arange(ops.scalar(part.stop), part.length, ops.scalar(part.start))
        stop = self.pairs.queries if part.of == "queries" else self.pairs.kept_keys
        return ops.arange(self.here(stop), part.length)

    def _entries(self) -> GraphValue:
        batch = self.call.sizes.batch
        count = self.graph.constant(1, "int64")
        lengths = [self.here(self.pairs.length(length)) for length in batch]
        for length in lengths:
            count = count * ops.scalar(length)
        ones = [self.graph.constant([1], "int64")] * 3
        target = ops.join([*lengths, *ones])
        return ops.reshape_to(ops.arange(count, "entries"), target, (*batch, 1, 1, 1))
