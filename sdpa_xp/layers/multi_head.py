"""Attention with several heads, for self and cross attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries.protocols import AnyArray, Rng
from sdpa_xp.layers import torch_names
from sdpa_xp.layers.attention import Attention, read
from sdpa_xp.layers.linear import Linear, linears

A = TypeVar("A", bound=AnyArray)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiHeadAttention(Attention):
    r"""$\mathrm{concat}(head_1, \ldots, head_{Hq})\,W_o$, each head attention of its own part of the maps.

    Shapes:
        `L` queries, `S` keys, `Hq` query heads, `H` key heads, `E` and `Ev` widths of a head, `...` batch. The
        drawing at the top of `sdpa_xp.layers` shows each array.

    Args:
        query: The map of queries to Hq heads, a `Linear`.
        key: That of keys, to H heads as wide as those of queries.
        value: That of values, to H heads.
        out: That of all heads together, or None: then they stand side by side.
        num_heads: Hq.
        num_kv_heads: H, of which Hq is a multiple: query head h reads key head h // (Hq // H). None is Hq.
        scale: What the products are multiplied by: a number, or an array of one or (Hq,), to be learned.
            Default 1 / sqrt(E).
        temperature: What the scale is divided by: higher spreads the weights. A number or an array, likewise.
        sinks: (Hq,): a logit of each head that joins the sum of the softmax, or None.

    Raises:
        TypeError: A map that is no `Linear`, or arrays of several libraries or dtypes.
        ValueError: Shapes that do not fit.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> layer = MultiHeadAttention.init(rng, 64, 48, num_heads=8, num_kv_heads=2)
        >>> words, pixels = np.ones((2, 5, 64), np.float32), np.ones((2, 9, 48), np.float32)
        >>> layer(words, pixels).shape, layer.weights(words, pixels).shape
        ((2, 5, 64), (2, 8, 5, 9))

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.2.
        Ainslie et al., "GQA", arXiv 2305.13245, section 2.2, for `num_kv_heads`.
    """

    out: Linear | None = None
    num_heads: int = field(kw_only=True)
    num_kv_heads: int = field(default=cast(int, None), kw_only=True)
    sinks: AnyArray | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        widths = self._widths()
        if self.out is not None:
            checks.maps("MultiHeadAttention", {"out": self.out}, Linear)
        taken = None if self.out is None else self.out.widths[0]
        _, shared = checks.layer_heads("MultiHeadAttention", widths, self.num_heads, self.num_kv_heads, taken)
        object.__setattr__(self, "num_kv_heads", shared)
        self._check({"scale": self.scale, "sinks": self.sinks})

    @classmethod
    def init(
        cls,
        rng: Rng,
        query_dim: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_dim: int | None = None,
        bias: bool = True,
        like: AnyArray | None = None,
    ) -> Self:
        """A layer with weights by Xavier's rule, and biases of 0.

        Args:
            rng: What the weights follow from: a numpy.random.Generator, cupy.random.Generator,
                torch.Generator, or key of JAX or MLX.
            query_dim: Width of the queries that go in.
            key_dim: That of the keys. None is `query_dim`.
            value_dim: That of the values. None is `key_dim`.
            num_heads: Hq.
            num_kv_heads: H. None is Hq.
            head_dim: E and Ev. None is query_dim / Hq.
            out_dim: Width of the result. None is `query_dim`.
            bias: Whether the maps have biases.
            like: An array of the library, device and dtype that the layer is to have. None is float32, in the
                library of `rng`.

        Returns:
            The layer.

        Raises:
            TypeError: `rng` is no generator, or a width no integer.
            ValueError: Widths that do not fit.
        """
        function = "MultiHeadAttention.init"
        heads = checks.integer(function, "num_heads", num_heads, least=1)
        shared = (
            heads if num_kv_heads is None else checks.integer(function, "num_kv_heads", num_kv_heads, least=1)
        )
        query_dim = checks.width(function, "query_dim", query_dim)
        key_dim = query_dim if key_dim is None else checks.width(function, "key_dim", key_dim)
        value_dim = key_dim if value_dim is None else checks.width(function, "value_dim", value_dim)
        if head_dim is None:
            head_dim = checks.whole_heads(function, query_dim, heads)
        head_dim = checks.width(function, "head_dim", head_dim)
        out_dim = query_dim if out_dim is None else checks.width(function, "out_dim", out_dim)
        widths = {
            "query": (query_dim, heads * head_dim),
            "key": (key_dim, shared * head_dim),
            "value": (value_dim, shared * head_dim),
            "out": (heads * head_dim, out_dim),
        }
        maps: dict[str, Any] = linears(function, rng, widths, bias=bias, like=like)
        return cls(**maps, num_heads=heads, num_kv_heads=shared)

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, AnyArray],
        prefix: str = "",
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Self:
        """The layer whose arrays are in a mapping by name, such as a file of safetensors gives.

        The names are those of `parameters`, others by `names`, or those of torch.nn.MultiheadAttention.

        Args:
            mapping: Arrays by name; it may hold others too.
            prefix: What the names of the layer begin with, up to and with the last dot.
            num_heads: Hq.
            num_kv_heads: H. None is Hq.
            names: What `query`, `key`, `value` and `out` are called there: {"query": "q_proj", ...}.

        Returns:
            The layer, of the arrays themselves. Without an `out.weight` its heads stand side by side.

        Raises:
            TypeError: `mapping` or `names` is no mapping, or `prefix` no string.
            ValueError: A weight is not there, or shapes do not fit.

        Examples:
            >>> import numpy as np
            >>> one = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
            >>> file = {f"encoder.{name}": array for name, array in one.parameters.items()}
            >>> MultiHeadAttention.from_mapping(file, "encoder.", num_heads=2).num_kv_heads
            2
        """
        function = "MultiHeadAttention.from_mapping"
        checks.named_arrays(function, "mapping", mapping)
        checks.text(function, "prefix", prefix)
        if torch_names.is_torch(mapping, prefix):
            mapping, prefix = torch_names.renamed(function, mapping, prefix), ""
        fields = ("query", "key", "value", "out", "scale", "temperature", "sinks")
        parts = read(function, mapping, prefix, names, fields)
        return cls(**parts, num_heads=num_heads, num_kv_heads=cast(int, num_kv_heads))

    @classmethod
    def from_torch(cls, module: Any) -> Self:
        """The layer that computes what a torch.nn.MultiheadAttention does, with copies of its weights.

        Its masks mean the opposite, True = masked: pass `~mask` here, and `~padding[:, None, None, :]`. The
        batch comes first here, whatever `batch_first` says; dropout is asked for by the call.

        Args:
            module: The module. `add_zero_attn` becomes `sinks` of 0, so that weights have no column for it.

        Returns:
            The layer, in torch; `to` moves it.

        Raises:
            TypeError: Another module.
            ValueError: A module with `bias_k` and `bias_v` (add_bias_kv=True).
        """
        checks.multi_head_module("MultiHeadAttention.from_torch", module)
        shared = cls.from_mapping(module.state_dict(), num_heads=module.num_heads)
        weights: dict[str, Any] = {name: cast(Any, x).clone() for name, x in shared.parameters.items()}
        layer = shared.with_parameters(weights)
        if not module.add_zero_attn:
            return layer
        sinks = weights["out.weight"].new_zeros(module.num_heads)
        return cls(layer.query, layer.key, layer.value, layer.out, num_heads=layer.num_heads, sinks=sinks)

    @property
    def head_counts(self) -> tuple[int, int]:
        """The number of query heads, and of heads of keys and values."""
        return self.num_heads, self.num_kv_heads

    @property
    def attention_options(self) -> dict[str, Any]:
        """The keywords that the layer adds to a call: `KVCache.attend(query, **layer.attention_options)`."""
        return self._scaling() | ({} if self.sinks is None else {"sinks": self.sinks})

    def combine(self, heads: A) -> A:
        """The output from that of each head.

        Args:
            heads: (..., Hq, L, Ev).

        Returns:
            (..., L, out_dim): the heads side by side, through the map `out`.
        """
        joined = Attention.combine(self, heads)
        return joined if self.out is None else self.out(joined)
