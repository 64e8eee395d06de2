"""One call of attention with specs where the arrays stand: what an exported graph has to compute."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, cast

from sdpa_xp import checks
from sdpa_xp_export.spec import TensorSpec

INPUTS = ("query", "key", "value", "attn_mask", "bias")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of `scaled_dot_product_attention`, checked, with the defaults filled in."""

    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    attn_mask: TensorSpec | None
    bias: TensorSpec | None
    is_causal: bool
    scale: float
    softcap: float | None

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs of the graph, in their order."""
        named = {name: getattr(self, name) for name in INPUTS}
        return {name: spec for name, spec in named.items() if spec is not None}

    @property
    def sizes(self) -> checks.Sizes:
        """The lengths of the call; a name may stand where the type says int."""
        return _sizes("Call", self.query, self.key, self.value)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the lengths that are known only when the graph runs, in order of appearance."""
        lengths = (length for spec in self.inputs.values() for length in spec.shape)
        return tuple(dict.fromkeys(length for length in lengths if isinstance(length, str)))

    @property
    def rules(self) -> dict[str, Any]:
        """The keywords of the call that are no arrays."""
        return {"is_causal": self.is_causal, "scale": self.scale, "softcap": self.softcap}

    def to_json(self) -> str:
        """The call as text, for the metadata of the model."""
        return json.dumps({name: str(spec) for name, spec in self.inputs.items()} | self.rules)

    @classmethod
    def from_json(cls, text: str) -> Call:
        """The call that `to_json` wrote; checked, since a file may hold anything."""
        read = json.loads(text)
        if not isinstance(read, dict) or not {"is_causal", "scale", "softcap"} <= read.keys():
            raise ValueError("no call")
        specs: dict[str, Any] = {name: TensorSpec.parse(read[name]) for name in INPUTS if name in read}
        return checked("verify", **specs, **{name: read[name] for name in ("is_causal", "scale", "softcap")})


def checked(
    function: str,
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    attn_mask: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Call:
    """The call, when it is one that the library takes and a graph can state."""
    named = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "bias": bias}
    specs = {name: spec for name, spec in named.items() if spec is not None}
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            got = {name: type(spec).__name__}
            raise TypeError(checks.message(function, f"`{name}` must be a TensorSpec", got))
        if not spec.floating and name != "attn_mask":
            rule = f"`{name}` must have a floating dtype"
            raise TypeError(checks.message(function, rule, {f"{name}.dtype": spec.dtype}))
        if spec.floating and spec.dtype != query.dtype:
            rule = f"`query` and `{name}` must have one dtype"
            got = {"query.dtype": query.dtype, f"{name}.dtype": spec.dtype}
            raise TypeError(checks.message(function, rule, got))
    _static(function, {name: specs[name] for name in ("query", "key", "value")})
    sizes = _sizes(function, query, key, value)
    for name in ("attn_mask", "bias"):
        if name in specs:
            shape = cast(tuple[int, ...], specs[name].shape)
            checks.broadcasts(function, name, shape, sizes.pairs, "(..., Hq, L, S)")
    held = "float64" if query.dtype == "float64" else "float32"
    scale = 1.0 / math.sqrt(sizes.width) if scale is None else checks.number(function, "scale", scale, held)
    return Call(
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        bias=bias,
        is_causal=checks.flag(function, "is_causal", is_causal),
        scale=scale,
        softcap=checks.softcap(function, softcap, held),
    )


def _static(function: str, specs: dict[str, TensorSpec]) -> None:
    """Heads and widths are ints: the graph is written for them."""
    for name, spec in specs.items():
        axes = {-1: "the width"} | ({-3: "the heads"} if len(spec.shape) > 2 else {})
        for axis, what in axes.items():
            length = spec.shape[axis] if spec.shape else None
            if isinstance(length, str):
                rule = f"{what} of `{name}` (axis {axis}) must be an int"
                raise ValueError(checks.message(function, rule, {f"{name}.shape": spec.shape}))


def _sizes(function: str, query: TensorSpec, key: TensorSpec, value: TensorSpec) -> checks.Sizes:
    # The rules compare lengths and never count with them, so a name serves where the type says int.
    shapes = (cast(tuple[int, ...], spec.shape) for spec in (query, key, value))
    return checks.shapes(function, *shapes)
