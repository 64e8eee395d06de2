"""Attention with several heads, for self and cross attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from .._checks import shown
from .._checks.keywords import check_integer, explains_keywords
from .._libraries import is_array, is_number
from .._libraries.protocols import AnyArray, Rng
from ..errors import ArgumentTypeError, ArgumentValueError
from .attention import Attention
from .linear import ROLES, Linear, check_widths, hint_for_widths, init_linears, read_fields

A = TypeVar("A", bound=AnyArray)


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiHeadAttention(Attention):
    r"""Multi-head attention: project the inputs, attend in each head, then join and project the outputs.

    The output is $\mathrm{concat}(head_1, \ldots, head_{Hq})\,W_o$, as the drawing at the top of
    `sdpa_xp.layers` shows.

    Args:
        query: The projection of the queries to Hq heads.
        key: The projection of the keys to H heads of the same width.
        value: The projection of the values to H heads.
        out: The projection of all heads together. With None, the output is the heads side by side.
        num_heads: Hq.
        num_kv_heads: H, of which Hq is a multiple. None means Hq.
        scale: A number, or an array of shape () or (Hq,), which can be learned. Default 1 / sqrt(E).
        temperature: The divisor of the scale, like `scale`. A higher one makes the weights more equal.
        sinks: (Hq,), as in `scaled_dot_product_attention`; or None.

    Raises:
        TypeError: A projection is not a `Linear`, or the arrays have several libraries or dtypes.
        ValueError: The shapes do not fit.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> layer = MultiHeadAttention.init(rng, 64, 48, num_heads=8, num_kv_heads=2)
        >>> words = np.ones((2, 5, 64), np.float32)
        >>> pixels = np.ones((2, 9, 48), np.float32)
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
        _, key_heads = check_heads(self, self.num_heads, self.num_kv_heads)
        object.__setattr__(self, "num_kv_heads", key_heads)  # the class is frozen
        self._check_arrays({"scale": self.scale, "sinks": self.sinks})

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
        """Create a layer with random weights by Xavier's rule, and biases of 0.

        Args:
            rng: A numpy.random.Generator, cupy.random.Generator, torch.Generator, or key of JAX or MLX.
            query_dim: The width of the input queries.
            key_dim: The width of the input keys. None means `query_dim`.
            value_dim: The width of the input values. None means `key_dim`.
            num_heads: Hq.
            num_kv_heads: H. None means Hq.
            head_dim: E and Ev. None means query_dim / Hq.
            out_dim: The width of the output. None means `query_dim`.
            bias: Whether the projections have biases.
            like: An array with the library, device and dtype of the new layer. None means float32, in the
                library of `rng`.

        Raises:
            TypeError: `rng` is not a generator, or a width is not an integer.
            ValueError: A number is below 1, or not a multiple of another where it has to be.
        """
        function = "MultiHeadAttention.init"
        heads = check_integer(function, "num_heads", num_heads, least=1)
        key_heads = heads if num_kv_heads is None else check_integer(function, "num_kv_heads", num_kv_heads, 1)
        inputs = check_widths(function, query_dim=query_dim, key_dim=key_dim, value_dim=value_dim)
        query_dim, key_dim, value_dim = inputs
        if head_dim is None:
            if query_dim % heads:
                rule = "`query_dim` must be a multiple of `num_heads`"
                hint = "`head_dim` sets the width of a head."
                raise ArgumentValueError(function, rule, {"query_dim": query_dim, "num_heads": heads}, hint)
            head_dim = query_dim // heads
        head_dim = check_integer(function, "head_dim", head_dim, 1)
        out_dim = query_dim if out_dim is None else check_integer(function, "out_dim", out_dim, 1)
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
        """Create a layer from arrays by name, such as the arrays of a safetensors file. They are not copied.

        The mapping has the names of `parameters`, the names that `names` gives, or the names of
        torch.nn.MultiheadAttention. Without an `out.weight`, the output of the layer is the heads side by side.

        Args:
            mapping: Arrays by name. It may contain more arrays than the layer needs.
            prefix: The beginning of the layer's names, with the last dot.
            num_heads: Hq.
            num_kv_heads: H. None means Hq.
            names: The names of `query`, `key`, `value` and `out` in the mapping: {"query": "q_proj", ...}.

        Raises:
            TypeError: `mapping` or `names` is not a mapping, or `prefix` is not a string.
            ValueError: A weight is missing in the mapping, or the shapes do not fit.

        Examples:
            >>> import numpy as np
            >>> layer = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
            >>> file = {f"encoder.{name}": x for name, x in layer.parameters.items()}
            >>> MultiHeadAttention.from_mapping(file, "encoder.", num_heads=2).num_kv_heads
            2
        """
        function = "MultiHeadAttention.from_mapping"
        fields = ("query", "key", "value", "out", "scale", "temperature", "sinks")
        values = read_fields(function, mapping, prefix, names, fields)
        return cls(**values, num_heads=num_heads, num_kv_heads=num_kv_heads)

    @classmethod
    def from_torch(cls, module: Any) -> Self:
        """Create a layer that computes the same as a torch.nn.MultiheadAttention, with copies of its weights.

        In masks of the module, True means masked. So pass `~attn_mask`, and
        `~key_padding_mask[:, None, None, :]`. The batch comes first in all inputs, whatever `batch_first` says.
        For dropout, pass `dropout_p` and `rng` to a call.

        Args:
            module: The module. `add_zero_attn` becomes `sinks` of 0, and the weights do not include its column.

        Raises:
            TypeError: `module` is not a torch.nn.MultiheadAttention.
            ValueError: The module has `bias_k` and `bias_v` (add_bias_kv=True).
        """
        # By its attributes: torch is not imported here.
        names = ("in_proj_bias", "num_heads", "add_zero_attn", "state_dict")
        parts = getattr(module, "named_modules", lambda: [("", module)])()
        within = [name for name, part in parts if all(hasattr(part, field) for field in names)]
        if "" not in within:
            rule = "`module` must be a torch.nn.MultiheadAttention"
            hint = f"Pass its {' or '.join(f'`{name}`' for name in within[:3])}." if within else ""
            raise ArgumentTypeError("MultiHeadAttention.from_torch", rule, {"module": shown(module)}, hint)
        view = cls.from_mapping(module.state_dict(), num_heads=module.num_heads)
        # Copies: an optimiser may go on to write to the parameters of the module.
        copies: dict[str, Any] = {name: cast(Any, x).clone() for name, x in view.parameters.items()}
        layer = view.with_parameters(copies)
        if not module.add_zero_attn:
            return layer
        # The score of a key of zeros is 0 for every query, and its value of zeros adds nothing to the output.
        sinks = copies["out.weight"].new_zeros(module.num_heads)
        return cls(layer.query, layer.key, layer.value, layer.out, num_heads=layer.num_heads, sinks=sinks)

    @property
    def head_counts(self) -> tuple[int, int]:
        """The number of query heads, and the number of heads of keys and values."""
        return self.num_heads, self.num_kv_heads or self.num_heads  # `__post_init__` has replaced None


