"""The attention of caches: the public methods of KVCache and PagedKVCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, Unpack, cast

from .._call import quantised
from .._call.options import CallOptions, Keywords, takes_options
from .._call.paged import attend
from .._call.prepared_call import PreparedCall
from .._checks.keywords import check_lse_base, explains_keywords
from .._libraries import has_override, library_of
from .._libraries.protocols import AnyArray, Array
from ..attention import compute_output, compute_state
from ..masks import Mask
from ..states import AttentionState, to_base
from .paged_tokens import PagedTokens
from .positions import TokenPositionsLike
from .quantisation import Quantisation
from .tokens import CachedTokens

A = TypeVar("A", bound=AnyArray)


@explains_keywords
class CacheAttention(CachedTokens[A]):
    """Attention over the tokens of a KVCache."""

    __slots__ = ()

    @takes_options(Keywords, is_causal=True)
    def attend(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        positions: TokenPositionsLike | None = None,
        **keywords: Unpack[Keywords],
    ) -> A:
        """Return the attention of the last L tokens of the cache over all its tokens.

        Args:
            query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.
            attn_mask: A mask or an array. A query has the position of its token, also for masks and biases:
                `sliding_window(255, 0)` means the last 256 positions.
            positions: The positions of the queries, if these are not the last tokens of the cache: the position
                of the first query, or L integers, or an integer array (..., L). Pass `is_causal=False` too.
            is_causal: Query i attends to key j only if j <= i + S - L.

        Returns:
            (..., Hq, L, Ev), with the query's library, device and dtype.
        """
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        function = "KVCache.attend"
        rotated, options = self._placed(function, query, positions, options)
        if self._widens_tiles():
            call, output, _ = self._widened_attention(function, rotated, options, with_lse=False)
            return call.checked(cast(A, output))
        # With `queries_at_end` the causal mask counts from the last token, as the queries are the last ones.
        return compute_output(function, cast(A, rotated), self.key, self.value, options, queries_at_end=True)

    @takes_options(Keywords, is_causal=True)
    def attend_state(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        positions: TokenPositionsLike | None = None,
        lse_base: float | None = None,
        **keywords: Unpack[Keywords],
    ) -> AttentionState[A]:
        """Return what `attend` returns, and the log-sum-exp of the scores.

        `merge_states(..., layout=)` merges it with states over other keys, such as a prompt that texts share.
        The log-sum-exp includes the sinks, so pass them to only one of the states.

        Args:
            query: (..., Hq, L, E). All other arguments and errors are as in `attend`.
            lse_base: None for the natural logarithm; 2 for base 2, as in FlashInfer.

        Returns:
            `output`, as from `attend`, and `lse`, (..., Hq, L), in the dtype of the scores.
        """
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        function = "KVCache.attend_state"
        rotated, options = self._placed(function, query, positions, options)
        if self._widens_tiles():
            base = check_lse_base(function, lse_base)
            call, output, lse = self._widened_attention(function, rotated, options, with_lse=True)
            with call.computing():
                lse = call.remove_head_axis(to_base(cast(Array, lse), base))
            return AttentionState(call.checked(cast(A, output)), cast(A, lse))
        arrays = cast(A, rotated), self.key, self.value
        return compute_state(function, *arrays, options, lse_base=lse_base, queries_at_end=True)

    def _widens_tiles(self) -> bool:
        """Return whether quantised tokens are widened tile by tile. Arrays in chunks are widened by tasks."""
        key = self._slots.buffers.arrays["key"]
        return self._quantisation is not None and library_of(key).chunks is None and not has_override(key)

    def _widened_attention(
        self, function: str, query: AnyArray, options: CallOptions, *, with_lse: bool
    ) -> tuple[PreparedCall, Array, Array | None]:
        """Return the checked call, its output as the caller gets it, and the log-sum-exp (..., Hq, L)."""
        quantisation = cast(Quantisation, self._quantisation)
        call = quantisation.call(function, query, self._slots.arrays(), options)
        with call.computing():
            output, lse = quantised.attend(call, with_lse=with_lse)
            return call, call.result(output), lse


@explains_keywords
class PagedAttention(PagedTokens[A]):
    """Attention over the tokens of a PagedKVCache."""

    __slots__ = ()

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

        With `cu_seqlens_q`, each sequence has its own number of queries, so that one call computes the prompts
        of some sequences and the next token of others.

        Args:
            query: (N, Hq, L, E). With `cu_seqlens_q` the queries of all sequences are packed, (Hq, T, E), or
                (T, Hq, E) with `layout="...LHE"`. All other arguments and errors are as in
                `scaled_dot_product_attention`.
            attn_mask: A mask, which counts positions as in `KVCache`, or an array that broadcasts to (N, Hq, L,
                1), or to (N, Hq, 1, 1) if the queries are packed: sequences may have different S.
            cu_seqlens_q: The cumulative numbers of queries: N + 1 integers from 0 to T, as for
                `varlen_attention`. A sequence may have no query.
            positions: The positions of the queries, if these are not the last tokens of their sequences: that
                of the first, or L or (N, L) integers, static like the table; of packed queries, N or T
                integers, or N lists. Pass `is_causal=False` too.
            bias: A bias, or an array that broadcasts like one as `attn_mask`.
            is_causal: Query i attends to key j only if j <= i + length - L.
            scale: A number, or an array that broadcasts like one as `attn_mask`.
            sinks: (N, Hq) or (Hq,).

        Returns:
            (N, Hq, L, Ev), or packed like the query, with the query's library, device and dtype.
        """
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        paged = self._call("PagedKVCache.attend", query, positions, options, cu_seqlens_q)
        with paged.call.computing():
            output, _ = attend(paged, with_lse=False)
            result = cast(A, paged.call.result(output))
        return paged.call.checked(result)

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
            lse_base: None for the natural logarithm; 2 for base 2, as in FlashInfer.

        Returns:
            `output`, as from `attend`, and `lse`, (N, Hq, L), or (Hq, T) if the queries are packed, in the
                dtype of the scores.
        """
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        function = "PagedKVCache.attend_state"
        base = check_lse_base(function, lse_base)
        paged = self._call(function, query, positions, options, cu_seqlens_q)
        with paged.call.computing():
            output, lse = attend(paged, with_lse=True)
            lse = paged.call.as_caller(to_base(cast(Array, lse), base))
            state = AttentionState(cast(A, paged.call.result(output)), cast(A, lse))
        paged.call.checked(state.output)
        return state
