"""The tokens of a PagedKVCache, and where the queries and the options of a call stand among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

from .._call.options import CallOptions
from .._call.paged import PagedCall
from .._call.prepared_call import prepare
from .._call.ragged import lengths_of
from .._checks.arrays import check_appended, check_axes, check_plain_array
from .._checks.integers import check_cumulative_lengths, read_together
from .._libraries.protocols import AnyArray, Array, Shape
from ..errors import ArgumentValueError
from ..positional.rotation import rotate
from .blocks import Row, are_slots, as_positions, check_rows, int32_array, last_of_row, positions_table
from .memory import refuse_graph_values
from .positions import count_positions, factory_like, options_at
from .quantisation import check_query_of_cache
from .stored_blocks import StoredBlocks

A = TypeVar("A", bound=AnyArray)


class PagedTokens(StoredBlocks[A]):
    """The tokens of a PagedKVCache."""

    __slots__ = ()

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
            {"query": rotated, **self._pools(), **self._channels()},
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
        check_query_of_cache(function, query, "cache.key_blocks", self._key_blocks, self._quantisation)
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

    def _padded_shapes(self, batch: Shape) -> tuple[Shape, Shape]:
        """Return the shapes that keys and values would have as one padded array each."""
        longest = max(self._lengths)
        shapes = []
        for blocks in self._block_shapes(batch):
            shape = [*blocks]
            shape[self._token_axis] = longest
            shapes.append(tuple(shape))
        return shapes[0], shapes[1]
