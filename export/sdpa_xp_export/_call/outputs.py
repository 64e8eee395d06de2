"""The outputs that a graph of a call may have, by name, and `AttentionStatistics` as outputs and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sdpa_xp import AttentionStatistics
from sdpa_xp.typing import TopKeys

AXES: dict[str, tuple[str, ...]] = {
    "output": ("L", "Ev"),
    "lse": ("L",),
    "weights": ("L", "S"),
    "scores": ("L", "S"),
    "row_max": ("L",),
    "entropy": ("L",),
    "key_sums": ("S",),
    "top_weights": ("L", "K"),
    "top_indices": ("L", "K"),
    "block_sums": ("M", "N"),
}
"""The outputs that a graph may have, and the axes of each behind (..., Hq)."""
OUTPUTS = tuple(name for name, axes in AXES.items() if {*axes} <= {"L", "S", "Ev"})
"""Those that take no argument of their own: only `attention_statistics` in a traced function has the others."""
SUMS_OF_QUERIES = ("key_sums", "block_sums")
IN_DTYPE_OF_QUERY = ("output", "weights", "scores")
"""The others have the accumulation dtype."""
OF_TOP_KEYS = {"top_weights": "weights", "top_indices": "indices"}


def outputs_of(statistics: str | Iterable[str]) -> tuple[str, ...]:
    """Return the outputs for the names in `of`, which the library has checked."""
    names = {statistics} if isinstance(statistics, str) else {*statistics}
    if "top_keys" in names:
        names |= {*OF_TOP_KEYS}
    return tuple(name for name in AXES if name in names)


def by_name(statistics: AttentionStatistics[Any]) -> dict[str, Any]:
    """Return the statistics that were asked for."""
    named = {name: value for name, value in statistics._asdict().items() if value is not None}
    top = named.pop("top_keys", None)
    return named if top is None else named | {name: getattr(top, field) for name, field in OF_TOP_KEYS.items()}


def as_statistics(arrays: Mapping[str, Any]) -> AttentionStatistics[Any]:
    """Return what the library returns from arrays with the names of `by_name`."""
    others = {name: array for name, array in arrays.items() if name not in OF_TOP_KEYS}
    top = {field: arrays[name] for name, field in OF_TOP_KEYS.items() if name in arrays}
    return AttentionStatistics(**others, top_keys=TopKeys(**top) if top else None)
