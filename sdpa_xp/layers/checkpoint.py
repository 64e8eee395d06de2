"""The fields of a layer, read from a mapping of names to arrays, such as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_xp._checks.layers import check_named_arrays, check_text
from sdpa_xp._libraries.protocols import AnyArray
from sdpa_xp.layers.linear import Linear


def read_fields(
    function: str,
    mapping: Mapping[str, AnyArray],
    prefix: str,
    names: Mapping[str, str] | None,
    fields: Sequence[str],
) -> dict[str, Any]:
    """Return the fields that the mapping has: it calls `query` `prefix` + `names["query"]`, and so on."""
    check_named_arrays(function, "mapping", mapping)
    check_text(function, "prefix", prefix)
    if names is not None:
        check_named_arrays(function, "names", names)
    values: dict[str, Any] = {}
    for role in fields:
        name = prefix + (names or {}).get(role, role)
        if name in mapping:
            values[role] = mapping[name]
        elif role in ("query", "key", "value") or f"{name}.weight" in mapping:
            values[role] = Linear.from_mapping(mapping, f"{name}.")
    return values
