"""The tokens of caches, and where the queries and the options of a call stand among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar, cast

from sdpa_xp._call.options import CallOptions
from sdpa_xp._call.paged import PagedCall
from sdpa_xp._call.prepared_call import prepare
from sdpa_xp._call.ragged import lengths_of
from sdpa_xp._checks.arrays import (
    HLE,
    Layout,
    check_appended,
    check_axes,
    check_one_kind,
    check_plain_array,
    headed,
)
from sdpa_xp._checks.integers import check_cumulative_lengths, read_together
from sdpa_xp._libraries import has_override, is_array, library_of
from sdpa_xp._libraries.jax_trees import Tree
from sdpa_xp._libraries.protocols import AnyArray, Array, Shape
from sdpa_xp.caches.blocks import (
    Row,
    are_slots,
    as_positions,
    check_rows,
    int32_array,
    last_of_row,
    positions_table,
)
from sdpa_xp.caches.memory import Buffers, TokenSlots, in_context_of_keys, refuse_graph_values
from sdpa_xp.caches.positions import (
    check_in_cache,
    check_positions,
    count_positions,
    factory_like,
    last_positions,
    options_at,
    positions_array,
)
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.positional.positions import Consecutive
from sdpa_xp.positional.rotation import Positions, Rotation, rotate

A = TypeVar("A", bound=AnyArray)


class CachedTokens(Tree, Generic[A]):
    """The tokens of a KVCache."""

    __slots__ = ("_layout", "_positions", "_rotary", "_slots")
    _layout: Layout
    _positions: Positions
    _rotary: Rotation | None
    _slots: TokenSlots

    def __len__(self) -> int:
        """Return the number of tokens in the cache."""
        return self._slots.length

    @property
    def layout(self) -> Layout:
        """The layout of all inputs and outputs."""
        return self._layout

    @property
    def key(self) -> A:
        """The keys of the tokens so far, (..., H, S, E); rotated, if the cache has a `rotary`."""
        return cast(A, self._slots.tokens("key"))

    @property
    def value(self) -> A:
        """The values of the tokens so far, (..., H, S, Ev)."""
        return cast(A, self._slots.tokens("value"))

    @property
    @in_context_of_keys
    def positions(self) -> A:
        """The positions of the tokens so far, int32: (S,), or (..., S) if batch entries differ."""
        key = self._slots.buffers.arrays["key"]
        return cast(A, positions_array("KVCache", key, self._positions, self._slots.length))

    def _tree_state(self) -> dict[str, object]:
        positions = self._positions
        if isinstance(positions, Consecutive) and is_array(positions.first) and positions.shift:
            # What is not in an array is static, and a cache that a scan carries has to stay the same.
            positions = Consecutive(positions.first + positions.shift)
        state = {"positions": positions, "layout": self._layout, "rotary": self._rotary}
        return {**self._slots.arrays(), **state}

    def _set_tree_state(self, state: dict[str, Any]) -> None:
        axis = -2 if state["layout"] == HLE else -3
        shape = getattr(state["key"], "shape", ())  # JAX may have put something else where arrays were
        length = shape[axis] if len(shape) >= -axis else 0
        # A transform of JAX made the arrays, or put others in their place: none is written to.
        buffers = Buffers({name: state[name] for name in ("key", "value")}, axis, length, are_of_caller=True)
        self._slots, self._positions = TokenSlots(buffers, 0, length), state["positions"]
        self._layout, self._rotary = state["layout"], state["rotary"]

    @in_context_of_keys
    def _placed(
        self, function: str, query: AnyArray, positions: object, options: CallOptions
    ) -> tuple[AnyArray, CallOptions]:
        """Return the query, rotated by its positions, and the options with masks and biases that know them."""
        length = self._slots.length

        def positions_of(queries: int) -> Positions:
            if positions is not None:
                return check_positions(function, positions, queries, array.shape[:-3], array, "query")
            if not isinstance(self._positions, Consecutive):
                check_in_cache(function, queries, length)
            return last_positions(self._positions, length, queries)

        array = check_plain_array(function, "query", query)
        check_query_of_cache(function, array, "cache.key", self._slots.buffers.arrays["key"])
        if len(array.shape) < 3:  # refused later, as in every call
            return array, options
        is_consecutive = positions is None and isinstance(self._positions, Consecutive)
        has_slots = is_consecutive and cast(Consecutive, self._positions).is_from_zero
        if has_slots and self._rotary is None:  # most steps of a decoder
            return array, options
        rotated = rotate(self._rotary, function, "query", array, positions_of, self._layout)
        if has_slots:
            return rotated, options
        queries = headed(array.shape, self._layout)[-2]
        if positions is not None:  # refused also where nothing reads them
            positions_of(queries)
        if not count_positions(options, consecutive=is_consecutive):
            return rotated, options
        tokens = (positions_of(queries), queries), (self._positions, length)
        places = (positions_array(function, array, *part) for part in tokens)
        return rotated, options_at(options, *places, consecutive=is_consecutive)


class PagedTokens(Tree, Generic[A]):
    """The tokens of a PagedKVCache."""

    __slots__ = (
        "_key_blocks",
        "_layout",
        "_lengths",
        "_positions",
        "_rotary",
        "_table",
        "_token_axis",
        "_value_blocks",
    )
    _key_blocks: Array
    _layout: Layout
    _lengths: tuple[int, ...]
    _positions: tuple[Row, ...]
    _rotary: Rotation | None
    _table: list[list[int]]
    _token_axis: int
    _value_blocks: Array

    @property
    def layout(self) -> Layout:
        """The layout of all inputs and outputs."""
        return self._layout

    @property
    def key_blocks(self) -> A:
        """The keys of all blocks in the pool, (P, H, size, E)."""
        return cast(A, self._key_blocks)

    @property
    def value_blocks(self) -> A:
        """The values of all blocks in the pool, (P, H, size, Ev)."""
        return cast(A, self._value_blocks)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence."""
        return self._lengths

    @property
    def block_table(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each sequence."""
        return tuple(map(tuple, self._table))

    @property
    def positions(self) -> tuple[Sequence[int], ...]:
        """The positions of the tokens of each sequence."""
        return self._positions

    @property
    def block_size(self) -> int:
        """The number of tokens that fit into a block."""
        return self._key_blocks.shape[self._token_axis]

    def _call(
        self, function: str, query: object, positions: object, options: CallOptions, cu_seqlens_q: object
    ) -> PagedCall:
        """Check a call, and rotate its queries."""
        array = check_plain_array(function, "query", query)
        refuse_graph_values(function, "a paged cache", {"query": array})
        if cu_seqlens_q is None:
            if array.ndim != 4 or array.shape[0] != len(self._lengths):
                rule = "`query` must have an entry for each sequence of the cache, (N, Hq, L, E)"
                hint = "For packed queries pass `cu_seqlens_q`." if array.ndim == 3 else ""
                got = {"query.shape": array.shape, "N": len(self._lengths)}
                raise ArgumentValueError(function, rule, got, hint)
        else:
            check_axes(function, {"query": array.shape}, 3)
        new = {"query": array}
        counts, starts, positions = self._new_tokens(function, "cu_seqlens_q", cu_seqlens_q, positions, new)
        rotated, options = self._placed(function, array, positions, options, counts, starts)
        # Checked as if the keys of each sequence were one padded array, which is not made.
        call = prepare(
            function,
            {"query": rotated, **self._pools()},
            options,
            queries_at_end=starts is None,
            cache_shapes=self._padded_shapes((len(self._lengths),) if starts is None else ()),
            has_entries=True,
        )
        if options.is_causal:
            for number, (count, length) in enumerate(zip(counts, self._lengths, strict=True)):
                check_appended(function, count, length, number)
        return PagedCall(call, self._table, self._lengths, starts)

    def _new_tokens(
        self, function: str, name: str, cu_seqlens: object, positions: object, arrays: Mapping[str, Array]
    ) -> tuple[list[int], list[int] | None, Any]:
        """Return the number of new tokens of each sequence, where packed ones begin, and the positions."""
        array = next(iter(arrays.values()))
        if cu_seqlens is None:
            return [array.shape[self._token_axis]] * len(self._lengths), None, positions
        cu_seqlens, positions = read_together(array, cu_seqlens, positions)
        starts = check_cumulative_lengths(function, name, cu_seqlens, arrays, self._token_axis)
        if len(starts) != len(self._lengths) + 1:
            rule = f"`{name}` must have N + 1 integers for the N sequences of the cache"
            got = {f"len({name})": len(starts), "N": len(self._lengths)}
            raise ArgumentValueError(function, rule, got)
        return lengths_of(starts), starts, positions

    def _placed(
        self,
        function: str,
        query: Array,
        positions: object,
        options: CallOptions,
        counts: Sequence[int],
        starts: Sequence[int] | None,
    ) -> tuple[Array, CallOptions]:
        """Return the query, rotated by its positions, and the options with masks and biases that know them."""
        check_query_of_cache(function, query, "cache.key_blocks", self._key_blocks)
        is_consecutive = positions is None and all(isinstance(row, range) for row in self._positions)
        has_slots = is_consecutive and are_slots(self._positions)
        # To find out costs a walk through the masks, which a decoder without gaps and rotations is spared.
        reads_positions = not has_slots and count_positions(options, consecutive=is_consecutive)
        if self._rotary is None and positions is None and not reads_positions:
            return query, options
        if positions is not None:
            rows = check_rows(function, positions, counts, starts)
        else:
            rows = tuple(map(last_of_row, repeat(function), self._positions, counts))
        rotated = self._rotated(function, "query", query, rows, starts)
        if reads_positions:
            factory = factory_like(function, query)
            tables = (positions_table(factory, part) for part in (rows, self._positions))
            options = options_at(options, *tables, consecutive=is_consecutive)
        return rotated, options

    def _rotated(
        self, function: str, name: str, tokens: Array, rows: Sequence[Row], starts: Sequence[int] | None
    ) -> Array:
        """Rotate tokens at their positions; with `starts` they are packed, in the order of the rows."""
        if (rotary := self._rotary) is None or not any(rows):
            return tokens
        factory = factory_like(function, tokens)
        if starts is None:
            return rotate(rotary, function, name, tokens, lambda _: as_positions(factory, rows), self._layout)
        with factory.computing():
            # Each sequence may have tables of its own, which are joined for one rotation of all tokens.
            joined, places = rotary._of_packed(function, rows)
        return rotate(joined, function, name, tokens, lambda _: int32_array(factory, places), self._layout)

    def _pools(self) -> dict[str, Array]:
        return {"key_blocks": self._key_blocks, "value_blocks": self._value_blocks}

    def _padded_shapes(self, batch: Shape) -> tuple[Shape, Shape]:
        """Return the shapes that keys and values would have as one padded array each."""
        longest = max(self._lengths)
        shapes = []
        for blocks in self._pools().values():
            shape = [*batch, *blocks.shape[1:]]
            shape[self._token_axis] = longest
            shapes.append(tuple(shape))
        return shapes[0], shapes[1]


def check_query_of_cache(function: str, query: Array, name: str, cached: Array) -> None:
    """Check that a query has the library, the dtype and the device of a cache, whose array is called `name`."""
    device = library_of(query).device
    if type(query) is type(cached) and query.dtype == cached.dtype and device(query) == device(cached):
        return  # hot: each step of a decoder comes here
    if not has_override(query, cached):
        check_one_kind(function, {"query": query, name: cached})
