"""A cache in blocks of a shared pool, for many sequences of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

from .._checks.arrays import HLE, Layout, check_axes, check_one_kind
from .._checks.integers import check_integer_list, check_integer_rows, check_same_length, read_together
from .._checks.keywords import check_flag, check_integer, check_layout, explains_keywords
from .._checks.messages import brief
from .._display import array_facts
from .._display import table as html_table
from .._libraries import is_array, is_number, share_memory
from .._libraries.protocols import AnyArray, Array
from ..errors import ArgumentValueError
from ..positional.rotation import Rotation, check_fits_rotation, check_rotary
from . import blocks
from .attention import PagedAttention
from .memory import check_new_tokens, check_same_but_width, check_writeable, refuse_graph_values
from .quantisation import QUANTISED_NAMES, kinds

A = TypeVar("A", bound=AnyArray)
MOST_SEQUENCES = 8
"""The most sequences that a notebook shows."""


@explains_keywords
class PagedKVCache(PagedAttention[A]):
    """The keys and values of N sequences of different lengths, in blocks of a shared pool.

    Token t of sequence n is in block `block_table[n][t // size]`, at place `t % size`. You keep track of the
    free blocks; `with_table` gives a sequence its next block. `append` and `attend` take the same number of
    tokens for each sequence, or packed tokens (`cu_seqlens_k` and `cu_seqlens_q`).

    `attend` copies some blocks at a time. In NumPy, and in torch on the CPU without autograd, large decoding
    calls without a mask, a bias or dropout copy nothing, if blocks are finite and not shared.

    Shapes:
        `P` blocks in the pool, `size` tokens in a block, `N` sequences, `n` new tokens, `L` queries, `Hq` query
        heads, `H` key heads, `E` and `Ev` widths.

    Args:
        key_blocks: (P, H, size, E), or (P, size, H, E) with `layout="...LHE"`, as in flash-attention.
        value_blocks: (P, H, size, Ev), or (P, size, H, Ev) with `layout="...LHE"`.
        block_table: (N, blocks of a sequence): a list of lists, or an integer array of any library, static
            inside a jit. Only the blocks that a sequence needs are read.
        lengths: The tokens of each sequence: N integers, in a list or an array, static like the table.
        layout: The layout of all inputs and outputs.
        rotary: As in `KVCache`, but the keys in the pool must be rotated already.
        first_position: The position of the first token that the cache has of each sequence: one integer, or N.
            It is not 0 if older blocks were given back. See `KVCache` for what counts positions.
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
        self._quantisation, self._scales = None, {}
        check_layout(function, layout)
        pools = {"key_blocks": key_blocks, "value_blocks": value_blocks}
        refuse_graph_values(function, "a pool of blocks", pools)
        _, arrays = check_one_kind(function, pools)
        check_axes(function, {name: array.shape for name, array in arrays.items()}, 4)
        check_same_but_width(function, {name: array.shape for name, array in arrays.items()})
        check_rotary(function, rotary)
        if rotary is not None:
            check_fits_rotation(function, "key_blocks", arrays["key_blocks"].shape, rotary.width)
        self._layout, self._token_axis, self._rotary = layout, -2 if layout == HLE else -3, rotary
        # The caller's arrays, not copies: all caches over a pool see what `append` writes in place.
        self._key_blocks = arrays["key_blocks"]
        self._value_blocks = arrays["value_blocks"]
        self._set_sequences(function, block_table, lengths, first_position, positions)

    def _set_sequences(
        self, function: str, block_table: object, lengths: object, first_position: object, positions: object
    ) -> None:
        """Check the sequences of a cache over its pool, and set them."""
        # Both at once, so that a device is waited for once.
        block_table, lengths = read_together(self._key_blocks, block_table, lengths)
        self._table = check_integer_rows(function, "block_table", block_table, least=-1)  # -1 is no block
        token_counts = check_integer_list(function, "lengths", lengths)
        check_same_length(function, {"block_table": self._table, "lengths": token_counts})
        self._lengths = tuple(token_counts)
        self._positions = blocks.check_start_rows(function, first_position, positions, token_counts)
        blocks.check_pool_not_empty(function, len(token_counts), self.block_size)
        blocks.check_block_table(
            function, self._table, token_counts, self.block_size, self._key_blocks.shape[0]
        )

    def __repr__(self) -> str:
        quantisation, pool = self._quantisation, self._key_blocks
        shown = {"key_blocks": brief(pool) if quantisation is None else quantisation.shown(pool)}
        shown |= {"lengths": str(self.lengths), **blocks.shown_rows(self._positions)}
        shown |= {} if quantisation is None else {"per": repr(quantisation.per)}
        return f"PagedKVCache({', '.join(f'{name}={text}' for name, text in shown.items())})"

    def _repr_html_(self) -> str | None:
        """Return the table that a notebook shows, with the first sequences; None if the repr says it all."""
        if not is_array(pool := self._key_blocks):  # in a tree of JAX, anything may stand where an array was
            return None
        size = self.block_size
        facts, shown_bytes = array_facts(pool), f"{self.nbytes:,}"
        if self._quantisation is not None:
            pools = dict(zip(QUANTISED_NAMES, self._pools().values(), strict=True))
            facts = self._quantisation.facts(pool)
            shown_bytes += self._quantisation.shown_saving(self.nbytes, pools)
        in_use = [row[: -(-length // size)] for length, row in zip(self._lengths, self._table, strict=True)]
        header = ["sequence", "tokens", "blocks"]
        sequences = [
            [str(number), f"{length:,}", ", ".join(map(str, row))]
            for number, (length, row) in enumerate(zip(self._lengths, in_use, strict=True))
        ]
        if not blocks.are_slots(self._positions):
            header.append("positions")
            sequences = [
                [*cells, blocks.shown_row(row)] for cells, row in zip(sequences, self._positions, strict=True)
            ]
        left_out = len(sequences) - MOST_SEQUENCES
        more = [["...", f"and {left_out:,} more", *[""] * (len(header) - 2)]] if left_out > 0 else []
        used = f"{len({*chain(*in_use)}):,} of {pool.shape[0]:,} blocks of {size} tokens are in use"
        title = f"PagedKVCache: blocks {facts}\n{used}; bytes: {shown_bytes}"
        return html_table(title, [*sequences[:MOST_SEQUENCES], *more], header)

    def append(
        self,
        key: A,
        value: AnyArray,
        *,
        cu_seqlens_k: Sequence[int] | AnyArray | None = None,
        positions: int | Sequence[int] | Sequence[Sequence[int]] | AnyArray | None = None,
        in_place: bool = False,
    ) -> PagedKVCache[A]:
        """Return a cache with n more tokens in each sequence; with `cu_seqlens_k` each gets its own number.

        Args:
            key: (N, H, n, E), with the pool's library, device and dtype. With `cu_seqlens_k` the new tokens of
                all sequences are packed, (H, U, E), or (U, H, E) with `layout="...LHE"`.
            value: (N, H, n, Ev), or packed like the keys.
            cu_seqlens_k: The cumulative numbers of new tokens: N + 1 integers from 0 to U. [0, 5, 5, 6] appends
                5 tokens to the first sequence, none to the second, and one to the third.
            positions: The positions of the tokens, if they do not follow the last token of their sequence: that
                of the first, or n or (N, n) integers, static like the table; of packed tokens, N or U integers,
                or N lists.
            in_place: Write into the pool instead of copying it. Other caches over the same pool see the
                change. The pools of keys and values must not share memory.

        Raises:
            TypeError: The tokens have another library or dtype than the pool, or the pool is not writeable.
            ValueError: The shapes do not fit, a sequence has too few blocks, or two would write to one block.
        """
        function, pools = "PagedKVCache.append", self._pools()
        targets = self._block_shapes((len(self._lengths),) if cu_seqlens_k is None else ())
        passed: dict[str, AnyArray] = {"key": key, "value": value}
        like = kinds(self._quantisation, pools)
        new = check_new_tokens(function, passed, like, targets, self._token_axis)
        counts, starts, positions = self._new_tokens(function, "cu_seqlens_k", cu_seqlens_k, positions, new)
        lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        blocks.check_block_table(function, self._table, lengths, self.block_size, self._key_blocks.shape[0])
        writes = blocks.split_into_blocks(self._table, self._lengths, self.block_size, counts, starts)
        # Rows may name blocks that they do not use yet, which may be other sequences' or none.
        used_rows = [
            row[: -(-length // self.block_size)] for row, length in zip(self._table, lengths, strict=True)
        ]
        blocks.check_exclusive_blocks(function, [(write.sequence, write.block) for write in writes], used_rows)
        added = tuple(map(blocks.following_row, self._positions, counts))
        if positions is not None:
            added = blocks.check_rows(function, positions, counts, starts)
        new["key"] = self._rotated(function, "key", new["key"], added, starts)
        if self._quantisation is not None:
            new = self._quantisation.stored(new, self._token_axis)
        if check_flag(function, "in_place", in_place):
            check_writeable(function, "`in_place=True`", pools)
            if share_memory(self._key_blocks, self._value_blocks):  # interleaved views share no element
                rule = "`in_place` needs `key_blocks` and `value_blocks` that do not share memory"
                is_same = self._key_blocks is self._value_blocks
                got = {"value_blocks": "key_blocks" if is_same else "a view of the same numbers"}
                raise ArgumentValueError(function, rule, got, "Copy one of them.")
            blocks.write_tokens([*pools.values()], [*new.values()], writes, self._token_axis)
        else:
            copied = blocks.pools_with_tokens([*pools.values()], [*new.values()], writes, self._token_axis)
            pools = dict(zip(pools, copied, strict=True))
        joined = tuple(map(blocks.join_rows, self._positions, added))
        return self._with(self._table, joined, pools)

    def with_table(
        self,
        block_table: Sequence[Sequence[int]] | AnyArray,
        lengths: Sequence[int] | AnyArray,
        *,
        first_position: int | Sequence[int] | AnyArray = 0,
        positions: Sequence[Sequence[int]] | AnyArray | None = None,
    ) -> PagedKVCache[A]:
        """Return a cache of other sequences over the same pool. Nothing is copied.

        Args:
            block_table: (N, blocks of a sequence). All other arguments and errors are as in `PagedKVCache`.
        """
        cache = self._with(self._table, self._positions)
        cache._set_sequences("PagedKVCache.with_table", block_table, lengths, first_position, positions)
        return cache

    def drop_first(self, count: int | Sequence[int] | AnyArray) -> PagedKVCache[A]:
        """Return a cache without the first tokens of its sequences. The others keep their positions.

        Nothing is copied. The blocks that are no longer in the `block_table` are free.

        Args:
            count: The number of tokens, a multiple of `block_size`: one integer, or one for each sequence.
        """
        counts = self._counted("drop_first", count)
        for dropped in counts:
            if dropped % self.block_size:  # a sequence begins with a block
                rule = "`count` must be a multiple of the block size"
                hint = "Drop fewer tokens, and hide the others with `masks.sliding_window`."
                got = {"count": dropped, "block size": self.block_size}
                raise ArgumentValueError("PagedKVCache.drop_first", rule, got, hint)
        table = [row[n // self.block_size :] for row, n in zip(self._table, counts, strict=True)]
        kept = zip(self._positions, counts, strict=True)
        return self._with(table, tuple(blocks.part_of_row(row, n, len(row)) for row, n in kept))

    def drop_last(self, count: int | Sequence[int] | AnyArray) -> PagedKVCache[A]:
        """Return a cache without the last tokens of its sequences, such as drafts that were rejected.

        Nothing is copied. Tokens that are appended in place overwrite the dropped tokens in the pool.

        Args:
            count: The number of tokens: one integer, or one for each sequence.
        """
        kept = zip(self._positions, self._counted("drop_last", count), strict=True)
        return self._with(self._table, tuple(blocks.part_of_row(row, 0, len(row) - n) for row, n in kept))

    def take_entries(self, entries: Sequence[int] | AnyArray) -> PagedKVCache[A]:
        """Return a cache of some sequences, in any order and also repeatedly, as a beam search needs.

        Nothing is copied. If you take a sequence twice, copy the block that is written to before you append.

        Args:
            entries: The numbers of the sequences: a list, a range or an integer array.
        """
        function, most = "PagedKVCache.take_entries", len(self._lengths) - 1
        numbers = check_integer_list(function, "entries", entries, most=most)
        blocks.check_pool_not_empty(function, len(numbers), self.block_size, "entries")
        return self._with([self._table[n] for n in numbers], tuple(self._positions[n] for n in numbers))

    def _counted(self, method: str, count: object) -> list[int]:
        """Check how many tokens are dropped: one integer, or one for each sequence."""
        function = f"PagedKVCache.{method}"
        if is_number(count):
            count = [check_integer(function, "count", count, least=0)] * len(self._lengths)
        counts = check_integer_list(function, "count", count)
        check_same_length(function, {"count": counts, "cache.lengths": self._lengths})
        for sequence, (dropped, length) in enumerate(zip(counts, self._lengths, strict=True)):
            if dropped > length:
                rule = f"`count` must be at most the tokens of sequence {sequence}"
                raise ArgumentValueError(function, rule, {"count": dropped, "tokens": length})
        return counts

    def _with(
        self,
        table: list[list[int]],
        positions: tuple[blocks.Row, ...],
        pools: Mapping[str, Array] | None = None,
    ) -> PagedKVCache[A]:
        """Return a cache with other sequences, or over other pools."""
        cache = object.__new__(PagedKVCache)  # what it is made of has been checked
        cache._layout, cache._token_axis, cache._rotary = self._layout, self._token_axis, self._rotary
        cache._table, cache._positions, cache._lengths = table, positions, tuple(map(len, positions))
        pools = {**(pools or self._pools())}
        cache._key_blocks, cache._value_blocks = pools.pop("key_blocks"), pools.pop("value_blocks")
        cache._quantisation, cache._scales = self._quantisation, pools
        return cache
