"""One call of attention with specs where the arrays stand: what an exported graph has to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from sdpa_xp import biases, checks, masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.operands import GraphOperand, Initializer, Input
from sdpa_xp_export.spec import TensorSpec

OUTPUTS = ("output", "lse", "weights", "scores")
SPECS = ("query", "key", "value", "past_key", "past_value", "past_lengths")


class ExportOptions(NamedTuple):
    """What a caller passed besides query, key and value, as it came."""

    attn_mask: object = None
    bias: object = None
    is_causal: object = False
    scale: object = None
    softcap: object = None
    sinks: object = None
    dropout_p: object = 0.0
    softmax_dtype: object = None
    layout: object = checks.HLE
    past_key: object = None
    past_value: object = None
    past_lengths: object = None
    outputs: object = ("output",)
    cached: object = False


@dataclass(frozen=True, slots=True, eq=False)
class ExportCall:
    """A call that has been checked, with the defaults filled in."""

    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    past_key: TensorSpec | None
    past_value: TensorSpec | None
    past_lengths: TensorSpec | None
    attn_mask: Mask | Input | Initializer | None
    bias: Bias | Input | Initializer | None
    is_causal: bool
    scale: float | GraphOperand
    softcap: float | None
    sinks: GraphOperand | None
    softmax_dtype: str | None
    layout: str
    outputs: tuple[str, ...]
    inputs: Mapping[str, TensorSpec]
    """The inputs of the graph, in their order."""
    initializers: Mapping[str, Initializer]
    cached: bool
    """Whether the queries are the last of more tokens: of `past_key` and `key`, or of `key` alone."""
    sizes: checks.Sizes = field(repr=False)
    """The lengths, with all keys, those of the cache too; a name may stand where the type says int."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the lengths that are known only when the graph runs, in order of appearance."""
        lengths = (length for spec in self.inputs.values() for length in spec.shape)
        names = (part for length in lengths if isinstance(length, str) for part in length.split("+"))
        return tuple(dict.fromkeys(name for name in names if not name.isdecimal()))

    @property
    def held(self) -> str:
        """The dtype that scores and sums are held in."""
        return "float64" if "float64" in (self.query.dtype, self.softmax_dtype) else "float32"

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks that all have to hold; `is_causal` is one of them, and a padded cache another."""
        found: list[Mask] = [masks.causal()] if self.is_causal else []
        if isinstance(self.attn_mask, Mask):
            found += _conjuncts(self.attn_mask)
        elif self.attn_mask is not None and self.attn_mask.dtype == "bool":
            found.append(masks.from_array(cast(Any, self.attn_mask)))
        return tuple(found)

    @property
    def biases(self) -> tuple[Bias, ...]:
        """What is added to the scores, one after the other."""
        given = [self.bias]
        if (
            self.attn_mask is not None
            and not isinstance(self.attn_mask, Mask)
            and self.attn_mask.dtype != "bool"
        ):
            given = [self.attn_mask, self.bias]
        wrapped = (
            each if isinstance(each, Bias) else biases.from_array(cast(Any, each))
            for each in given
            if each is not None
        )
        return tuple(addend for each in wrapped for addend in _addends(each))


def _conjuncts(mask: Mask) -> list[Mask]:
    if mask.name != "&":
        return [mask]
    return [each for part in mask.parts for each in _conjuncts(part)]


def _addends(bias: Bias) -> list[Bias]:
    if bias.name != "+":
        return [bias]
    return [each for part in bias.parts for each in _addends(part)]
