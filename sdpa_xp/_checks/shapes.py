"""Checks of shapes. The exporter uses them too: only shapes are read, and a length may be a symbol's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

from sdpa_xp._libraries.protocols import Array, Namespace, Shape
from sdpa_xp.errors import ArgumentValueError

Layout: TypeAlias = Literal["...HLE", "...LHE"]
"""Heads before the length, or after it."""


def slice_of_axis(axis: int, start: int, stop: int) -> tuple[Any, ...]:
    """Return the index of `start` to `stop` on one axis, counted from the last (-1)."""
    return (..., slice(start, stop), *[slice(None)] * (-1 - axis))


def swap_heads_and_length(xp: Namespace, array: Array, layout: str) -> Array:
    """Convert (..., L, H, E) to (..., H, L, E), or back, as a view; in the layout "...HLE" nothing is to do."""
    if layout == HLE or array.ndim < 3:
        return array
    *batch, heads, length, width = range(array.ndim)
    return xp.permute_dims(array, (*batch, length, heads, width))


HLE = "...HLE"
LHE = "...LHE"
ONE_A_ROW = "(..., Hq, L, 1)"
THE_BATCH = "the batch (...)"
WITHOUT_VALUE = ("attention_weights", "attention_scores")
WITHOUT_BATCH = (
    "Inputs of three axes are (heads, length, width). If the first axis is a batch, give them one head: "
)
LAYOUTS = (HLE, LHE)
"""Heads before the length, as in torch and ONNX; or behind the length, as in JAX, Keras and flash-attention."""


class Sizes(NamedTuple):
    """The lengths of one call. `batch` is the shape that the leading axes broadcast to."""

    batch: Shape
    query_heads: int
    heads: int
    queries: int
    keys: int
    width: int
    is_2d: bool
    """Whether all inputs are 2-D: one head, and a result without a head axis."""

    @property
    def scores_shape(self) -> Shape:
        """The shape of the scores, which a mask must broadcast to."""
        lengths = (self.queries, self.keys)
        return lengths if self.is_2d else (*self.batch, self.query_heads, *lengths)

    @property
    def group(self) -> int:
        """The number of query heads for each key head."""
        return self.query_heads // (self.heads or 1)

    @property
    def all_heads(self) -> int:
        """The number of query heads of all batch entries together."""
        return math.prod(self.batch) * self.query_heads


def check_shapes(
    function: str, query: Shape, key: Shape, value: Shape | None = None, *, layout: str = HLE
) -> Sizes:
    """Check that query (..., Hq, L, E), key (..., H, S, E) and value (..., H, S, Ev) fit; return their lengths.

    If they fit only in the other layout, the message says so.
    """
    try:
        return _sizes(function, query, key, value, layout)
    except ValueError as error:
        other_layout = LHE if layout == HLE else HLE
        if not (isinstance(error, ArgumentValueError) and _fits(query, key, value, other_layout)):
            raise
        what = "the cache needs" if function.endswith((".attend", ".attend_state")) else "it is"
        hint = f'If the length comes before the heads, {what} `layout="{other_layout}"`.'
        if layout == LHE:
            hint = f'If the heads come before the length, {what} `layout="{other_layout}"`.'
        if function == "dot_product_attention":  # it has no argument `layout`
            hint = "If the heads come before the length, it is `scaled_dot_product_attention`."
        hint = f"{error.hint} {hint}" if error.hint else hint
        raise ArgumentValueError(function, error.rule, error.got, hint) from None


def _fits(query: Shape, key: Shape, value: Shape | None, layout: str) -> bool:
    with suppress(ValueError, TypeError):  # a TypeError if the length in the place of the heads is a symbol
        _sizes("", query, key, value, layout)
        return True
    return False


def _sizes(function: str, query: Shape, key: Shape, value: Shape | None, layout: str) -> Sizes:
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, shape in named.items():
        check_known(function, name, shape)
        if len(shape) < 2:
            order = "heads, length" if layout == HLE else "length, heads"
            rule = f"`{name}` must have at least 2 axes, (length, width) or (..., {order}, width)"
            raise ArgumentValueError(function, rule, {f"{name}.shape": shape})
    heads_first = {name: headed(shape, layout) for name, shape in named.items()}
    axes = {"E": -1, "S": -2, "H": -3}  # in `heads_first`; in the other layout the caller's axes are swapped

    def agree(letter: str, first: str, second: str) -> None:
        axis = axes[letter]
        if heads_first[first][axis] != heads_first[second][axis]:
            caller_axis = axis if layout == HLE or axis == -1 else -5 - axis
            rule = f"`{first}` and `{second}` must agree on axis {caller_axis} ({letter})"
            got = {f"{name}.shape": named[name] for name in (first, second)}
            raise ArgumentValueError(function, rule, got)

    agree("E", "query", "key")
    if query[-1] == 0:
        rule = "`query` and `key` must have a width (axis -1, E) of at least 1"
        raise ArgumentValueError(function, rule, {"query.shape": query})
    if value is not None:
        agree("S", "key", "value")
        agree("H", "key", "value")
    query_heads, heads = heads_first["query"][-3], heads_first["key"][-3]
    if query_heads != heads and (heads == 0 or query_heads % heads):
        axis = -3 if layout == HLE else -2
        rule = f"the heads of `query` (axis {axis}, Hq) must be a multiple of the heads of `key` (H)"
        got = {"query.shape": query, "key.shape": key}
        raise ArgumentValueError(function, rule, got, _heads_hint(query_heads))
    batch = broadcast(*(shape[:-3] for shape in heads_first.values()))
    if batch is None:
        rule = "the leading axes of " + ", ".join(f"`{name}`" for name in named) + " must broadcast"
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape for name, shape in named.items()})
    is_2d = all(len(shape) == 2 for shape in named.values())
    return Sizes(batch, query_heads, heads, heads_first["query"][-2], heads_first["key"][-2], query[-1], is_2d)


def check_broadcasts(
    function: str, name: str, shape: Shape, target: Shape, letters: str, otherwise: str = ""
) -> None:
    """Check that an array of `shape` broadcasts to `target` without making it larger.

    `otherwise` is the hint if the shapes suggest no other.
    """
    check_known(function, name, shape)
    if broadcast(shape, target) != target:
        rule = f"`{name}` must broadcast to {letters}"
        hint = otherwise
        if len(target) == 4 and shape == (target[0], target[-1]):
            hint = f"A mask with one row per batch entry has the shape (B, 1, 1, S): {name}[:, None, None, :]."
        elif letters == ONE_A_ROW:
            hint = _row_hint(name, shape, target)
        elif len(target) == 3 and shape == (target[0], target[-1]):
            hint = f"{WITHOUT_BATCH}query[:, None, :, :], and the mask {name}[:, None, None, :]."
        elif letters == THE_BATCH and not target and function in ("to_array", "plot.mask"):
            hint = f"Pass a `shape` with the batch: {(*shape, 1, 'L', 'S')}.".replace("'", "")
        elif letters == THE_BATCH and not target:
            hint = f"{WITHOUT_BATCH}query[:, None, :, :], and so on."
        elif function in WITHOUT_VALUE and name == "attn_mask":
            hint = f"{function} takes no value: its third argument is `attn_mask`."
        elif name.endswith("lengths") and shape[:-1] and broadcast(shape[:-1], target) == target:
            hint = f"Pass one integer for each batch entry: {name}.sum(axis=-1) counts the 1s of a mask."
        elif len(target) > (1 if letters == THE_BATCH else 4) and shape[:1] == target[:1]:
            hint = "If you called a layer: it takes (batch, length, width), without an axis of heads."
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, letters: target}, hint)


def check_broadcasts_to_sequences(
    function: str, name: str, shape: Shape, target: Shape, *, packed: bool
) -> None:
    """Check that an array broadcasts to the scores of a sequence of a ragged batch, (N, Hq, L, S).

    Sequences may have different S, and packed ones different L, so the message asks for a shape that fits all
    of them.
    """
    if broadcast(shape, target) != target:
        letters = "(N, Hq, 1, 1)" if packed else "(N, Hq, L, 1)"
        differ = "L and S" if packed else "S"
        rule = f"`{name}` must broadcast to {letters}, since sequences may have different {differ}"
        module = "biases" if name == "bias" else "masks"
        hint = f"`{module}.from_function` takes a function of the query and the key of any sequence."
        sizes = (*target[:-2], 1, 1) if packed else (*target[:-1], 1)
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, letters: sizes}, hint)


def _row_hint(name: str, shape: Shape, target: Shape) -> str:
    """Return how to index an array so that it broadcasts to (..., Hq, L, 1), or ""."""
    for letters, first in (("Hq", -3), ("L", -2), ("Hq and L", -3), ("B", -4), ("B and Hq", -4)):
        last = first + len(shape)
        count = 1 + letters.count("and")
        if len(shape) == count and len(target) >= -first and shape == target[first:last]:
            index = ", ".join([":"] * count + ["None"] * -last)
            return f"One for each {letters} has the shape {(*shape, *[1] * -last)}: {name}[{index}]."
    return ""


def broadcast(*shapes: Shape) -> Shape | None:
    """Return the shape that all shapes broadcast to, or None if they do not."""
    rank = max(len(shape) for shape in shapes)
    result: list[int] = []
    for axis in range(-rank, 0):
        lengths = [shape[axis] for shape in shapes if len(shape) >= -axis and _differ(shape[axis], 1)]
        # Compare with `!=`, not in a set: a length that torch exports as a symbol has no hash.
        if any(_differ(length, lengths[0]) for length in lengths[1:]):
            return None
        result.append(lengths[0] if lengths else 1)
    return tuple(result)


def _differ(length: int, other: int) -> bool:
    """Return whether two lengths are not known to be equal; a length of a graph refuses other comparisons."""
    try:
        return length != other
    except TypeError:
        return True


def check_known(function: str, name: str, shape: Shape) -> None:
    """Check that no length is NaN or None, as unknown lengths of a lazy array are."""
    if any(n is None or n != n for n in shape):
        rule = f"the lengths of `{name}` must be known"
        hint = "" if None in shape else f"Dask finds them with `{name}.compute_chunk_sizes()`."
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape}, hint)


def headed(shape: Shape, layout: str) -> Shape:
    """Return a shape as (..., H, L, E); a 2-D shape is one head."""
    if len(shape) == 2:
        return (1, *shape)
    *batch, first, second, width = shape
    return (*batch, first, second, width) if layout == HLE else (*batch, second, first, width)


def _heads_hint(query_heads: int) -> str:
    if query_heads == 1:
        return "For one query head that meets every key head, broadcast `query` to the heads of `key`."
    return "Query head h reads key head h // (Hq // H)."


def check_axes(function: str, named: Mapping[str, Shape], count: int) -> None:
    """Check that each shape has `count` axes."""
    for name, shape in named.items():
        if len(shape) != count:
            raise ArgumentValueError(function, f"`{name}` must have {count} axes", {f"{name}.shape": shape})


def check_columns(function: str, name: str, count: int, heads: int) -> None:
    """Check that there is one item for each query head."""
    if count != heads:
        rule = f"`{name}` must have as many heads as `query` (Hq)"
        raise ArgumentValueError(function, rule, {f"heads of {name}": count, "Hq": heads})


def check_appended(function: str, queries: int, tokens: int, sequence: int | None = None) -> None:
    """Check that there are not more queries than tokens, since the queries are the last tokens.

    Symbolic lengths pass.
    """
    if isinstance(queries, int) and isinstance(tokens, int) and queries > tokens:
        rule = "`query` must have at most as many tokens (L) as " + (
            "the cache" if sequence is None else f"sequence {sequence} of the cache"
        )
        hint = "`append` the keys and values of the new tokens first. "
        hint += "For queries that are not the last tokens, or an idle sequence, pass `is_causal=False`."
        raise ArgumentValueError(function, rule, {"L": queries, "tokens": tokens}, hint)
