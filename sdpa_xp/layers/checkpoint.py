"""The fields of a layer, read from a mapping of names to arrays, such as a checkpoint.

The parameters of torch.nn.MultiheadAttention get the names that layers use:

    in_proj_weight (3 E, E)     ->  query.weight, key.weight, value.weight: a third each
    q_proj_weight, ...          ->  query.weight, ...: if kdim or vdim differs from embed_dim
    in_proj_bias (3 E,)         ->  query.bias, key.bias, value.bias
    out_proj.weight, .bias      ->  out.weight, out.bias
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_xp._libraries.protocols import AnyArray
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.layers.layer import check_mapping
from sdpa_xp.layers.linear import Linear, check_prefixed

ROLES = ("query", "key", "value")


def read_fields(
    function: str,
    mapping: Mapping[str, AnyArray],
    prefix: str,
    names: Mapping[str, str] | None,
    fields: Sequence[str],
) -> dict[str, Any]:
    """Return the fields that the mapping has: it calls `query` `prefix` + `names["query"]`, and so on."""
    check_prefixed(function, mapping, prefix)
    if names is not None:
        check_mapping(function, "names", names)
    values: dict[str, Any] = {}
    for role in fields:
        name = prefix + (names or {}).get(role, role)
        if name in mapping:
            values[role] = mapping[name]
        elif role in ROLES or f"{name}.weight" in mapping:
            values[role] = Linear.from_mapping(mapping, f"{name}.")
    return values


def has_torch_names(mapping: Mapping[str, AnyArray], prefix: str) -> bool:
    """Return whether the mapping has the names of torch.nn.MultiheadAttention."""
    return f"{prefix}in_proj_weight" in mapping or f"{prefix}q_proj_weight" in mapping


def rename_parameters(function: str, mapping: Mapping[str, AnyArray], prefix: str) -> dict[str, AnyArray]:
    """Return the arrays whose names begin with `prefix`, under the names of a layer's parameters."""
    arrays = {name.removeprefix(prefix): x for name, x in mapping.items() if name.startswith(prefix)}
    for name in ("bias_k", "bias_v"):  # torch appends them as a key and a value
        if name in arrays:
            rule = "a layer cannot have `bias_k` and `bias_v`, an additional key and value"
            hint = "Attend to the inputs and to that key separately, and merge the results with `merge_states`."
            raise ArgumentValueError(function, rule, {"mapping": name}, hint)
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