def check_heads(layer: Attention, num_heads: object, num_kv_heads: object) -> tuple[int, int]:
    """Check that the maps split into heads, and return the number of query heads and of key heads.

    The heads of queries and keys must be equally wide, and there must be as many heads of keys as of values.
    """
    function, maps = type(layer).__name__, {role: getattr(layer, role) for role in ROLES}
    _check_maps(function, maps | ({} if layer._out is None else {"out": layer._out}))
    widths = {role: linear.widths[1] for role, linear in maps.items()}
    count = check_integer(function, "num_heads", num_heads, least=1)
    key_heads = count if num_kv_heads is None else check_integer(function, "num_kv_heads", num_kv_heads, 1)
    if count % key_heads:
        rule = "`num_heads` must be a multiple of `num_kv_heads`"
        raise ArgumentValueError(function, rule, {"num_heads": count, "num_kv_heads": key_heads})
    for name, width in widths.items():
        argument, heads = ("num_heads", count) if name == "query" else ("num_kv_heads", key_heads)
        if width == 0 or width % heads:  # 0 is a multiple of every number
            rule = f"the output width of `{name}` must be a multiple of `{argument}`"
            got = {f"output width of {name}": width, argument: heads}
            raise ArgumentValueError(function, rule, got, _hint_for_groups(widths, count))
    if widths["query"] // count != widths["key"] // key_heads:
        rule = "the heads of `query` and `key` must have the same width"
        got = {"width in query": widths["query"] // count, "width in key": widths["key"] // key_heads}
        raise ArgumentValueError(function, rule, got, _hint_for_groups(widths, count))
    joined = widths["value"] // key_heads * count
    if layer._out is not None and (out_width := layer._out.widths[0]) != joined:
        rule = "the input width of `out` must be the width of all `num_heads` heads of `value` together"
        raise ArgumentValueError(function, rule, {"input width of out": out_width, "width of heads": joined})
    return count, key_heads


def _hint_for_groups(widths: Mapping[str, int], count: int) -> str:
    """Hint at the number of key heads that fits the widths and `count` query heads; "" if none does."""
    head = widths["query"] // count
    key_heads, rest = divmod(widths["key"], head) if head and not widths["query"] % count else (0, 0)
    if rest or not key_heads or count % key_heads or not widths["value"] or widths["value"] % key_heads:
        return ""
    if key_heads == count:
        return "The heads are not grouped: leave out num_kv_heads."
    return f"For grouped heads, pass num_kv_heads={key_heads}."


def _check_maps(function: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(value, Linear):
            hint = ""
            if is_array(value):
                hint = f"Convert a weight (out, in): Linear({name})."
            elif any(map(is_number, values.values())):
                hint = hint_for_widths(function)
            raise ArgumentTypeError(function, f"`{name}` must be a Linear", {name: shown(value)}, hint)
