"""A cache of keys and values, for decoding token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack, cast

from .._attention import compute_output, compute_state
from .._call import prepare
from .._call.options import CallOptions, Keywords, StatisticsKeywords, takes_options
from .._checks.arrays import Layout, check_one_kind, check_plain_array, headed
from .._checks.keywords import LARGEST_INTEGER, check_flag, check_integer, check_lse_base, explains_keywords
from .._checks.score_arrays import IntegersLike
from .._display import table
from .._libraries import dtype_name, has_override, is_array, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Dtype, Shape
from .._sequences import attend_quantised
from .._states import AttentionState, returned_output, returned_state
from .._statistics import AttentionStatistics, StatisticName, check_request, returned_statistics
from ..errors import ArgumentValueError
from ..masks import Mask
from ..positional.positions import Consecutive
from ..positional.rotation import Positions, Rotation, rotate
from . import positions as token_positions
from .at_positions import options_at
from .cache import Cache, refuse_graph_values
from .positions import TokenPositionsLike
from .quantisation import QUANTISED_NAMES, bytes_of, check_same_but_width, check_stored
from .slots import Slots, check_writeable, context_of, slots_of

A = TypeVar("A", bound=AnyArray)


@explains_keywords
class KVCache(Cache[A]):
    """The keys and values of the tokens so far, for decoding one token after the other.

    A cache does not change: `append` returns one with more tokens.

    Args:
        key: (..., H, S, E): the keys of the prompt. S may be 0. Without `capacity`, arrays are not copied.
        value: (..., H, S, Ev); None with `value_width`.
        value_width: Ev, if the values are the first Ev numbers of the keys, as in latent attention: they are
            stored once. `append` takes keys alone then.
        capacity: The number of tokens to reserve memory for, so that `append(..., in_place=True)` copies only
            the new tokens. It needs writeable arrays (NumPy, CuPy, torch).
        layout: "...HLE", or "...LHE" with heads after the length, of all inputs and outputs.
        rotary: A `positional.Rotary` or `positional.RotaryTables`, which rotates each key and each query by its
            position.
        rotated: Whether `key` is rotated already, such as the `key` of another cache with a rotary.
        first_position: The position of the first token, such as n if n tokens are missing in front of it, or -p
            for p tokens of padding on the left: one, or one for each batch entry, as a list or an integer array
            that broadcasts to (...).
        positions: The position of each token, if they do not follow one another: S integers, or an integer
            array (..., S), such as the `positions` of another cache.

    Positions:
        A token keeps its position when others are dropped. `rotary`, and masks and biases with a formula, count
        positions. Arrays, `is_causal`, and the masks `document`, `padding`, `blocks`, `keys`, `tree` and
        `neighbourhood` count tokens as they lie in the cache.

    Raises:
        TypeError: The arrays have several libraries or dtypes, or are not writeable although there is a
            `capacity`; or the positions are not integers.
        ValueError: The shapes do not fit, the arrays are on several devices, or the capacity is below S.

    Examples:
        >>> import numpy as np
        >>> token = np.ones((1, 1, 2))  # one head, one token
        >>> cache = KVCache(token, token, capacity=8)
        >>> for _ in range(3):
        ...     cache = cache.append(token, token, in_place=True)
        >>> len(cache), cache.attend(token).shape
        (4, (1, 1, 2))

    References:
        Pope et al., "Efficiently Scaling Transformer Inference", arXiv 2211.05102, section 2.1.
    """

    __slots__ = ()
    _names = "key", "value"
    _positions: Positions
    _tokens: Slots

    def __init__(
        self,
        key: A,
        value: AnyArray | None = None,
        *,
        value_width: int | None = None,
        capacity: int | None = None,
        layout: Layout = "...HLE",
        rotary: Rotation | None = None,
        rotated: bool = False,
        first_position: IntegersLike = 0,
        positions: TokenPositionsLike | None = None,
    ) -> None:
        function, room = "KVCache", None
        self._begin(function, layout, rotary)
        if value_width is not None and (value is not None or rotary is not None):
            rule = "`value_width` needs neither a `value` nor a `rotary`, which would rotate the values too"
            raise ArgumentValueError(function, rule, {"value_width": value_width, "rotary": rotary})
        tokens = {"key": key, "value": value} if value_width is None else {"key": key}
        _, arrays = check_one_kind(function, tokens)
        if value_width is None:
            check_same_but_width(function, arrays)
        else:  # the values are a part of the keys
            most = headed(arrays["key"].shape, layout)[-1]
            self._value_width = check_integer(function, "value_width", value_width, least=1, most=most)
        length = arrays["key"].shape[self._axis]
        self._positions = token_positions.start(function, first_position, positions, length, arrays["key"])
        if not check_flag(function, "rotated", rotated):
            arrays["key"] = rotate(rotary, function, "key", arrays["key"], self._positions, layout)
        self._check_rotated(function, arrays["key"].shape)
        if capacity is not None:  # values of a graph cannot be written to
            refuse_graph_values(function, "`capacity`", arrays)
            room = check_integer(function, "capacity", capacity, least=length) - length
        self._tokens = slots_of(arrays, self._axis, room, are_of_caller=capacity is None)
        if capacity is not None:
            check_writeable(function, "`capacity`", self._tokens.buffers.arrays)

    @classmethod
    def from_stored(
        cls,
        stored: Mapping[str, A],
        *,
        dtype: Dtype | None = None,
        layout: Layout = "...HLE",
        rotary: Rotation | None = None,
        first_position: IntegersLike = 0,
        positions: TokenPositionsLike | None = None,
    ) -> Self:
        """Return a quantised cache of the arrays that another one has `stored`, from a file or in a graph.

        Args:
            stored: The arrays by name; they are not copied, and keys are stored rotated. All other arguments
                are as in `KVCache`.
            dtype: The dtype of keys that are appended, and the narrowest of queries; None is the scales'.

        Raises:
            TypeError: The codes are not int8 or uint8, or a scale has a dtype that does not fit.
            ValueError: A name is missing or too many, or the shapes do not fit.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> cache = KVCache(np.ones((2, 3, 8)), np.ones((2, 3, 8))).quantised("int8")
            >>> KVCache.from_stored(cache.stored)
            KVCache(key=<float64 (2, 3, 8) as int8>, value=<float64 (2, 3, 8) as int8>, per='token')
        """
        function = "KVCache.from_stored"
        cache = object.__new__(cls)
        cache._begin(function, layout, rotary)
        arrays, cache._quantisation = check_stored(function, stored, dtype, cache._axis)
        cache._tokens = slots_of(arrays, cache._axis, are_of_caller=True)
        cache._check_rotated(function, cache._shape("key"))
        length, key = cache._tokens.length, arrays["key"]
        cache._positions = token_positions.start(function, first_position, positions, length, key)
        return cache

    def __len__(self) -> int:
        """Return the number of tokens in the cache."""
        return self._tokens.length

    @property
    def key(self) -> A:
        """The keys of the tokens so far, (..., H, S, E); rotated, if the cache has a `rotary`.

        A quantised cache returns a copy of what it stores, in the dtype of the keys that are appended.
        """
        return cast(A, self._wide("key"))

    @property
    def value(self) -> A:
        """The values of the tokens so far, (..., H, S, Ev); see `key`."""
        return cast(A, self._wide("value"))

    @property
    def stored(self) -> dict[str, A]:
        """The arrays that the tokens are stored in, by name: "key" and, without a `value_width`, "value".

        Those of a quantised cache are int8, or uint8 with two numbers in a byte, beside "key_scale",
        "value_scale" and, with `per="channel"`, "key_channels": what `from_stored` takes.
        """
        return cast(dict[str, A], self._stored())

    @property
    def positions(self) -> A:
        """The positions of the tokens so far, int32: (S,), or (..., S) if batch entries differ."""
        key = self._tokens.buffers.arrays["key"]
        with context_of(key):
            return cast(A, token_positions.as_array("KVCache", key, self._positions, self._tokens.length))

    def append(
        self,
        key: A,
        value: AnyArray | None = None,
        *,
        positions: TokenPositionsLike | None = None,
        in_place: bool = False,
    ) -> Self:
        """Return a cache with n more tokens.

        Args:
            key: (..., H, n, E), with the cache's library, device and dtype.
            value: (..., H, n, Ev); None if the cache has a `value_width`.
            positions: The positions of the tokens, if they do not follow the last token: that of the first, or
                n integers, or an integer array (..., n).
            in_place: Write into the memory that `capacity` reserved. You cannot append to this cache in place
                again, and torch can no longer differentiate attention that was computed from it. If False, the
                new cache is a copy without reserved memory.

        Returns:
            The new cache. With `in_place`, it shares its arrays with this one.

        Raises:
            TypeError: The tokens have another library or dtype than the cache.
            ValueError: The shapes or devices do not fit, the memory is too small, or this cache was appended to
                in place already.
        """
        function, length, axis = "KVCache.append", self._tokens.length, self._axis
        with context_of(self._tokens.buffers.arrays["key"]):
            new = self._check_new(function, key, value)
            count, like = new["key"].shape[axis], new["key"]
            # A key is rotated once, when it comes, and not at each step that attends to it.
            added: Positions = token_positions.after(self._positions, length)
            if positions is not None:
                added = token_positions.check(function, positions, count, like.shape[:-3], like)
            new["key"] = rotate(self._rotary, function, "key", like, added, self._layout)
            joined = token_positions.joined(function, like, self._positions, length, added, count)
            if self._quantisation is not None:
                new = self._quantisation.stored(new, axis)
            if check_flag(function, "in_place", in_place):
                return self._with(self._tokens.append(function, new), joined)
            xp, old = namespace_of(like), self._tokens.arrays()
            arrays = {name: xp.concat([old[name], new[name]], axis=axis) for name in new}
            return self._with(slots_of(arrays, axis), joined)

    def drop_first(self, count: int) -> Self:
        """Return a cache without its first `count` tokens. The others keep their positions.

        Nothing is copied. If you append in place, a capacity of twice the tokens is enough to roll.

        Args:
            count: From 0 to S.
        """
        return self._without(self._counted("drop_first", count), 0)

    def drop_last(self, count: int) -> Self:
        """Return a cache without its last `count` tokens, such as a draft that was rejected.

        Nothing is copied. Appending in place overwrites the dropped tokens, also in arrays that you read
        before; caches that have these tokens raise an error when used.

        Args:
            count: From 0 to S.
        """
        return self._without(0, self._counted("drop_last", count))

    def take_tokens(self, slots: Sequence[int] | AnyArray) -> Self:
        """Return a copy of some tokens, which keep their positions, without reserved memory.

        Use it to evict tokens, or to keep the accepted path of a draft that branches.

        Args:
            slots: The numbers of the tokens, from 0 to S - 1: n integers, as a list, a range or an integer
                array. A cache with one batch axis also takes an array (B, n), one row for each batch entry.
        """
        function, array, axis = "KVCache.take_tokens", self._tokens.read("key"), self._axis
        with context_of(array):
            length = self._tokens.length
            index = token_positions.check_slots(function, "slots", slots, length, "S", array)
            if index.ndim > 1 and (index.ndim != 2 or array.ndim != 4 or index.shape[0] != array.shape[0]):
                rule = "`slots` must be (n,), or (B, n) with one row for each entry of one batch axis"
                got = {"slots.shape": index.shape, "cache.key.shape": self._shape("key")}
                raise ArgumentValueError(function, rule, got)
            if index.shape[-1] == 0:  # the position of the next token is left, which no index would say
                return self._without(length, 0)
            positions = token_positions.as_array(function, array, self._positions, length)
            elements = token_positions.elements_at
            arrays = {name: elements(tokens, index, axis) for name, tokens in self._tokens.arrays().items()}
            return self._with(slots_of(arrays, axis), elements(positions, index, -1))

    def take_entries(self, entries: Sequence[int] | AnyArray) -> Self:
        """Return a copy of some batch entries, in any order and also repeatedly, as a beam search needs.

        Args:
            entries: The numbers of the entries on the first axis: a list, a range or an integer array.
        """
        function, key = "KVCache.take_entries", self._tokens.read("key")
        if key.ndim < 4:
            rule = "the cache must have batch entries, on an axis before the heads"
            raise ArgumentValueError(function, rule, {"cache.key.shape": self._shape("key")})
        with context_of(key):
            index = token_positions.check_slots(function, "entries", entries, key.shape[0], "B", key)
            if index.ndim != 1:
                rule = "`entries` must have one axis"
                raise ArgumentValueError(function, rule, {"entries.shape": index.shape})
            positions = token_positions.of_entries(self._positions, index, key.shape[:-3])
            arrays = {name: token_positions.elements_at(x, index, 0) for name, x in self._stored().items()}
            channels, quantisation = arrays.pop("key_channels", None), self._quantisation
            quantisation = quantisation and replace(quantisation, key_channels=channels)
            return self._with(slots_of(arrays, self._axis), positions, quantisation)

    def quantised(self, dtype: Literal["int8", "int4"], *, per: Literal["token", "channel"] = "token") -> Self:
        r"""Return a cache that stores its tokens, and those appended to it, as integers.

        Each token takes 8 bytes more, for its scales. A step widens a tile at a time. Tokens are rotated before
        they are stored.

        Args:
            dtype: "int8", or "int4" with two numbers in a byte, which needs an even E and Ev.
            per: "token" gives each token one step, its largest magnitude / 127 (/ 7 for int4). "channel" also
                divides keys by the magnitudes of their channels, which are measured now: call it after the
                prompt.

        Returns:
            The new cache, a copy with the same capacity.

        Raises:
            ValueError: `dtype` or `per` is another word, a width is odd, the cache is quantised already, or it
                has no tokens to measure channels on.

        Numerics:
            A stored number is wrong by at most half a step: $|k_{jc} - k'_{jc}| \le \delta_{jc} / 2$, where
            $\delta_{jc}$ is the scale of token j, times the magnitude of channel c. So a score, capped or not,
            is wrong by at most $\epsilon_i = \max_j |scale| \sum_c |q_{ic}| \delta_{jc} / 2$, and an element of
            the output, without dropout, by at most

            $$\max_j \delta^v_j / 2 + \tanh(\epsilon_i / 2) \, (\max_j v_{jc} - \min_j v_{jc})$$

            over the keys j that query i attends to (and a value of 0, if there are sinks), and by what rounding
            adds. A token with a NaN or inf is NaN in all its numbers, and shows in the rows that attend to it.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> tokens = np.random.default_rng(0).normal(size=(8, 100, 64)).astype("float32")
            >>> cache = KVCache(tokens, tokens)
            >>> cache.nbytes, cache.quantised("int8").nbytes
            (409600, 108800)

        References:
            Liu et al., "KIVI", arXiv 2402.02750, section 3, for keys by channel and values by token.
        """
        slots, arrays, axis = self._tokens, self._tokens.arrays(), self._axis
        with context_of(arrays["key"]):
            quantisation = self._new_quantisation("KVCache.quantised", dtype, per, arrays["key"], (axis,))
            tokens = slots_of(quantisation.stored(arrays, axis), axis, slots.room or None)
            return self._with(tokens, self._positions, quantisation)

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
            query: (..., Hq, L, E), in the dtype of the cache or in a wider one, such as float32 for a cache in
                float16, which is exact: keys and values are widened a tile at a time, but for a jit of JAX. All
                other arguments and errors are as in `scaled_dot_product_attention`.
            attn_mask: A mask or an array. A query has the position of its token, also for masks and biases:
                `sliding_window(255, 0)` means the last 256 positions.
            positions: The positions of the queries, if these are not the last tokens: that of the first, or L
                integers, or an integer array (..., L). Pass `is_causal=False` too.
            is_causal: Query i attends to key j only if j <= i + S - L.

        Returns:
            (..., Hq, L, Ev), with the query's library, device and dtype.
        """
        return cast(A, self._attended(query, positions, attn_mask, keywords))

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

        `merge_states(..., layout=)` merges it with states over other keys. Pass sinks to only one of them.

        Args:
            query: (..., Hq, L, E). All other arguments and errors are as in `attend`.
            lse_base: As in `attention_state`.

        Returns:
            `output`, as from `attend`, and `lse`, (..., Hq, L), in the dtype of the scores.
        """
        state = self._attended(query, positions, attn_mask, keywords, returns_state=True, lse_base=lse_base)
        return cast("AttentionState[A]", state)  # which torch.compile cannot trace without quotes

    @takes_options(StatisticsKeywords, is_causal=True)
    def statistics(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        of: StatisticName | Sequence[StatisticName],
        top_k: int | None = None,
        block_size: int | tuple[int, int] | None = None,
        positions: TokenPositionsLike | None = None,
        **keywords: Unpack[StatisticsKeywords],
    ) -> AttentionStatistics[A]:
        """Compute statistics of the scores and weights of `attend`, without an L x S array.

        Args:
            query: (..., Hq, L, E). All other arguments and errors are as in `attend`.
            of: As in `attention_statistics`, such as "key_sums" to find the tokens that are attended least.
            top_k: As in `attention_statistics`.
            block_size: As in `attention_statistics`.

        Returns:
            The statistics as attributes. Their indices and their S count the tokens in the cache.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> cache = KVCache(np.ones((1, 3, 2)), np.ones((1, 3, 2)))
            >>> cache.statistics(np.ones((1, 2, 2)), of="key_sums").key_sums.round(3)
            array([[0.833, 0.833, 0.333]])
        """
        function = "KVCache.statistics"
        request = check_request(function, of, top_k, block_size)
        inputs, options, shapes = self._inputs(function, query, positions, attn_mask, keywords)
        inputs = {name: array for name, array in inputs.items() if not name.startswith("value")}
        call = prepare(function, inputs, options, queries_at_end=True, cache_shapes=shapes)
        return returned_statistics(call, request)

    def _attended(
        self, query: AnyArray, *passed: Any, returns_state: bool = False, lse_base: object = None
    ) -> Any:
        """Return the output, or the state with a log-sum-exp to `lse_base`; `passed` goes on to `_inputs`."""
        function = "KVCache.attend_state" if returns_state else "KVCache.attend"
        inputs, options, shapes = self._inputs(function, query, *passed)
        if shapes is not None:
            call = prepare(function, inputs, options, queries_at_end=True, cache_shapes=shapes)
            compute = partial(attend_quantised, call)
            if returns_state:
                return returned_state(call, compute, check_lse_base(function, lse_base))
            return returned_output(call, compute)
        # With `queries_at_end` the causal mask counts from the last token, as the queries are the last ones.
        array, key, value = inputs.values()
        if returns_state:
            return compute_state(function, array, key, value, options, lse_base=lse_base, queries_at_end=True)
        return compute_output(function, array, key, value, options, queries_at_end=True)

    def _inputs(
        self, function: str, query: AnyArray, positions: object, attn_mask: object, keywords: Any
    ) -> tuple[dict[str, Array], CallOptions, tuple[Shape, Shape] | None]:
        """Return the arrays of a call, the query rotated; its options; and the shapes of quantised tokens."""
        options = CallOptions.from_keywords(attn_mask, keywords, is_causal=True, layout=self._layout)
        array, cached = check_plain_array(function, "query", query), self._tokens.buffers.arrays["key"]
        is_wider = self._check_query(function, array, cached)
        if len(array.shape) > 2:  # others are refused below, as in every call
            with context_of(cached):
                array, options = self._placed(function, array, positions, options)
        # Quantised tokens are widened tile by tile; arrays in chunks by tasks.
        if self._quantisation is not None and library_of(cached).chunks is None and not has_override(cached):
            return {"query": array, **self._stored()}, options, (self._shape("key"), self._shape("value"))
        # For a wider query, keys are widened tile by tile too. But the forms of a graph take one dtype.
        is_cast = is_wider and (self._quantisation is not None or has_override(array, cached))
        dtype = dtype_name(array.dtype) if is_cast else ""
        return {"query": array, **{name: self._wide(name, dtype) for name in self._names}}, options, None

    def _placed(
        self, function: str, query: Array, positions: object, options: CallOptions
    ) -> tuple[Array, CallOptions]:
        """Return the query, rotated by its positions, and the options with masks and biases that know them."""
        keys, length, queries = self._positions, self._tokens.length, headed(query.shape, self._layout)[-2]
        is_consecutive = positions is None and isinstance(keys, Consecutive)
        like = query.shape[:-3], query, "query"
        # Refused also where nothing reads them.
        passed = None if positions is None else token_positions.check(function, positions, queries, *like)

        def of_queries() -> Positions:
            return token_positions.last(function, keys, length, queries) if passed is None else passed

        def in_arrays() -> list[Array]:
            places = (of_queries(), queries), (keys, length)
            return [token_positions.as_array(function, query, *place) for place in places]

        rotated = query
        if self._rotary is not None:
            rotated = rotate(self._rotary, function, "query", query, of_queries(), self._layout)
        if is_consecutive and cast(Consecutive, keys).is_from_zero:  # most steps of a decoder
            return rotated, options
        return rotated, options_at(options, in_arrays, consecutive=is_consecutive)

    def _counted(self, method: str, count: int) -> int:
        length = self._tokens.length
        most = length if isinstance(length, int) else LARGEST_INTEGER  # or a name, in a graph
        return check_integer(f"KVCache.{method}", "count", count, least=0, most=most)

    def _without(self, first: int, last: int) -> Self:
        """Return the cache without its first and its last tokens."""
        if first == last == 0:
            return self
        slots, key = self._tokens, self._tokens.read("key")
        with context_of(key):
            positions = token_positions.without(self._positions, slots.length, first, last)
            if not has_override(key):
                return self._with(slots.without(first, last), positions)
            # A graph cuts its values, and has no buffers that several caches share.
            index = (..., slice(first, -last if last else None), *[slice(None)] * (-1 - self._axis))
            arrays = {name: array[index] for name, array in slots.arrays().items()}
            return self._with(slots_of(arrays, self._axis), positions)

    def _tree_state(self) -> dict[str, object]:
        positions = self._positions
        if isinstance(positions, Consecutive) and is_array(positions.first) and positions.shift:
            # What is not in an array is static, and a cache that a scan carries has to stay the same.
            positions = Consecutive(positions.first + positions.shift)
        state: dict[str, object] = {"positions": positions, "layout": self._layout, "rotary": self._rotary}
        more = {"quantisation": self._quantisation, "value_width": self._value_width}
        # What a cache is not does not change the tree that it is.
        state |= {name: x for name, x in more.items() if x is not None}
        return {**self._tokens.arrays(), **state}

    def _set_tree_state(self, state: dict[str, Any]) -> None:
        self._layout, self._rotary, self._positions = state["layout"], state["rotary"], state["positions"]
        self._quantisation, self._value_width = state.get("quantisation"), state.get("value_width")
        # A transform of JAX made the arrays, or put others in their place: none is written to.
        arrays = {name: state[name] for name in QUANTISED_NAMES if name in state}
        self._tokens = slots_of(arrays, self._axis, are_of_caller=True)

    def __repr__(self) -> str:
        slots, shown = self._tokens, {name: self._shown(name) for name in self._stored_names}
        shown |= {} if self._value_width is None else {"value_width": str(self._value_width)}
        if isinstance(slots.length, int) and slots.room:  # a length of a graph may be a name
            shown = {"tokens": f"{slots.length:,} of {slots.buffers.capacity:,}", **shown}
        shown |= {} if self._axis == -2 else {"layout": repr(self._layout)}
        return self._call_text("KVCache", shown | token_positions.shown(self._positions))

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        slots, length = self._tokens, self._tokens.length
        room = f" of {slots.buffers.capacity:,}" if slots.room else ""
        rows = {
            "tokens": f"{length:,}{room}" if isinstance(length, int) else str(length),
            "axes": "..., heads, tokens, width" if self._axis == -2 else "..., tokens, heads, width",
            **{name: self._facts(name) for name in self._stored_names},
            "bytes": self._shown_bytes(),
            **token_positions.shown(self._positions),
            "rotary": "" if self._rotary is None else str(self._rotary),
        }
        return table("KVCache", [row for row in rows.items() if row[1]])

    def _shown_bytes(self) -> str:
        allocated = {**self._stored(), **self._tokens.buffers.arrays}.values()
        sizes = [size for array in allocated for size in getattr(array, "shape", [""])]
        # In a tree of JAX anything may stand where an array was, and a length of a graph may be a name.
        if not all(isinstance(size, int) for size in sizes):
            return ""
        used, most = self.nbytes, bytes_of(*allocated)
        return f"{used:,}{'' if used == most else f' of {most:,} allocated'}{self._saving()}"
