"""What both layers do: project, attend, combine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, Unpack, cast

from sdpa_xp import _checks as checks
from sdpa_xp._checks import Implementation
from sdpa_xp._libraries import accumulation_dtype, is_array, namespace_of
from sdpa_xp._libraries.protocols import AnyArray, Array, Dtype, Rng
from sdpa_xp._tiles.layout import swap_heads_and_length
from sdpa_xp.attention import attention_state, scaled_dot_product_attention
from sdpa_xp.biases import Bias
from sdpa_xp.kv_cache import KVCache
from sdpa_xp.layers.linear import Linear
from sdpa_xp.layers.parameters import Layer
from sdpa_xp.masks import Mask
from sdpa_xp.paged_cache import PagedKVCache
from sdpa_xp.states import AttentionState
from sdpa_xp.weights import attention_weights

A = TypeVar("A", bound=AnyArray)


class Keywords(TypedDict, total=False):
    """What a call may say besides its inputs and `attn_mask`, as for `scaled_dot_product_attention`."""

    bias: Bias | AnyArray | None
    is_causal: bool
    scale: float | AnyArray | None
    softcap: float | None
    sinks: AnyArray | None
    dropout_p: float
    rng: Rng | None
    softmax_dtype: Dtype | None
    implementation: Implementation | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Attention(Layer):
    """Three maps, and attention between what they give."""

    query: Linear
    key: Linear
    value: Linear
    scale: float | AnyArray | None = field(default=None, kw_only=True)
    temperature: float | AnyArray = field(default=1.0, kw_only=True)

    @property
    def head_counts(self) -> tuple[int, int]:
        """The number of query heads, and of heads of keys and values."""
        return 1, 1

    @property
    def head_dim(self) -> int:
        """E, the width of a head of queries and keys."""
        return self.query.widths[1] // self.head_counts[0]

    @property
    def attention_options(self) -> dict[str, Any]:
        """The keywords that the layer adds to a call: `KVCache.attend(query, **layer.attention_options)`."""
        return self._scaling()

    def __call__(
        self,
        query: A,
        key: AnyArray | None = None,
        value: AnyArray | None = None,
        attn_mask: Mask | AnyArray | None = None,
        **keywords: Unpack[Keywords],
    ) -> A:
        """The output of the layer.

        Args:
            query: (..., L, query_dim), of the library, device and dtype of the layer.
            key: (..., S, key_dim). None is the query: self-attention.
            value: (..., S, value_dim). None is the key.
            attn_mask: A mask of `sdpa_xp.masks`, or an array that broadcasts to (..., Hq, L, S); True = may
                attend.
            keywords: bias, is_causal, softcap, dropout_p, rng, softmax_dtype, implementation, as for
                `scaled_dot_product_attention`; also scale and sinks, in place of the layer's.

        Returns:
            (..., L, out_dim).

        Raises:
            TypeError: As for `scaled_dot_product_attention`; the layer's arrays are among those of the call.
            ValueError: Likewise, or an input that is not as wide as the layer takes.
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
        """The output of each head, before they are combined, and the log-sum-exp of its scores.

        States over parts of the keys merge by `merge_states`; `combine` of the output is what a call gives.

        Args:
            query: As for a call, as are all that follow.
            key: (..., S, key_dim).
            value: (..., S, value_dim).
            attn_mask: A mask, or an array that broadcasts to (..., Hq, L, S).
            keywords: As for a call.

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
        """How much each query attends to each key.

        Args:
            query: As for a call, as are all that follow.
            key: (..., S, key_dim).
            attn_mask: A mask, or an array that broadcasts to (..., Hq, L, S).
            keywords: As for a call.

        Returns:
            (..., Hq, L, S), or (..., L, S) of a `SingleHeadAttention`, which has no axis of heads.
        """
        q, k = self._heads({"query": query, "key": query if key is None else key})
        return cast(A, attention_weights(q, k, attn_mask, **self._options(keywords)))

    def project(self, query: A, key: AnyArray | None = None, value: AnyArray | None = None) -> tuple[A, A, A]:
        """The heads of the inputs, as `scaled_dot_product_attention` and `KVCache` take them.

        Args:
            query: (..., L, query_dim).
            key: (..., S, key_dim). None is the query.
            value: (..., S, value_dim). None is the key.

        Returns:
            (..., Hq, L, E), (..., H, S, E) and (..., H, S, Ev).
        """
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self._heads({"query": query, "key": key, "value": value})
        return cast(tuple[A, A, A], (q, k, v))

    def project_key_value(self, key: A, value: AnyArray | None = None) -> tuple[A, A]:
        """The heads of keys and values alone, as a cache takes them.

        Args:
            key: (..., S, key_dim).
            value: (..., S, value_dim). None is the key.

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
        """The output of the layer for queries that attend to a cache of `project_key_value`.

        Args:
            query: (..., L, query_dim): the last of the tokens in the cache, or with `is_causal=False` any.
            cache: Keys and values, (..., H, S, E) and (..., H, S, Ev).
            attn_mask: As for `KVCache.attend`.
            keywords: Likewise; `is_causal` is True if it is not given.

        Returns:
            (..., L, out_dim).

        Raises:
            TypeError: As for a call.
            ValueError: As for a call; a cache with heads behind the length.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> from sdpa_xp.layers import MultiHeadAttention
            >>> layer = MultiHeadAttention.init(np.random.default_rng(0), 64, num_heads=8)
            >>> words, next_word = np.ones((2, 5, 64), np.float32), np.ones((2, 1, 64), np.float32)
            >>> cache = KVCache(*layer.project_key_value(words)).append(*layer.project_key_value(next_word))
            >>> layer.attend(next_word, cache).shape
            (2, 1, 64)
        """
        checks.named(f"{type(self).__name__}.attend", "cache.layout", cache.layout, [checks.HLE])
        (heads,) = self._heads({"query": query})
        return self.combine(cache.attend(cast(A, heads), attn_mask, **self._options(keywords)))

    def combine(self, heads: A) -> A:
        """The output from that of each head.

        Args:
            heads: (..., Hq, L, Ev).

        Returns:
            (..., L, Hq * Ev): the heads side by side.
        """
        checks.plain_array(f"{type(self).__name__}.combine", "heads", heads)
        xp = namespace_of(heads)
        apart = swap_heads_and_length(xp, cast(Array, heads), checks.LHE)
        return cast(A, xp.reshape(apart, (*apart.shape[:-2], apart.shape[-2] * apart.shape[-1])))

    def _heads(self, inputs: dict[str, AnyArray]) -> list[AnyArray]:
        """(..., length, width) -> (..., heads, length, width of a head), each by its own map."""
        name, (queries, shared) = type(self).__name__, self.head_counts
        checks.inputs(name, inputs, {role: getattr(self, role).weight for role in inputs})
        checks.with_lengths(name, inputs)
        found: list[AnyArray] = []
        for role, x in inputs.items():
            flat, count = cast(Array, getattr(self, role)._apply(x)), queries if role == "query" else shared
            xp = namespace_of(flat)
            apart = xp.reshape(flat, (*flat.shape[:-1], count, flat.shape[-1] // count))
            found.append(swap_heads_and_length(xp, apart, checks.LHE))
        return found

    def _scaling(self) -> dict[str, Any]:
        """scale / temperature; nothing where that is the default."""
        if self.scale is None and not is_array(self.temperature) and self.temperature == 1:
            return {}
        scale: Any = 1 / math.sqrt(self.head_dim) if self.scale is None else self._of_heads(self.scale)
        return {"scale": scale / self._of_heads(self.temperature)}

    def _options(self, keywords: Keywords) -> Any:
        return {**self.attention_options, **keywords}

    def _of_heads(self, number: float | AnyArray) -> float | Array:
        """An array of one number for each head, as it meets the scores."""
        if is_array(number) and len(number.shape) == 1:
            return namespace_of(number).reshape(number, (number.shape[0], 1, 1))
        return cast("float | Array", number)

    def _widths(self) -> dict[str, int]:
        """How wide what comes out of each map is."""
        found: dict[str, Linear] = {name: getattr(self, name) for name in ("query", "key", "value")}
        checks.maps(type(self).__name__, found, Linear)
        return {name: each.widths[1] for name, each in found.items()}

    def _check(self, extra: dict[str, object]) -> None:
        """The arrays of the layer are of one kind, and what is for each head has one for each."""
        name = type(self).__name__
        checks.one_kind(name, self.parameters)
        dtype = accumulation_dtype(namespace_of(self.query.weight), self.query.weight.dtype)
        for role, value in ({"temperature": self.temperature} | extra).items():
            if value is not None:
                checks.of_heads(name, role, value, self.head_counts[0], dtype)


def read(
    function: str,
    mapping: Mapping[str, AnyArray],
    prefix: str,
    names: Mapping[str, str] | None,
    fields: Sequence[str],
) -> dict[str, Any]:
    """The maps and arrays that are there: `query` from `prefix` + what `names` calls it, and so on."""
    checks.named_arrays(function, "mapping", mapping)
    checks.text(function, "prefix", prefix)
    if names is not None:
        checks.named_arrays(function, "names", names)
    found: dict[str, Any] = {}
    for role in fields:
        name = prefix + (names or {}).get(role, role)
        if name in mapping:
            found[role] = mapping[name]
        elif role in ("query", "key", "value") or f"{name}.weight" in mapping:
            found[role] = Linear.from_mapping(mapping, f"{name}.")
    return found
