"""The parameters of torch.nn.MultiheadAttention under the names that layers use.

in_proj_weight (3 E, E)     ->  query.weight, key.weight, value.weight: a third each
q_proj_weight, ...          ->  query.weight, ...: if kdim or vdim differs from embed_dim
in_proj_bias (3 E,)         ->  query.bias, key.bias, value.bias
out_proj.weight, .bias      ->  out.weight, out.bias
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpa_xp._checks.layers import refuse_bias_of_keys
from sdpa_xp._libraries.protocols import AnyArray

ROLES = ("query", "key", "value")


def has_torch_names(mapping: Mapping[str, AnyArray], prefix: str) -> bool:
    """Return whether the mapping has the names of torch.nn.MultiheadAttention."""
    return f"{prefix}in_proj_weight" in mapping or f"{prefix}q_proj_weight" in mapping


def rename_parameters(function: str, mapping: Mapping[str, AnyArray], prefix: str) -> dict[str, AnyArray]:
    """Return the arrays whose names begin with `prefix`, under the names of a layer's parameters."""
    arrays = {name.removeprefix(prefix): x for name, x in mapping.items() if name.startswith(prefix)}
    refuse_bias_of_keys(function, arrays, ("bias_k", "bias_v"))
    renamed: dict[str, AnyArray] = {
        f"out.{kind}": arrays[f"out_proj.{kind}"] for kind in ("weight", "bias") if f"out_proj.{kind}" in arrays
    }
    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in arrays:
            thirds = _split_in_three(arrays[f"in_proj_{kind}"])
            renamed |= {f"{role}.{kind}": third for role, third in zip(ROLES, thirds, strict=True)}
    for role in ROLES:
        if f"{role[0]}_proj_weight" in arrays:
            renamed[f"{role}.weight"] = arrays[f"{role[0]}_proj_weight"]
    return renamed


def _split_in_three(packed: Any) -> list[AnyArray]:
    size = packed.shape[0] // 3
    return [packed[start : start + size, ...] for start in (0, size, 2 * size)]
