"""Attention over the tokens of a KVCache."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from sdpa_xp._call.options import CallOptions
from sdpa_xp._checks.arrays import Layout, check_plain_array, headed
from sdpa_xp._checks.keywords import Implementation, explains_keywords
from sdpa_xp._libraries.jax_trees import Tree
from sdpa_xp._libraries.protocols import AnyArray, Dtype, Rng
from sdpa_xp.attention import compute_output, compute_state
from sdpa_xp.biases import Bias
from sdpa_xp.caches.at_positions import count_positions, options_at
from sdpa_xp.caches.checks import check_in_cache, check_query_of_cache
from sdpa_xp.caches.memory import TokenSlots, in_context_of_keys
from sdpa_xp.caches.positions import (
    TokenPositionsLike,
    check_positions,
    factory_like,
    last_positions,
    positions_array,
)
from sdpa_xp.masks import Mask
from sdpa_xp.positional.positions import Consecutive
from sdpa_xp.positional.rotation import Positions, Rotation, rotate
from sdpa_xp.states import AttentionState

A = TypeVar("A", bound=AnyArray)


@explains_keywords
class CacheAttention(Tree, Generic[A]):
    """The tokens of a KVCache, and attention over them: it places queries and options among the tokens."""

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
        factory = factory_like("KVCache", self._slots.buffers.arrays["key"])
        return cast(A, positions_array(factory, self._positions, self._slots.length))

    def attend(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        positions: TokenPositionsLike | None = None,
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
        """Return the attention of the last L tokens of the cache over all its tokens.

        Args:
            query: (..., Hq, L, E).
            attn_mask: A mask or an array. This argument and the next ones are as in
                `scaled_dot_product_attention`. A query has the position of its token, also for masks and
                biases: `sliding_window(255, 0)` means the last 256 positions.
            positions: The positions of the queries, if these are not the last tokens of the cache: the position
                of the first query, or L integers, or an integer array (..., L). Pass `is_causal=False` too.
            bias: A bias, or an array that broadcasts to (..., Hq, L, S).
            is_causal: Query i attends to key j only if j <= i + S - L.
            scale: A number, or an array that broadcasts to (..., Hq, L, 1).
            softcap: A positive number; None or 0 is off.
            sinks: (..., Hq).
            dropout_p: From 0 to 1.
            rng: Required if dropout_p > 0.
            softmax_dtype: float32, float64 or None.
            implementation: `"xp"` or None.

        Returns:
            (..., Hq, L, Ev), with the query's library, device and dtype.

        Raises:
            TypeError: As for `scaled_dot_product_attention`.
            ValueError: As for `scaled_dot_product_attention`; or there are more queries than tokens, unless
                `is_causal` is False.
        """
        mask, layout = attn_mask, self._layout
        options = CallOptions(
            mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
        )
        function = "KVCache.attend"
        rotated, options = self._placed(function, query, positions, options)
        return compute_output(function, cast(A, rotated), self.key, self.value, options, queries_at_end=True)

    def attend_state(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        positions: TokenPositionsLike | None = None,
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

        `merge_states(..., layout=)` merges it with states over other keys, such as a prompt that texts share.

        Args:
            query: (..., Hq, L, E). All arguments are as in `attend`.
            attn_mask: A mask or an array.
            positions: The positions of the queries, if these are not the last tokens of the cache.
            bias: A bias, or an array that broadcasts to (..., Hq, L, S).
            is_causal: Query i attends to key j only if j <= i + S - L.
            scale: A number, or an array that broadcasts to (..., Hq, L, 1).
            softcap: A positive number; None or 0 is off.
            sinks: (..., Hq). The log-sum-exp includes them, so pass them to only one of the states that you
                merge.
            dropout_p: From 0 to 1.
            rng: Required if dropout_p > 0. Dropout does not change the log-sum-exp.
            softmax_dtype: float32, float64 or None.
            lse_base: None for the natural logarithm; 2 for base 2, as in FlashInfer.
            implementation: `"xp"` or None.

        Returns:
            `output`, as from `attend`, and `lse`, (..., Hq, L), in the dtype of the scores.

        Raises:
            TypeError: As for `attend`.
            ValueError: As for `attend`; or `lse_base` is neither None nor 2.
        """
        mask, layout = attn_mask, self._layout
        options = CallOptions(
            mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
        )
        function = "KVCache.attend_state"
        rotated, options = self._placed(function, query, positions, options)
        arrays = cast(A, rotated), self.key, self.value
        return compute_state(function, *arrays, options, lse_base=lse_base, queries_at_end=True)

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
        are_slots = is_consecutive and cast(Consecutive, self._positions).is_from_zero
        if are_slots and self._rotary is None:  # most steps of a decoder
            return array, options
        rotated = rotate(self._rotary, function, "query", array, positions_of, self._layout)
        if are_slots:
            return rotated, options
        queries = headed(array.shape, self._layout)[-2]
        if positions is not None:  # refused also where nothing reads them
            positions_of(queries)
        if not count_positions(options, consecutive=is_consecutive):
            return rotated, options
        factory = factory_like(function, array)
        places = (positions_of(queries), queries), (self._positions, length)
        return rotated, options_at(
            options, *(positions_array(factory, *place) for place in places), consecutive=is_consecutive
        )
