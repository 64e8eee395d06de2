"""Attention over the tokens of a PagedKVCache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, repeat
from typing import Generic, TypeVar, cast

from sdpa_xp._call.options import CallOptions
from sdpa_xp._call.paged import PagedCall, attend
from sdpa_xp._call.prepare import prepare
from sdpa_xp._checks.arrays import Layout, check_appended, check_axes, check_plain_array
from sdpa_xp._checks.integers import check_cumulative_lengths, check_integer_list, read_together
from sdpa_xp._checks.keywords import Implementation, check_lse_base, explains_keywords
from sdpa_xp._libraries.jax_trees import Tree
from sdpa_xp._libraries.protocols import AnyArray, Array, Dtype, Rng, Shape
from sdpa_xp.biases import Bias
from sdpa_xp.caches.at_positions import count_positions, options_at
from sdpa_xp.caches.checks import check_query_of_cache, refuse_graph_values
from sdpa_xp.caches.positions import (
    Row,
    are_slots,
    as_positions,
    check_rows,
    factory_like,
    last_of_row,
    positions_table,
    rotate_packed,
)
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.masks import Mask
from sdpa_xp.positional.rotation import Rotation, rotate
from sdpa_xp.states import AttentionState, to_base

A = TypeVar("A", bound=AnyArray)


@explains_keywords
class PagedAttention(Tree, Generic[A]):
    """The tokens of a PagedKVCache, and attention over them: it places queries and options among the tokens."""

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

    def attend(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        cu_seqlens_q: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        bias: Bias | AnyArray | None = None,
        is_causal: bool = True,
        scale: float | AnyArray | None = None,
        softcap: float | None = None,
        sinks: AnyArray | None = None,
        dropout_p: float = 0.0,
        rng: Rng | None = None,
        softmax_dtype: Dtype | None = None,
        implementation: Implementation | None = None,
    ) -> A:
        """Return the attention of the last L tokens of each sequence over all tokens of that sequence.

        With `cu_seqlens_q`, each sequence has its own number of queries, so that one call computes the prompts
        of some sequences and the next token of others.

        Args:
            query: (N, Hq, L, E). With `cu_seqlens_q` the queries of all sequences are packed, (Hq, T, E), or
                (T, Hq, E) with `layout="...LHE"`.
            attn_mask: A mask, or an array that broadcasts to (N, Hq, L, 1), or to (N, Hq, 1, 1) if the queries
                are packed: sequences may have different S. This argument and the next ones are as in
                `scaled_dot_product_attention`. A query has the position of its token, also for masks and
                biases.
            cu_seqlens_q: The cumulative numbers of queries: N + 1 integers from 0 to T, as for
                `varlen_attention`. A sequence may have no query.
            positions: The positions of the queries, if these are not the last tokens of their sequences: that
                of the first, L integers, or (N, L) integers, static like the table. Of packed queries: that of
                the first of each sequence, T integers, or N lists. Pass `is_causal=False` too.
            bias: A bias, or an array that broadcasts like one as `attn_mask`.
            is_causal: Query i attends to key j only if j <= i + length - L.
            scale: A number, or an array that broadcasts like one as `attn_mask`.
            softcap: A positive number; None or 0 is off.
            sinks: (N, Hq) or (Hq,).
            dropout_p: From 0 to 1.
            rng: Required if dropout_p > 0.
            softmax_dtype: float32, float64 or None.
            implementation: `"xp"` or None.

        Returns:
            (N, Hq, L, Ev), or packed like the query, with the query's library, device and dtype.

        Raises:
            TypeError: As for `scaled_dot_product_attention`.
            ValueError: As for `scaled_dot_product_attention`; or there are more queries than tokens in a
                sequence, unless `is_causal` is False; or `cu_seqlens_q` does not fit the query or the cache.
        """
        mask, layout = attn_mask, self._layout
        options = CallOptions(
            mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
        )
        paged = self._call("PagedKVCache.attend", query, positions, options, cu_seqlens_q)
        with paged.call.computing():
            output, _ = attend(paged, with_lse=False)
            result = cast(A, paged.call.result(output))
        return paged.call.checked(result)

    def attend_state(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        cu_seqlens_q: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        bias: Bias | AnyArray | None = None,
        is_causal: bool = True,
        scale: float | AnyArray | None = None,
        softcap: float | None = None,
        sinks: AnyArray | None = None,
        dropout_p: float = 0.0,
        rng: Rng | None = None,
        softmax_dtype: Dtype | None = None,
        lse_base: float | None = None,
        implementation: Implementation | None = None,
    ) -> AttentionState[A]:
        """Return what `attend` returns, and the log-sum-exp of the scores.

        `merge_states(..., layout=)` merges states over disjoint parts of the keys, such as a prefix that all
        sequences share and the blocks of each sequence.

        Args:
            query: (N, Hq, L, E), or packed. All arguments are as in `attend`.
            attn_mask: A mask, or an array that broadcasts to (N, Hq, L, 1).
            cu_seqlens_q: The cumulative numbers of packed queries.
            positions: The positions of the queries, if these are not the last tokens of their sequences.
            bias: A bias, or an array that broadcasts to (N, Hq, L, 1).
            is_causal: Query i attends to key j only if j <= i + length - L.
            scale: A number, or an array that broadcasts to (N, Hq, L, 1).
            softcap: A positive number; None or 0 is off.
            sinks: (N, Hq) or (Hq,). The log-sum-exp includes them, so pass them to only one of the states that
                you merge.
            dropout_p: From 0 to 1.
            rng: Required if dropout_p > 0. Dropout does not change the log-sum-exp.
            softmax_dtype: float32, float64 or None.
            lse_base: None for the natural logarithm; 2 for base 2, as in FlashInfer.
            implementation: `"xp"` or None.

        Returns:
            `output`, as from `attend`, and `lse`, (N, Hq, L), or (Hq, T) if the queries are packed, in the
                dtype of the scores.

        Raises:
            TypeError: As for `attend`.
            ValueError: As for `attend`; or `lse_base` is neither None nor 2.
        """
        mask, layout = attn_mask, self._layout
        options = CallOptions(
            mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
        )
        function = "PagedKVCache.attend_state"
        base = check_lse_base(function, lse_base)
        paged = self._call(function, query, positions, options, cu_seqlens_q)
        with paged.call.computing():
            output, lse = attend(paged, with_lse=True)
            state = AttentionState(cast(A, paged.call.result(output)), cast(A, to_base(cast(Array, lse), base)))
        paged.call.checked(state.output)
        return state

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
            cu_seqlens_q, positions = read_together(array, cu_seqlens_q, positions)
            cu_seqlens_q = check_integer_list(function, "cu_seqlens_q", cu_seqlens_q)
            check_axes(function, {"query": array.shape}, 3)
        counts, starts = self._new_tokens(function, "cu_seqlens_q", cu_seqlens_q, {"query": array})
        rotated, options = self._placed(function, array, positions, options, counts, starts)
        pools = {"key_blocks": self._key_blocks, "value_blocks": self._value_blocks}
        # Checked as if the keys of each sequence were one padded array, which is not made.
        call = prepare(
            function,
            {"query": rotated, **pools},
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
        self, function: str, name: str, cu_seqlens: object, arrays: Mapping[str, Array]
    ) -> tuple[list[int], list[int] | None]:
        """Return the number of new tokens or queries of each sequence, and where packed ones begin."""
        if cu_seqlens is None:
            count = next(iter(arrays.values())).shape[self._token_axis]
            return [count] * len(self._lengths), None
        starts = check_cumulative_lengths(function, name, cu_seqlens, arrays, self._token_axis)
        if len(starts) != len(self._lengths) + 1:
            rule = f"`{name}` must have N + 1 integers for the N sequences of the cache"
            got = {f"len({name})": len(starts), "N": len(self._lengths)}
            raise ArgumentValueError(function, rule, got)
        return [last - first for first, last in pairwise(starts)], starts

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
        """Rotate tokens at their positions; with `starts` they are packed."""
        if starts is None:
            factory = factory_like(function, tokens)
            return rotate(
                self._rotary, function, name, tokens, lambda _: as_positions(factory, rows), self._layout
            )
        return rotate_packed(self._rotary, function, name, tokens, rows, self._layout)

    def _padded_shapes(self, batch: Shape) -> tuple[Shape, Shape]:
        """Return the shapes that keys and values would have as one padded array each."""
        longest = max(self._lengths)
        shapes = []
        for blocks in (self._key_blocks, self._value_blocks):
            shape = [*batch, *blocks.shape[1:]]
            shape[self._token_axis] = longest
            shapes.append(tuple(shape))
        return shapes[0], shapes[1]
