"""Which shapes fit. Shapes alone are read, and a length may be a symbol's name, so the exporter shares this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from sdpa_xp._checks.messages import message
from sdpa_xp._libraries.protocols import Shape

HLE = "...HLE"
LHE = "...LHE"
ONE_A_ROW = "(..., Hq, L, 1)"
LAYOUTS = (HLE, LHE)
"""Heads before the length, as in torch and ONNX; or behind it, as in JAX, Keras and flash-attention."""


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


def shapes(function: str, query: Shape, key: Shape, value: Shape | None = None, *, layout: str = HLE) -> Sizes:
    """query (..., Hq, L, E), key (..., H, S, E) and value (..., H, S, Ev) fit; returns their lengths.

    If they fit in the other layout alone, the message says so.
    """
    try:
        return _fitting(function, query, key, value, layout)
    except ValueError as error:
        other = LHE if layout == HLE else HLE
        if not _fits(query, key, value, other):
            raise
        hint = f'If the length comes before the heads, it is `layout="{other}"`.'
        if layout == LHE:
            hint = f'If the heads come before the length, it is `layout="{other}"`.'
        if function == "dot_product_attention":  # which has no such argument
            hint = "If the heads come before the length, it is `scaled_dot_product_attention`."
        elif function.endswith(".attend"):
            hint = hint.replace("it is `layout", "the cache needs `layout")
        raise ValueError(f"{error} {hint}") from None


def _fits(query: Shape, key: Shape, value: Shape | None, layout: str) -> bool:
    with suppress(ValueError, TypeError):  # the second where a length that is a symbol stands for the heads
        _fitting("", query, key, value, layout)
        return True
    return False


def _fitting(function: str, query: Shape, key: Shape, value: Shape | None, layout: str) -> Sizes:
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, shape in named.items():
        known(function, name, shape)
        if len(shape) < 2:
            order = "heads, length" if layout == HLE else "length, heads"
            rule = f"`{name}` must have at least 2 axes, (..., {order}, width)"
            raise ValueError(message(function, rule, {f"{name}.shape": shape}))
    seen = {name: headed(shape, layout) for name, shape in named.items()}
    axes = {"E": -1, "S": -2, "H": -3}  # of what is seen; the caller's are swapped in the other layout

    def agree(letter: str, one: str, other: str) -> None:
        axis = axes[letter]
        if seen[one][axis] != seen[other][axis]:
            shown = axis if layout == HLE or axis == -1 else -5 - axis
            rule = f"`{one}` and `{other}` must agree on axis {shown} ({letter})"
            got = {f"{name}.shape": named[name] for name in (one, other)}
            raise ValueError(message(function, rule, got))

    agree("E", "query", "key")
    if query[-1] == 0:
        rule = "`query` and `key` must have a width (axis -1, E) of at least 1"
        raise ValueError(message(function, rule, {"query.shape": query}))
    if value is not None:
        agree("S", "key", "value")
        agree("H", "key", "value")
    query_heads, heads = seen["query"][-3], seen["key"][-3]
    if query_heads != heads and (heads == 0 or query_heads % heads):
        axis = -3 if layout == HLE else -2
        rule = f"the heads of `query` (axis {axis}, Hq) must be a multiple of those of `key` (H)"
        got = {"query.shape": query, "key.shape": key}
        raise ValueError(message(function, rule, got, _heads_hint(query_heads)))
    batch = broadcast(*(shape[:-3] for shape in seen.values()))
    if batch is None:
        rule = "the leading axes of " + ", ".join(f"`{name}`" for name in named) + " must broadcast"
        raise ValueError(message(function, rule, {f"{name}.shape": shape for name, shape in named.items()}))
    flat = all(len(shape) == 2 for shape in named.values())
    return Sizes(batch, query_heads, heads, seen["query"][-2], seen["key"][-2], query[-1], flat)


def broadcasts(function: str, name: str, shape: Shape, target: Shape, letters: str) -> None:
    """An array of `shape` broadcasts to `target` without making it larger."""
    known(function, name, shape)
    if broadcast(shape, target) != target:
        rule = f"`{name}` must broadcast to {letters}"
        hint = ""
        if len(target) == 4 and shape == (target[0], target[-1]):
            hint = f"One row a batch entry has the shape (B, 1, 1, S): {name}[:, None, None, :]."
        elif letters == ONE_A_ROW:
            hint = _row_hint(name, shape, target)
        raise ValueError(message(function, rule, {f"{name}.shape": shape, letters: target}, hint))


def _row_hint(name: str, shape: Shape, target: Shape) -> str:
    """Say how an array gets the axes that it lacks to broadcast to (..., Hq, L, 1)."""
    for letters, first in (("Hq", -3), ("L", -2), ("Hq and L", -3), ("B", -4), ("B and Hq", -4)):
        last = first + len(shape)
        count = 1 + letters.count("and")
        if len(shape) == count and len(target) >= -first and shape == target[first:last]:
            index = ", ".join([":"] * count + ["None"] * -last)
            return f"One for each {letters} has the shape {(*shape, *[1] * -last)}: {name}[{index}]."
    return ""


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape that all of `shapes` broadcast to; None where they do not."""
    rank = max(len(shape) for shape in shapes)
    result: list[int] = []
    for axis in range(-rank, 0):
        lengths = [shape[axis] for shape in shapes if len(shape) >= -axis and shape[axis] != 1]
        # each by `!=`: a length that torch exports as a symbol has no hash to be put into a set
        if any(length != lengths[0] for length in lengths[1:]):
            return None
        result.append(lengths[0] if lengths else 1)
    return tuple(result)


