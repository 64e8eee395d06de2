"""The base of both attention layers: project, attend, combine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, Unpack, cast

from .._attention import attention_state, scaled_dot_product_attention
from .._call.options import Keywords
from .._call.reproducible import check_layer
from .._checks import brief
from .._checks.arrays import HLE, LHE, check_one_kind, check_plain_array, swap_heads_and_length
from .._checks.keywords import check_choice, check_number, explains_keywords, refuse_unknown_keywords
from .._libraries import accumulation_dtype, computing, dtype_name, is_array, namespace_of
from .._libraries.protocols import AnyArray, Array
from .._states import AttentionState
from .._weights import attention_weights
from ..caches.kv import KVCache
from ..caches.paged import PagedKVCache
from ..errors import ArgumentValueError
from ..masks import Mask
from .layer import Layer
from .linear import Linear, check_inputs

A = TypeVar("A", bound=AnyArray)


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Attention(Layer):
    """Projections of queries, keys and values, and attention between them."""

    query: Linear
    key: Linear
    value: Linear
    scale: float | AnyArray | None = field(default=None, kw_only=True)
    temperature: float | AnyArray = field(default=1.0, kw_only=True)
    _has_head_axis: ClassVar[bool] = True
    """Whether `weights` returns an axis of heads."""

    def __repr__(self) -> str:
        """Return the widths, the heads, and the options that are not the default."""
        maps = [self.query, self.key, self.value]
        if any(len(getattr(linear.weight, "shape", ())) < 2 for linear in maps):  # as for `Linear`
            return Layer.__repr__(self)
        widths = [*dict.fromkeys(str(linear.widths[0]) for linear in maps)]  # equal widths once, in order
        heads, key_heads = self.head_counts
        joined = self.value.widths[1] // key_heads * heads  # each query head has an output
        parts = [f"{', '.join(widths)} -> {joined if self._out is None else self._out.widths[1]}"]
        if self._has_head_axis:
            parts += [f"num_heads={heads}"] + ([] if key_heads == heads else [f"num_kv_heads={key_heads}"])
            parts += ["without out"] if self._out is None else []
        parts.append(dtype_name(self.query.weight.dtype))
        for name, default in {"scale": None, "temperature": 1.0, "sinks": None}.items():
            option = getattr(self, name, default)
            parts += [f"{name}={brief(option)}"] if is_array(option) or option != default else []
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def _out(self) -> Linear | None:
        """The projection of all heads together, if the layer has one."""
        return getattr(self, "out", None)

    @property
    def head_counts(self) -> tuple[int, int]:
        """The number of query heads, and the number of heads of keys and values."""
        return 1, 1

    @property
    def head_dim(self) -> int:
        """E, the width of one head of queries and keys."""
        return self.query.widths[1] // self.head_counts[0]

    @property
    def attention_options(self) -> dict[str, Any]:
        """`scale` and `sinks`, if they are not the default, as keywords for a call of your own."""
        sinks = getattr(self, "sinks", None)
        return self._scaling() | ({} if sinks is None else {"sinks": sinks})

    def __call__(
        self,
        query: A,
        key: AnyArray | None = None,
        value: AnyArray | None = None,
        attn_mask: Mask | AnyArray | None = None,
        **keywords: Unpack[Keywords],
    ) -> A:
        """Return the output of the layer.

        Args:
            query: (..., L, query_dim), with the library, device and dtype of the layer.
            key: (..., S, key_dim). None means the query: self-attention.
            value: (..., S, value_dim). None means the key.
            attn_mask: A mask of `sdpa_xp.masks`, or an array that broadcasts to (..., Hq, L, S); True = may
                attend.
            keywords: Those of `scaled_dot_product_attention` except `layout`; `scale` and `sinks` replace those
                of the layer. Errors are as there, and `reproducible` is refused: the projections are not.

        Returns:
            (..., L, out_dim).
        """
        heads = self.project(query, key, value)
        output: A = scaled_dot_product_attention(*heads, attn_mask, **self._options(keywords))
        return self.combine(output)

    def state(
        self,
        query: A,
        key: AnyArray | None = None,
        value: AnyArray | None = None,
        attn_mask: Mask | AnyArray | None = None,
        **keywords: Unpack[Keywords],
    ) -> AttentionState[A]:
        """Return the output of each head before `combine`, and the log-sum-exp of its scores.

        All arguments are as in a call of the layer. `merge_states` merges states over parts of the keys, and
        `combine(state.output)` is what a call with all keys returns.

        Returns:
            `output`, (..., Hq, L, Ev), and `lse`, (..., Hq, L).
        """
        heads = self.project(query, key, value)
        return attention_state(*heads, attn_mask, **self._options(keywords))

    def weights(
        self,
        query: A,
        key: AnyArray | None = None,
        attn_mask: Mask | AnyArray | None = None,
        **keywords: Unpack[Keywords],
    ) -> A:
        """Return how much each query attends to each key. All arguments are as in a call of the layer.

        Returns:
            (..., Hq, L, S), or (..., L, S) for a `SingleHeadAttention`.
        """
        q, k = self._heads({"query": query, "key": query if key is None else key})
        weights = cast(Array, attention_weights(q, k, attn_mask=attn_mask, **self._options(keywords)))
        return cast(A, weights if self._has_head_axis else weights[..., 0, :, :])

    def project(self, query: A, key: AnyArray | None = None, value: AnyArray | None = None) -> tuple[A, A, A]:
        """Return the queries, keys and values of all heads, as `scaled_dot_product_attention` takes them.

        Args:
            query: (..., L, query_dim).
            key: (..., S, key_dim). None means the query.
            value: (..., S, value_dim). None means the key.

        Returns:
            (..., Hq, L, E), (..., H, S, E) and (..., H, S, Ev).
        """
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self._heads({"query": query, "key": key, "value": value})
        return cast(tuple[A, A, A], (q, k, v))

    def project_key_value(self, key: A, value: AnyArray | None = None) -> tuple[A, A]:
        """Return the keys and values of all heads, as a `KVCache` takes them.

        Args:
            key: (..., S, key_dim).
            value: (..., S, value_dim). None means the key.

        Returns:
            (..., H, S, E) and (..., H, S, Ev).
        """
        k, v = self._heads({"key": key, "value": key if value is None else value})
        return cast(A, k), cast(A, v)

    def attend(
        self,
        query: A,
        cache: KVCache[A] | PagedKVCache[A],
        attn_mask: Mask | AnyArray | None = None,
        **keywords: Unpack[Keywords],
    ) -> A:
        """Return the output of the layer for queries that attend to a cache.

        Args:
            query: (..., L, query_dim): the last tokens in the cache, or any tokens with `is_causal=False`.
            cache: A `KVCache` or `PagedKVCache` of what `project_key_value` returns, with heads before the
                length.
            attn_mask: As for `KVCache.attend`.
            keywords: As for `KVCache.attend`, where `is_causal` is True by default.

        Returns:
            (..., L, out_dim).

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> from sdpa_xp.layers import MultiHeadAttention
            >>> layer = MultiHeadAttention.init(np.random.default_rng(0), 64, num_heads=8)
            >>> words = np.ones((2, 6, 64), np.float32)
            >>> cache = KVCache(*layer.project_key_value(words))
            >>> layer.attend(words[:, -1:], cache).shape
            (2, 1, 64)
        """
        # `_heads` puts the heads before the length, and a cache in the other layout would read them as tokens.
        check_choice(f"{type(self).__name__}.attend", "cache.layout", cache.layout, [HLE])
        (heads,) = self._heads({"query": query})
        return self.combine(cache.attend(cast(A, heads), attn_mask, **self._options(keywords)))

    def combine(self, heads: A) -> A:
        """Return the output of the layer, from the outputs of the heads: side by side, projected by `out`.

        Args:
            heads: (..., Hq, L, Ev).

        Returns:
            An array (..., L, out_dim).
        """
        check_plain_array(f"{type(self).__name__}.combine", "heads", heads)
        xp = namespace_of(heads)
        heads_last = swap_heads_and_length(xp, cast(Array, heads), LHE)
        *leading_shape, count, width = heads_last.shape
        joined = cast(A, xp.reshape(heads_last, (*leading_shape, count * width)))
        return joined if self._out is None else self._out(joined)

    def _heads(self, inputs: dict[str, AnyArray]) -> list[AnyArray]:
        """Map each input (..., length, width) to its heads (..., heads, length, width of a head)."""
        name, (query_heads, key_heads) = type(self).__name__, self.head_counts
        # All at once, so that inputs of two libraries are refused by the names of both.
        check_inputs(name, inputs, {role: getattr(self, role).weight for role in inputs})
        for role, x in inputs.items():
            if len(x.shape) < 2:
                rule = f"`{role}` must have at least 2 axes, (..., length, width)"
                raise ArgumentValueError(name, rule, {f"{role}.shape": x.shape})
        heads: list[AnyArray] = []
        for role, x in inputs.items():
            projected = cast(Array, getattr(self, role)._apply(x))
            count = query_heads if role == "query" else key_heads
            xp = namespace_of(projected)
            heads_last = xp.reshape(projected, (*projected.shape[:-1], count, projected.shape[-1] // count))
            heads.append(swap_heads_and_length(xp, heads_last, LHE))
        return heads

    def _scaling(self) -> dict[str, Any]:
        """Return scale / temperature as a keyword, or no keyword if both have their defaults."""
        if self.scale is None and not is_array(self.temperature) and self.temperature == 1:
            return {}
        scale: Any = 1 / math.sqrt(self.head_dim) if self.scale is None else self._as_scores_like(self.scale)
        with computing(self.query.weight):  # autocast would round a learned scale
            return {"scale": scale / self._as_scores_like(self.temperature)}

    def _options(self, keywords: Keywords) -> Any:
        # Python refuses no name that `**keywords` takes.
        names = (*Keywords.__annotations__, "attn_mask")
        name = type(self).__name__
        refuse_unknown_keywords(name, cast(Any, keywords), names)
        check_layer(name, keywords.get("reproducible", False))
        return {**self.attention_options, **keywords}

    def _as_scores_like(self, number: float | AnyArray) -> float | Array:
        """Return a number, or one number for each head in a shape that broadcasts to the scores."""
        if is_array(number) and len(number.shape) == 1:
            return namespace_of(number).reshape(number, (number.shape[0], 1, 1))  # to (..., Hq, L, S)
        return cast("float | Array", number)

    def _check_arrays(self, per_head: dict[str, object]) -> None:
        """Check that all arrays are of one kind, and that `per_head` and the temperature fit the heads."""
        name, count = type(self).__name__, self.head_counts[0]
        check_one_kind(name, self.parameters)
        dtype = accumulation_dtype(namespace_of(self.query.weight), self.query.weight.dtype)
        for role, value in ({"temperature": self.temperature} | per_head).items():
            if is_array(value) and value.shape not in ((), (count,)):
                rule = f"`{role}` must be a number, or an array with one number for each head"
                raise ArgumentValueError(name, rule, {f"{role}.shape": value.shape, "num_heads": count})
            if value is not None and not is_array(value):
                check_number(name, role, value, dtype)
