"""One call of attention with specs instead of arrays: the call that an exported graph computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from sdpa_xp import biases, masks
from sdpa_xp._checks.shapes import HLE, Sizes
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.length_sums import addends
from sdpa_xp_export._call.operands import GraphOperand, Initializer, kind_of
from sdpa_xp_export.spec import TensorSpec

OUTPUTS = ("output", "lse", "weights", "scores")
SPECS = ("query", "key", "value", "past_key", "past_value", "past_lengths")

Layout: TypeAlias = Literal["...HLE", "...LHE"]
"""Heads before the length, or after it."""
OutputName: TypeAlias = Literal["output", "lse", "weights", "scores"]
"""What a graph can return."""
WideDtype: TypeAlias = Literal["float32", "float64"]
"""The dtypes in which scores can be computed."""


class ExportOptions(NamedTuple):
    """The arguments besides query, key and value, as the caller passed them and not checked yet."""

    attn_mask: object = None
    bias: object = None
    is_causal: object = False
    scale: object = None
    softcap: object = None
    sinks: object = None
    dropout_p: object = 0.0
    softmax_dtype: object = None
    layout: object = HLE
    past_key: object = None
    past_value: object = None
    past_lengths: object = None
    outputs: object = ("output",)
    cached: object = False


@dataclass(frozen=True, slots=True, eq=False)
class ExportCall:
    """A call that has passed every check, with the defaults filled in."""

    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    past_key: TensorSpec | None
    past_value: TensorSpec | None
    past_lengths: TensorSpec | None
    attn_mask: Mask | GraphOperand | None
    bias: Bias | GraphOperand | None
    is_causal: bool
    scale: float | GraphOperand
    softcap: float | None
    sinks: GraphOperand | None
    softmax_dtype: str | None
    layout: Layout
    outputs: tuple[str, ...]
    inputs: Mapping[str, TensorSpec]
    """The inputs of the graph, in their order."""
    initializers: Mapping[str, Initializer]
    cached: bool
    """Whether the queries are the last of more tokens: of `past_key` and `key`, or of `key` alone."""
    sizes: Sizes = field(repr=False)
    """The lengths; the keys include those of the cache. A name may stand where the type says int."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the lengths that are known only when the graph runs, in order of appearance."""
        lengths = (length for spec in self.inputs.values() for length in spec.shape)
        names = (part for length in lengths if isinstance(length, str) for part in addends(length))
        return tuple(dict.fromkeys(name for name in names if not name.isdecimal()))

    @property
    def length_axis(self) -> int:
        """The axis of a query, key or value that is its length, counted from the end."""
        return -2 if self.layout == HLE else -3

    @property
    def accumulation_dtype(self) -> WideDtype:
        """The dtype that scores and sums are held in."""
        return "float64" if "float64" in (self.query.dtype, self.softmax_dtype) else "float32"

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks that must all allow a pair, `is_causal` among them; the lengths of a cache are not."""
        conjuncts: list[Mask] = [masks.causal()] if self.is_causal else []
        if isinstance(self.attn_mask, Mask):
            conjuncts += _conjuncts(self.attn_mask)
        elif self.attn_mask is not None and self.attn_mask.dtype == "bool":
            conjuncts.append(masks.from_array(cast(Any, self.attn_mask)))
        return tuple(conjuncts)

    @property
    def biases(self) -> tuple[Bias, ...]:
        """The biases that are added to the scores, in order; a floating mask is one."""
        terms: list[Bias | GraphOperand | None] = [self.bias]
        mask = self.attn_mask
        if mask is not None and not isinstance(mask, Mask) and mask.dtype != "bool":
            terms = [mask, self.bias]
        wrapped = (
            term if isinstance(term, Bias) else biases.from_array(cast(Any, term))
            for term in terms
            if term is not None
        )
        return tuple(addend for bias in wrapped for addend in _addends(bias))


def _conjuncts(mask: Mask) -> list[Mask]:
    if kind_of(mask) != "&":
        return [mask]
    return [conjunct for part in mask.parts for conjunct in _conjuncts(part)]


def _addends(bias: Bias) -> list[Bias]:
    if kind_of(bias) != "+":
        return [bias]
    return [addend for part in bias.parts for addend in _addends(part)]