def known(function: str, name: str, shape: Shape) -> None:
    """The lengths are numbers; a lazy array may not know its own."""
    if any(n != n for n in shape):
        rule = f"the lengths of `{name}` must be known"
        hint = f"Dask finds them with `{name}.compute_chunk_sizes()`."
        raise ValueError(message(function, rule, {f"{name}.shape": shape}, hint))


def headed(shape: Shape, layout: str) -> Shape:
    """As (..., H, L, E); 2-D is one head."""
    *batch, one, other, width = shape if len(shape) > 2 else (1, *shape)
    swap = layout != HLE and len(shape) > 2
    return (*batch, other, one, width) if swap else (*batch, one, other, width)


def _heads_hint(query_heads: int) -> str:
    if query_heads == 1:
        return "For one query head that meets every key head, broadcast `query` to the heads of `key`."
    return "Query head h reads key head h // (Hq // H)."


def axes(function: str, named: Mapping[str, Shape], count: int) -> None:
    """Each of `named` has so many axes."""
    for name, shape in named.items():
        if len(shape) != count:
            raise ValueError(message(function, f"`{name}` must have {count} axes", {f"{name}.shape": shape}))


def entries(function: str, query: Shape, count: int) -> None:
    """The query has 4 axes, and an entry for each of `count` sequences."""
    if len(query) != 4 or query[0] != count:
        rule = "`query` must have an entry for each sequence of the cache, (N, Hq, L, E)"
        raise ValueError(message(function, rule, {"query.shape": query, "N": count}))


def columns(function: str, name: str, count: int, heads: int) -> None:
    """There is one for each query head."""
    if count != heads:
        rule = f"`{name}` must be for as many heads as `query` has (Hq)"
        raise ValueError(message(function, rule, {name: f"for {count}", "Hq": heads}))


def bucket_table(function: str, shape: Shape, both_ways: bool) -> None:
    """A table (buckets, Hq) has enough buckets for near and far, in each direction that it is for."""
    least = 4 if both_ways else 2
    if len(shape) != 2 or shape[0] < least or (both_ways and shape[0] % 2):
        rule = f"`table` must be (buckets, Hq), with {least} buckets or more"
        rule += " and an even number of them" if both_ways else ""
        raise ValueError(message(function, rule, {"table.shape": shape}))
