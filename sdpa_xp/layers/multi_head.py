"""Attention with several heads, for self and cross attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries.protocols import AnyArray, Rng
from sdpa_xp.layers import torch_names
from sdpa_xp.layers.attention import Attention, read_fields
from sdpa_xp.layers.linear import Linear, init_linears

A = TypeVar("A", bound=AnyArray)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiHeadAttention(Attention):
    r"""$\mathrm{concat}(head_1, \ldots, head_{Hq})\,W_o$; each head attends with its part of the maps.

    Shapes:
        `L` queries, `S` keys, `Hq` query heads, `H` key heads, `E` and `Ev` widths of a head, `...` batch. The
        drawing at the top of `sdpa_xp.layers` shows each array.

    Args:
        query: The map of queries to Hq heads, a `Linear`.
        key: The map of keys, to H heads of the same width as the heads of queries.
        value: The map of values, to H heads.
        out: The map of all heads together, or None. Then the output is the heads side by side.
        num_heads: Hq.
        num_kv_heads: H. Hq must be a multiple of H: query head h reads key head h // (Hq // H). None is Hq.
        scale: The factor of the products q k^T: a number, or an array of shape () or (Hq,), which can be
            learned. Default 1 / sqrt(E).
        temperature: The divisor of the scale: a higher temperature spreads the weights. A number or an array,
            like `scale`.
        sinks: (Hq,): for each head a logit that joins the sum of the softmax; or None.

    Raises:
        TypeError: A map is no `Linear`, or the arrays are of several libraries or dtypes.
        ValueError: The shapes do not fit.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> layer = MultiHeadAttention.init(rng, 64, 48, num_heads=8, num_kv_heads=2)
        >>> words, pixels = (
        ...     np.ones((2, 5, 64), np.float32),
        ...     np.ones((2, 9, 48), np.float32),
        ... )
        >>> layer(words, pixels).shape, layer.weights(words, pixels).shape
        ((2, 5, 64), (2, 8, 5, 9))

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.2.
        Ainslie et al., "GQA", arXiv 2305.13245, section 2.2, for `num_kv_heads`.
    """

    out: Linear | None = None
    num_heads: int = field(kw_only=True)
    num_kv_heads: int | None = field(default=None, kw_only=True)
    sinks: AnyArray | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        widths = self._widths()
        if self.out is not None:
            checks.maps("MultiHeadAttention", {"out": self.out}, Linear)
        out_width = None if self.out is None else self.out.widths[0]
        _, key_heads = checks.layer_heads(
            "MultiHeadAttention", widths, self.num_heads, self.num_kv_heads, out_width
        )
        object.__setattr__(self, "num_kv_heads", key_heads)
        self._check_arrays({"scale": self.scale, "sinks": self.sinks})

    @property
    def _out_width(self) -> int:
        return self.value.widths[1] if self.out is None else self.out.widths[1]

    @property
    def _counts(self) -> dict[str, int]:
        heads, key_heads = self.head_counts
        return {"num_heads": heads} | ({} if key_heads == heads else {"num_kv_heads": key_heads})

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
        """Return a layer with weights by Xavier's rule, and biases of 0.

        Args:
            rng: The generator that the weights are drawn from: a numpy.random.Generator,
                cupy.random.Generator, torch.Generator, or key of JAX or MLX.
            query_dim: The width of the input queries.
            key_dim: The width of the input keys. None is `query_dim`.
            value_dim: The width of the input values. None is `key_dim`.
            num_heads: Hq.
            num_kv_heads: H. None is Hq.
            head_dim: E and Ev. None is query_dim / Hq.
            out_dim: The width of the output. None is `query_dim`.
            bias: Whether the maps have biases.
            like: An array with the library, device and dtype of the new layer. None is float32, in the
                library of `rng`.

        Returns:
            The layer.

        Raises:
            TypeError: `rng` is no generator, or a width is no integer.
            ValueError: The widths do not fit.
        """
        function = "MultiHeadAttention.init"
        heads = checks.integer(function, "num_heads", num_heads, least=1)
        key_heads = heads
        if num_kv_heads is not None:
            key_heads = checks.integer(function, "num_kv_heads", num_kv_heads, least=1)
        query_dim = checks.width(function, "query_dim", query_dim)
        key_dim = query_dim if key_dim is None else checks.width(function, "key_dim", key_dim)
        value_dim = key_dim if value_dim is None else checks.width(function, "value_dim", value_dim)
        if head_dim is None:
            head_dim = checks.whole_heads(function, query_dim, heads)
        head_dim = checks.width(function, "head_dim", head_dim)
        out_dim = query_dim if out_dim is None else checks.width(function, "out_dim", out_dim)
        widths = {
            "query": (query_dim, heads * head_dim),
            "key": (key_dim, key_heads * head_dim),
            "value": (value_dim, key_heads * head_dim),
            "out": (heads * head_dim, out_dim),
        }
        maps: dict[str, Any] = init_linears(function, rng, widths, bias=bias, like=like)
        return cls(**maps, num_heads=heads, num_kv_heads=key_heads)

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
        """Return the layer whose arrays a mapping, such as a file of safetensors, has by name.

        The names are those of `parameters`, unless `names` gives others; or those of
        torch.nn.MultiheadAttention.

        Args:
            mapping: Arrays by name. It may have more than the layer needs.
            prefix: The beginning of the layer's names, with the last dot.
            num_heads: Hq.
            num_kv_heads: H. None is Hq.
            names: The names of `query`, `key`, `value` and `out` in the mapping: {"query": "q_proj", ...}.

        Returns:
            The layer. Its arrays are not copied. Without an `out.weight` its output is the heads side by side.

        Raises:
            TypeError: `mapping` or `names` is no mapping, or `prefix` is no string.
            ValueError: The mapping lacks a weight, or the shapes do not fit.

        Examples:
            >>> import numpy as np
            >>> layer = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
            >>> file = {
            ...     f"encoder.{name}": array for name, array in layer.parameters.items()
            ... }
            >>> MultiHeadAttention.from_mapping(file, "encoder.", num_heads=2).num_kv_heads
            2
        """
        function = "MultiHeadAttention.from_mapping"
        checks.named_arrays(function, "mapping", mapping)
        checks.text(function, "prefix", prefix)
        if torch_names.has_torch_names(mapping, prefix):
            mapping, prefix = torch_names.rename_parameters(function, mapping, prefix), ""
        fields = ("query", "key", "value", "out", "scale", "temperature", "sinks")
        values = read_fields(function, mapping, prefix, names, fields)
        return cls(**values, num_heads=num_heads, num_kv_heads=num_kv_heads)

    @classmethod
    def from_torch(cls, module: Any) -> Self:
        """Return a layer that computes what a torch.nn.MultiheadAttention does, with copies of its weights.

        The module's masks mean the opposite, True = masked: pass `~mask` to the layer, and
        `~padding[:, None, None, :]`. The layer takes the batch first, whatever `batch_first` says. Pass
        `dropout_p` to a call for dropout.

        Args:
            module: The module. `add_zero_attn` becomes `sinks` of 0, so that weights have no column for it.

        Returns:
            The layer, with torch tensors. `to` copies it to another library.

        Raises:
            TypeError: `module` is no torch.nn.MultiheadAttention.
            ValueError: The module has `bias_k` and `bias_v` (add_bias_kv=True).
        """
        checks.multi_head_module("MultiHeadAttention.from_torch", module)
        view = cls.from_mapping(module.state_dict(), num_heads=module.num_heads)
        copies: dict[str, Any] = {name: cast(Any, x).clone() for name, x in view.parameters.items()}
        layer = view.with_parameters(copies)
        if not module.add_zero_attn:
            return layer
        sinks = copies["out.weight"].new_zeros(module.num_heads)
        return cls(layer.query, layer.key, layer.value, layer.out, num_heads=layer.num_heads, sinks=sinks)

    @property
    def head_counts(self) -> tuple[int, int]:
        """The number of query heads, and the number of heads of keys and values."""
        return self.num_heads, self.num_kv_heads or self.num_heads  # `__post_init__` has replaced None

    @property
    def attention_options(self) -> dict[str, Any]:
        """The keywords that the layer adds to a call: `KVCache.attend(query, **layer.attention_options)`."""
        return self._scaling() | ({} if self.sinks is None else {"sinks": self.sinks})

    def combine(self, heads: A) -> A:
        """Combine the outputs of the heads.

        Args:
            heads: (..., Hq, L, Ev).

        Returns:
            (..., L, out_dim): the map `out` of the heads side by side.
        """
        joined = Attention.combine(self, heads)
        return joined if self.out is None else self.out(joined)
