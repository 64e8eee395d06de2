"""Attention with one head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from .._checks.keywords import explains_keywords
from .._libraries.protocols import AnyArray, Rng
from .attention import Attention
from .linear import ROLES, check_widths, init_linears, read_fields
from .multi_head import check_heads


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SingleHeadAttention(Attention):
    r"""Attention with one head: $\mathrm{softmax}(XW_q\,(YW_k)^T \cdot scale)\;YW_v$, without a projection at
    the end.

    X is the input of the queries, and Y the input of keys and values. A mask has an axis of length 1 for the
    head: (..., 1, L, S).

    Args:
        query: The projection of the queries.
        key: The projection of the keys, to the same width.
        value: The projection of the values, to any width.
        scale: A number, or an array of shape () or (1,). Default 1 / sqrt(E).
        temperature: The divisor of the scale, likewise.

    Raises:
        TypeError: A projection is not a `Linear`, or the arrays have several libraries or dtypes.
        ValueError: The shapes do not fit.

    Examples:
        >>> import numpy as np
        >>> layer = SingleHeadAttention.init(np.random.default_rng(0), 16, 8)
        >>> words = np.ones((2, 4, 16), np.float32)
        >>> layer(words, is_causal=True).shape
        (2, 4, 8)

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1.
    """

    _has_head_axis: ClassVar[bool] = False  # weights are (..., L, S), as the formula has them

    def __post_init__(self) -> None:
        check_heads(self, 1, 1)
        self._check_arrays({"scale": self.scale})

    @classmethod
    def init(
        cls,
        rng: Rng,
        embedding_dim: int,
        attention_dim: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = False,
        like: AnyArray | None = None,
    ) -> Self:
        """Create a layer with random weights by Xavier's rule, and biases of 0.

        Args:
            embedding_dim: The width of the input queries. All other arguments and errors are as in
                `layers.MultiHeadAttention.init`.
            attention_dim: The width of queries, keys and values after the projections.
            key_dim: The width of the input keys. None means `embedding_dim`.
        """
        function = "SingleHeadAttention.init"
        check_widths(function, embedding_dim=embedding_dim, attention_dim=attention_dim)
        inputs = check_widths(function, embedding_dim=embedding_dim, key_dim=key_dim, value_dim=value_dim)
        shapes = {role: (width, attention_dim) for role, width in zip(ROLES, inputs, strict=True)}
        maps: dict[str, Any] = init_linears(function, rng, shapes, bias=bias, like=like)
        return cls(**maps)

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, AnyArray], prefix: str = "", *, names: Mapping[str, str] | None = None
    ) -> Self:
        """Create a layer from arrays by name, which are not copied.

        Args:
            mapping: Arrays by name. All other arguments and errors are as in
                `layers.MultiHeadAttention.from_mapping`.
        """
        function, fields = "SingleHeadAttention.from_mapping", ("query", "key", "value", "scale", "temperature")
        return cls(**read_fields(function, mapping, prefix, names, fields))
