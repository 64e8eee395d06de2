"""Which shapes fit. Shapes alone are read, and a length may be a symbol's name, so the exporter shares this."""

from __future__ import annotations

import math
from typing import NamedTuple

from sdpa_xp.checks.messages import message
from sdpa_xp.protocols import Shape


class Sizes(NamedTuple):
    """The lengths of one call; `batch` is what the leading axes broadcast to."""

    batch: Shape
    query_heads: int
    heads: int
    queries: int
    keys: int
    width: int
    flat: bool
    """Whether all inputs are 2-D: one head, and a result without a head axis."""

    @property
    def pairs(self) -> Shape:
        """The shape of the scores, which a mask must broadcast to."""
        lengths = (self.queries, self.keys)
        return lengths if self.flat else (*self.batch, self.query_heads, *lengths)

    @property
    def all_heads(self) -> int:
        """Query heads of all batch entries together."""
        return math.prod(self.batch) * self.query_heads


def shapes(function: str, query: Shape, key: Shape, value: Shape | None = None) -> Sizes:
    """query (..., Hq, L, E), key (..., H, S, E) and value (..., H, S, Ev) fit; returns their lengths."""
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, shape in named.items():
        if len(shape) < 2:
            rule = f"`{name}` must have at least 2 axes, (..., heads, length, width)"
            raise ValueError(message(function, rule, {f"{name}.shape": shape}))
        if any(n != n for n in shape):
            hint = f"Dask finds them with `{name}.compute_chunk_sizes()`."
            rule = f"the lengths of `{name}` must be known"
            raise ValueError(message(function, rule, {f"{name}.shape": shape}, hint))
    _agree(function, -1, "E", query=query, key=key)
    if query[-1] == 0:
        rule = "`query` and `key` must have a width (axis -1, E) of at least 1"
        raise ValueError(message(function, rule, {"query.shape": query}))
    headed = {name: shape if len(shape) > 2 else (1, *shape) for name, shape in named.items()}
    if value is not None:
        _agree(function, -2, "S", key=key, value=value)
        _agree(function, -3, "H", key=headed["key"], value=headed["value"])
    query_heads, heads = headed["query"][-3], headed["key"][-3]
    if query_heads != heads and (heads == 0 or query_heads % heads):
        rule = "the heads of `query` (axis -3, Hq) must be a multiple of those of `key` (H)"
        got = {"query.shape": query, "key.shape": key}
        raise ValueError(message(function, rule, got, _heads_hint(query_heads)))
    batch = broadcast(*(shape[:-3] for shape in headed.values()))
    if batch is None:
        rule = "the leading axes of " + ", ".join(f"`{name}`" for name in named) + " must broadcast"
        raise ValueError(message(function, rule, {f"{name}.shape": shape for name, shape in named.items()}))
    flat = all(len(shape) == 2 for shape in named.values())
    return Sizes(batch, query_heads, heads, query[-2], key[-2], query[-1], flat)


def broadcasts(function: str, name: str, shape: Shape, target: Shape, letters: str) -> None:
    """An array of `shape` broadcasts to `target` without making it larger."""
    if any(n != n for n in shape):
        rule = f"the lengths of `{name}` must be known"
        hint = f"Dask finds them with `{name}.compute_chunk_sizes()`."
        raise ValueError(message(function, rule, {f"{name}.shape": shape}, hint))
    if broadcast(shape, target) != target:
        rule = f"`{name}` must broadcast to {letters}"
        hint = ""
        if len(target) == 4 and shape == (target[0], target[-1]):
            hint = f"One row a batch entry has the shape (B, 1, 1, S): {name}[:, None, None, :]."
        raise ValueError(message(function, rule, {f"{name}.shape": shape, letters: target}, hint))


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape that all of `shapes` broadcast to; None where they do not."""
    rank = max(len(shape) for shape in shapes)
    result: list[int] = []
    for axis in range(-rank, 0):
        lengths = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(lengths) > 1:
            return None
        result.append(lengths.pop() if lengths else 1)
    return tuple(result)


def _agree(function: str, axis: int, letter: str, **named: Shape) -> None:
    (one, first), (other, second) = named.items()
    if first[axis] != second[axis]:
        rule = f"`{one}` and `{other}` must agree on axis {axis} ({letter})"
        raise ValueError(message(function, rule, {f"{one}.shape": first, f"{other}.shape": second}))


def _heads_hint(query_heads: int) -> str:
    if query_heads == 1:
        return "For one query head that meets every key head, broadcast `query` to the heads of `key`."
    return "Query head h reads key head h // (Hq // H)."
