"""The arrays of torch.nn.MultiheadAttention by the names that they have here.

in_proj_weight (3 E, E)     ->  query.weight, key.weight, value.weight: a third each
q_proj_weight, ...          ->  query.weight, ...: where kdim or vdim is another than embed_dim
in_proj_bias (3 E,)         ->  query.bias, key.bias, value.bias
out_proj.weight, .bias      ->  out.weight, out.bias
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpa_xp import _checks as checks
from sdpa_xp._libraries.protocols import AnyArray

ROLES = ("query", "key", "value")


def is_torch(mapping: Mapping[str, AnyArray], prefix: str) -> bool:
    """Whether these are the names of torch.nn.MultiheadAttention."""
    return f"{prefix}in_proj_weight" in mapping or f"{prefix}q_proj_weight" in mapping


def renamed(function: str, mapping: Mapping[str, AnyArray], prefix: str) -> dict[str, AnyArray]:
    """The arrays behind `prefix`, by the names of a layer's parameters."""
    own = {name.removeprefix(prefix): x for name, x in mapping.items() if name.startswith(prefix)}
    checks.without_bias_of_keys(function, own, ("bias_k", "bias_v"))
    found: dict[str, AnyArray] = {
        f"out.{kind}": own[f"out_proj.{kind}"] for kind in ("weight", "bias") if f"out_proj.{kind}" in own
    }
    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in own:
            found |= {
                f"{role}.{kind}": x for role, x in zip(ROLES, _thirds(own[f"in_proj_{kind}"]), strict=True)
            }
    for role in ROLES:
        if f"{role[0]}_proj_weight" in own:
            found[f"{role}.weight"] = own[f"{role[0]}_proj_weight"]
    return found


def _thirds(packed: Any) -> list[AnyArray]:
    size = packed.shape[0] // 3
    return [packed[start : start + size, ...] for start in (0, size, 2 * size)]
