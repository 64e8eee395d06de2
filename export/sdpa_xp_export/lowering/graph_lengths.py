"""The lengths of a call as values of its graph, or of a loop in it: queries, keys, and what a cache holds."""

from __future__ import annotations

from functools import cached_property

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.mask_analysis import cuts_keys
from .._graph.graph import Graph, GraphValue

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

    def length(self, name: int | str) -> GraphValue:
        return self.host.length(name)

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
