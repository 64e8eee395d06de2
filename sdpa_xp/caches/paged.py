"""A cache in blocks of a shared pool, for many sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, Self, TypeVar, Unpack, cast

from .._call import PreparedCall, prepare
from .._call.options import CallOptions, Keywords, StatisticsKeywords, takes_options
from .._checks import integers
from .._checks.arrays import Layout, check_appended, check_axes, check_one_kind, check_plain_array
from .._checks.keywords import check_integer, check_lse_base, explains_keywords
from .._display import table as html_table
from .._libraries import computing, is_array, is_number, rows_at
from .._libraries.protocols import AnyArray, Array
from .._sequences.groups import attend
from .._sequences.sequences import Sequences, lengths_of
from .._states import AttentionState, returned_output, returned_state
from .._statistics import NAMES, AttentionStatistics, StatisticName, check_request, returned_statistics
from ..errors import ArgumentValueError
from ..masks import Mask
from ..positional.rotation import Rotation, rotate
from . import rows as token_rows
from .at_positions import options_at
from .cache import Cache, refuse_graph_values
from .pages import NewTokens, Pages
from .positions import factory_like
from .quantisation import check_same_but_width
from .rows import Row

A = TypeVar("A", bound=AnyArray)
MOST_SEQUENCES = 8
"""The most sequences that a notebook shows."""


@explains_keywords
class PagedKVCache(Cache[A]):
    """The keys and values of N sequences of different lengths, in blocks of a shared pool.

    Token t of sequence n is in block `block_table[n][t // size]`, at place `t % size`. You keep track of the
    free blocks; `with_table` gives a sequence its next block. `append` and `attend` take the same number of
    tokens for each sequence, or packed tokens (`cu_seqlens_k` and `cu_seqlens_q`).

    Args:
        key_blocks: (P, H, size, E) for a pool of P blocks of `size` tokens, or (P, size, H, E) with
            `layout="...LHE"`, as in flash-attention.
        value_blocks: (P, H, size, Ev), or (P, size, H, Ev).
        block_table: (N, blocks of a sequence): a list of lists, or an integer array of any library, static
            inside a jit. Only the blocks that a sequence needs are read.
        lengths: The tokens of each sequence: N integers, in a list or an array, static like the table.
        layout: The layout of all inputs and outputs.
        rotary: As in `KVCache`, but the keys in the pool must be rotated already.
        first_position: The position of the first token of each sequence: one integer, or N. It is not 0 if
            older blocks were given back.
        positions: The position of each token, if they do not follow one another: N lists of integers.

    Raises:
        TypeError: Arrays of several libraries or dtypes, or a table or lengths that are not static integers.
        ValueError: Shapes do not fit, arrays are on several devices, or a sequence has too few or wrong blocks.

    Examples:
        >>> import numpy as np
        >>> pool = np.zeros((4, 1, 16, 2))  # 4 blocks of 16 tokens, one head
        >>> cache = PagedKVCache(
        ...     pool, pool.copy(), block_table=[[2, 0], [3, -1]], lengths=[16, 5]
        ... )
        >>> token = np.ones((2, 1, 1, 2))  # one for each of two sequences
        >>> cache = cache.append(token, token)
        >>> cache.lengths, cache.attend(token).shape
        ((17, 6), (2, 1, 1, 2))

    References:
        Kwon et al., "PagedAttention", arXiv 2309.06180, section 4.1.
    """

    __slots__ = ()
    _names = "key_blocks", "value_blocks"
    _positions: tuple[Row, ...]
    _tokens: Pages

    def __init__(
        self,
        key_blocks: A,
        value_blocks: AnyArray,
        block_table: Sequence[Sequence[int]] | AnyArray,
        lengths: Sequence[int] | AnyArray,
        *,
        layout: Layout = "...HLE",
        rotary: Rotation | None = None,
        first_position: int | Sequence[int] | AnyArray = 0,
        positions: Sequence[Sequence[int]] | AnyArray | None = None,
    ) -> None:
        function = "PagedKVCache"
        self._begin(function, layout, rotary)
        pools = {"key_blocks": key_blocks, "value_blocks": value_blocks}
        refuse_graph_values(function, "a pool of blocks", pools)
        _, arrays = check_one_kind(function, pools)
        check_axes(function, {name: array.shape for name, array in arrays.items()}, 4)
        check_same_but_width(function, arrays)
        # The caller's arrays, not copies: all caches over a pool see what `append` writes in place.
        self._tokens = Pages(arrays, self._axis, [], ())
        self._check_rotated(function, arrays["key_blocks"].shape)
        self._set_sequences(function, block_table, lengths, first_position, positions)

    def _set_sequences(
        self, function: str, block_table: object, lengths: object, first_position: object, positions: object
    ) -> None:
        """Check the sequences of a cache over its pool, and set them."""
        # Both at once, so that a device is waited for once.
        block_table, lengths = integers.read_together(self._tokens.pools["key_blocks"], block_table, lengths)
        table = integers.check_integer_rows(function, "block_table", block_table, least=-1)  # -1 is no block
        counts = integers.check_integer_list(function, "lengths", lengths)
        integers.check_same_length(function, {"block_table": table, "lengths": counts})
        self._positions = token_rows.start(function, first_position, positions, counts)
        self._check_sequences(function, counts, "block_table")
        self._tokens = self._tokens._replace(table=table).check(function, counts)

    def _check_sequences(self, function: str, sequences: list[int], name: str) -> None:
        """Check that `name` has at least one sequence, and that a block holds at least one token."""
        if not sequences:
            rule = f"`{name}` must have a row for at least one sequence"
            raise ArgumentValueError(function, rule, {name: []})
        if self.block_size == 0:
            rule = "a block of `key_blocks` must hold at least one token"
            raise ArgumentValueError(function, rule, {"tokens of a block": 0})

    @property
    def block_size(self) -> int:
        """The number of tokens that fit into a block."""
        return self._tokens.size

    @property
    def key_blocks(self) -> A:
        """The keys of all blocks in the pool, (P, H, size, E); of a quantised cache a copy."""
        return cast(A, self._wide("key_blocks"))

    @property
    def value_blocks(self) -> A:
        """The values of all blocks in the pool, (P, H, size, Ev); see `key_blocks`."""
        return cast(A, self._wide("value_blocks"))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence."""
        return self._tokens.lengths

    @property
    def block_table(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each sequence."""
        return tuple(map(tuple, self._tokens.table))

    @property
    def positions(self) -> tuple[Sequence[int], ...]:
        """The positions of the tokens of each sequence."""
        return self._positions

    def append(
        self,
        key: A,
        value: AnyArray,
        *,
        cu_seqlens_k: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        in_place: bool = False,
    ) -> Self:
        """Return a cache with n more tokens in each sequence; with `cu_seqlens_k` each gets its own number.

        Args:
            key: (N, H, n, E), with the pool's library, device and dtype; with `cu_seqlens_k` packed, (H, U, E),
                or (U, H, E) with `layout="...LHE"`.
            value: (N, H, n, Ev), or packed like the keys.
            cu_seqlens_k: The cumulative numbers of new tokens: N + 1 integers from 0 to U. [0, 5, 5, 6] appends
                5 tokens to the first sequence, none to the second, and one to the third.
            positions: As in `KVCache.append`: the first, or n or (N, n) integers, static like the table; of
                packed tokens, U integers or N lists.
            in_place: Write into the pool instead of copying it. Other caches over the same pool see the
                change. The pools of keys and values must not share memory.

        Raises:
            TypeError: The tokens have another library or dtype than the pool, or the pool is not writeable.
            ValueError: The shapes do not fit, a sequence has too few blocks, or two would write to one block.
        """
        function, pages = "PagedKVCache.append", self._tokens
        new = self._check_new(function, key, value, (len(pages.lengths),) if cu_seqlens_k is None else ())
        tokens, positions = self._new_tokens(function, "cu_seqlens_k", cu_seqlens_k, positions, new)
        pages, writes = pages.grown(function, tokens)
        added = tuple(map(token_rows.following, self._positions, tokens.counts))
        if positions is not None:
            added = token_rows.check(function, positions, *tokens)
        new["key"] = self._rotated(function, "key", new["key"], lambda: added, tokens)
        if self._quantisation is not None:
            new = self._quantisation.stored(new, pages.axis)
        pages = pages.write(function, new, writes, in_place)
        return self._with(pages, tuple(map(token_rows.joined, self._positions, added)))

    def with_table(
        self,
        block_table: Sequence[Sequence[int]] | AnyArray,
        lengths: Sequence[int] | AnyArray,
        *,
        first_position: int | Sequence[int] | AnyArray = 0,
        positions: Sequence[Sequence[int]] | AnyArray | None = None,
    ) -> Self:
        """Return a cache of other sequences over the same pool. Nothing is copied.

        Args:
            block_table: (N, blocks of a sequence). All other arguments and errors are as in `PagedKVCache`.
        """
        cache = self._with(self._tokens, self._positions)
        cache._set_sequences("PagedKVCache.with_table", block_table, lengths, first_position, positions)
        return cache

    def drop_first(self, count: int | Sequence[int] | AnyArray) -> Self:
        """Return a cache without the first tokens of its sequences. The others keep their positions.

        Nothing is copied. The blocks that are no longer in the `block_table` are free.

        Args:
            count: The number of tokens, a multiple of `block_size`: one integer, or one for each sequence.
        """
        counts, size = self._counted("drop_first", count), self.block_size
        for dropped in counts:
            if dropped % size:  # a sequence begins with a block
                rule = "`count` must be a multiple of the block size"
                hint = "Drop fewer tokens, and hide the others with `masks.sliding_window`."
                got = {"count": dropped, "block size": size}
                raise ArgumentValueError("PagedKVCache.drop_first", rule, got, hint)
        table = [row[n // size :] for row, n in zip(self._tokens.table, counts, strict=True)]
        kept = zip(self._positions, counts, strict=True)
        return self._with_rows(table, [token_rows.part(row, n, len(row)) for row, n in kept])

    def drop_last(self, count: int | Sequence[int] | AnyArray) -> Self:
        """Return a cache without the last tokens of its sequences, such as drafts that were rejected.

        Nothing is copied. Tokens that are appended in place overwrite the dropped tokens in the pool.

        Args:
            count: The number of tokens: one integer, or one for each sequence.
        """
        kept = zip(self._positions, self._counted("drop_last", count), strict=True)
        return self._with_rows(self._tokens.table, [token_rows.part(row, 0, len(row) - n) for row, n in kept])

    def take_entries(self, entries: Sequence[int] | AnyArray) -> Self:
        """Return a cache of some sequences, in any order and also repeatedly, as a beam search needs.

        Nothing is copied. If you take a sequence twice, copy the block that is written to before you append.

        Args:
            entries: The numbers of the sequences: a list, a range or an integer array.
        """
        function, table = "PagedKVCache.take_entries", self._tokens.table
        numbers = integers.check_integer_list(function, "entries", entries, most=len(table) - 1)
        self._check_sequences(function, numbers, "entries")
        return self._with_rows([table[n] for n in numbers], [self._positions[n] for n in numbers])

    def _with_rows(self, table: list[list[int]], positions: Sequence[Row]) -> Self:
        """Return a cache of other sequences over the same pool."""
        lengths = tuple(map(len, positions))
        return self._with(self._tokens._replace(table=table, lengths=lengths), tuple(positions))

    def _counted(self, method: str, count: object) -> list[int]:
        """Check how many tokens are dropped: one integer, or one for each sequence."""
        function, lengths = f"PagedKVCache.{method}", self._tokens.lengths
        if is_number(count):
            count = [check_integer(function, "count", count, least=0)] * len(lengths)
        counts = integers.check_integer_list(function, "count", count)
        integers.check_same_length(function, {"count": counts, "cache.lengths": lengths})
        for sequence, (dropped, length) in enumerate(zip(counts, lengths, strict=True)):
            if dropped > length:
                rule = f"`count` must be at most the tokens of sequence {sequence}"
                raise ArgumentValueError(function, rule, {"count": dropped, "tokens": length})
        return counts

    def quantised(self, dtype: Literal["int8", "int4"], *, per: Literal["token", "channel"] = "token") -> Self:
        """Return a cache over a new pool, whose blocks store tokens as integers; see `KVCache.quantised`.

        Make caches of other sequences over the new pool `with_table`.

        Args:
            dtype: "int8" or "int4".
            per: "token" or "channel". The channels are measured on the blocks of the sequences.

        Raises:
            ValueError: As for `KVCache.quantised`.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import PagedKVCache
            >>> pool = np.zeros((4, 1, 16, 64), "float32")
            >>> cache = PagedKVCache(pool, pool, block_table=[[2]], lengths=[0]).quantised("int4")
            >>> pool.nbytes * 2, cache.nbytes
            (32768, 4608)
        """
        pages, key = self._tokens, self._tokens.pools["key_blocks"]
        with computing(key):
            used = [*chain(*pages.blocks_in_use())]
            measured = rows_at(key, used) if used else key[:0, ...]
            rules = dtype, per, measured, (0, pages.axis)
            quantisation = self._new_quantisation("PagedKVCache.quantised", *rules)
            pages = pages._replace(pools=quantisation.stored(pages.pools, -4))
        return self._with(pages, self._positions, quantisation)

    @takes_options(Keywords, is_causal=True)
    def attend(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        cu_seqlens_q: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        **keywords: Unpack[Keywords],
    ) -> A:
        """Return the attention of the last L tokens of each sequence over all tokens of that sequence.

        With `cu_seqlens_q`, each sequence has its own number of queries.

        Args:
            query: (N, Hq, L, E); with `cu_seqlens_q` packed, (Hq, T, E), or (T, Hq, E) with `layout="...LHE"`.
                Its dtype may be wider, as in `KVCache.attend`. All other arguments and errors are as in
                `scaled_dot_product_attention`.
            attn_mask: A mask, which counts positions as in `KVCache`, or an array that broadcasts to (N, Hq, L,
                1), or to (N, Hq, 1, 1) if the queries are packed: sequences may have different S.
            cu_seqlens_q: As in `varlen_attention`; a sequence may have no query.
            positions: As in `KVCache.attend`: the first, or L or (N, L) integers, static like the table; of
                packed queries, T integers or N lists.
            bias: A bias, or an array that broadcasts like one as `attn_mask`.
            is_causal: Query i attends to key j only if j <= i + length - L.
            scale: A number, or an array likewise.
            sinks: (N, Hq) or (Hq,).

        Returns:
            (N, Hq, L, Ev), or packed like the query, with the query's library, device and dtype.
        """
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        call, sequences = self._call("PagedKVCache.attend", query, cu_seqlens_q, positions, options)
        return cast(A, returned_output(call, partial(attend, call, sequences)))

    @takes_options(Keywords, is_causal=True)
    def attend_state(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        cu_seqlens_q: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        lse_base: float | None = None,
        **keywords: Unpack[Keywords],
    ) -> AttentionState[A]:
        """Return what `attend` returns, and the log-sum-exp of the scores, as in `KVCache.attend_state`.

        Args:
            query: (N, Hq, L, E), or packed. All other arguments and errors are as in `attend`.
            lse_base: As in `attention_state`.

        Returns:
            `output`, as from `attend`, and `lse`, (N, Hq, L), or (Hq, T) if the queries are packed, in the
                dtype of the scores.
        """
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        function = "PagedKVCache.attend_state"
        call, sequences = self._call(function, query, cu_seqlens_q, positions, options)
        return returned_state(call, partial(attend, call, sequences), check_lse_base(function, lse_base))

    @takes_options(StatisticsKeywords, is_causal=True)
    def statistics(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        of: StatisticName | Sequence[StatisticName],
        top_k: int | None = None,
        cu_seqlens_q: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        **keywords: Unpack[StatisticsKeywords],
    ) -> AttentionStatistics[A]:
        """Compute statistics of the scores and weights of `attend`, without an L x S array.

        Args:
            query: (N, Hq, L, E), or packed. All other arguments and errors are as in `attend`.
            of: As in `attention_statistics`, but for "block_sums".
            top_k: As in `attention_statistics`.

        Returns:
            The statistics as attributes. Their indices count the tokens of a sequence. `key_sums` is (N, Hq, S)
                for the S tokens of the longest sequence, and 0 behind those of others.
        """
        function = "PagedKVCache.statistics"
        request = check_request(function, of, top_k, known=NAMES[:-1])
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        call = self._call(function, query, cu_seqlens_q, positions, options, has_value=False)
        return returned_statistics(call[0], request, call[1])

    def _call(
        self,
        function: str,
        query: object,
        cu_seqlens_q: object,
        positions: object,
        options: CallOptions,
        *,
        has_value: bool = True,
    ) -> tuple[PreparedCall, Sequences]:
        """Check a call, rotate its queries, and return it and where its sequences lie."""
        array, pages = check_plain_array(function, "query", query), self._tokens
        refuse_graph_values(function, "a paged cache", {"query": array})
        if cu_seqlens_q is not None:
            check_axes(function, {"query": array.shape}, 3)
        elif array.ndim != 4 or array.shape[0] != len(pages.lengths):
            rule = "`query` must have an entry for each sequence of the cache, (N, Hq, L, E)"
            hint = "For packed queries pass `cu_seqlens_q`." if array.ndim == 3 else ""
            got = {"query.shape": array.shape, "N": len(pages.lengths)}
            raise ArgumentValueError(function, rule, got, hint)
        new, positions = self._new_tokens(function, "cu_seqlens_q", cu_seqlens_q, positions, {"query": array})
        self._check_query(function, array, pages.pools["key_blocks"])
        array, options = self._placed(function, array, positions, options, new)
        # Checked as if the keys of each sequence were one padded array, which is not made.
        batch, longest = (len(pages.lengths),) if new.starts is None else (), max(pages.lengths)
        key, value = ([*batch, *self._shape(name)[1:]] for name in self._names)
        key[pages.axis] = value[pages.axis] = longest
        stored = {n: x for n, x in self._stored().items() if has_value or not n.startswith("value")}
        inputs, shapes = {"query": array, **stored}, (tuple(key), tuple(value))
        rules: dict[str, Any] = {"queries_at_end": new.starts is None, "has_entries": True}
        call = prepare(function, inputs, options, cache_shapes=shapes, **rules)
        if options.is_causal:
            for number, (count, length) in enumerate(zip(new.counts, pages.lengths, strict=True)):
                check_appended(function, count, length, number)
        lengths = [*zip(new.counts, pages.lengths, strict=True)]
        return call, Sequences(lengths, (new.starts, None), pages.table, pages.size)

    def _new_tokens(
        self, function: str, name: str, cu_seqlens: object, positions: object, arrays: Mapping[str, Array]
    ) -> tuple[NewTokens, Any]:
        """Return the number of new tokens of each sequence, where packed ones begin, and the positions."""
        array, sequences = next(iter(arrays.values())), len(self._tokens.lengths)
        if cu_seqlens is None:
            return NewTokens([array.shape[self._tokens.axis]] * sequences), positions
        cu_seqlens, positions = integers.read_together(array, cu_seqlens, positions)
        starts = integers.check_cumulative_lengths(function, name, cu_seqlens, arrays, self._tokens.axis)
        if len(starts) != sequences + 1:
            rule = f"`{name}` must have N + 1 integers for the N sequences of the cache"
            raise ArgumentValueError(function, rule, {f"len({name})": len(starts), "N": sequences})
        return NewTokens(lengths_of(starts), starts), positions

    def _placed(
        self, function: str, query: Array, positions: object, options: CallOptions, new: NewTokens
    ) -> tuple[Array, CallOptions]:
        """Return the query, rotated by its positions, and the options with masks and biases that know them."""
        keys = self._positions
        is_consecutive = positions is None and all(isinstance(row, range) for row in keys)

        # Refused also where nothing reads them.
        passed = None if positions is None else token_rows.check(function, positions, *new)

        def of_queries() -> tuple[Row, ...]:
            if passed is not None:
                return passed
            return tuple(map(token_rows.last, repeat(function), keys, new.counts))

        def in_arrays() -> list[Array]:
            factory = factory_like(function, query)
            return [token_rows.as_array(factory, rows) for rows in (of_queries(), keys)]

        rotated = self._rotated(function, "query", query, of_queries, new)
        if is_consecutive and token_rows.are_slots(keys):
            return rotated, options
        return rotated, options_at(options, in_arrays, consecutive=is_consecutive)

    def _rotated(
        self, function: str, name: str, x: Array, positions: Callable[[], Sequence[Row]], new: NewTokens
    ) -> Array:
        """Rotate tokens at their positions; packed ones are in the order of the rows."""
        if (rotary := self._rotary) is None or not any(rows := positions()):
            return x
        factory = factory_like(function, x)
        if new.starts is None:
            places = token_rows.to_rotate(factory, rows)
        else:
            with factory.computing():
                # Each sequence may have tables of its own, which are joined for one rotation of all tokens.
                rotary, numbers = rotary._of_packed(function, rows)
            places = token_rows.int32_array(factory, numbers)
        return rotate(rotary, function, name, x, places, self._layout)

    def __repr__(self) -> str:
        shown = {"key_blocks": self._shown("key_blocks"), "lengths": str(self.lengths)}
        return self._call_text("PagedKVCache", shown | token_rows.shown(self._positions))

    def _repr_html_(self) -> str | None:
        """Return the table that a notebook shows, with the first sequences; None if the repr says it all."""
        pages, pool = self._tokens, self._tokens.pools["key_blocks"]
        if not is_array(pool):  # in a tree of JAX, anything may stand where an array was
            return None
        in_use, length = pages.blocks_in_use(), len(pages.lengths)
        columns = {
            "sequence": [*map(str, range(length))],
            "tokens": [f"{tokens:,}" for tokens in pages.lengths],
            "blocks": [", ".join(map(str, row)) for row in in_use],
        }
        if not token_rows.are_slots(self._positions):
            columns["positions"] = [*map(token_rows.shown_row, self._positions)]
        sequences = [*zip(*columns.values(), strict=True)]
        if length > MOST_SEQUENCES:
            more = "...", f"and {length - MOST_SEQUENCES:,} more", *[""] * (len(columns) - 2)
            sequences[MOST_SEQUENCES:] = [more]
        used = f"{len({*chain(*in_use)}):,} of {pool.shape[0]:,} blocks of {pages.size} tokens are in use"
        shown = f"{self._facts('key_blocks')}\n{used}; bytes: {self.nbytes:,}{self._saving()}"
        return html_table(f"PagedKVCache: blocks {shown}", sequences, [*columns])
