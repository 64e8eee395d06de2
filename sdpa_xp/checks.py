"""Every message a user can see. A check runs before any work, and names the argument that is wrong.

The checks of shapes read shapes alone and take a symbol's name for a length, so the exporter shares them.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from sdpa_xp import namespace as door
from sdpa_xp.protocols import Array, Dtype, Namespace, Shape


def message(function: str, rule: str, got: Mapping[str, object], hint: str = "") -> str:
    """`function: what must hold; got name=value. hint`: the form of every error here."""
    seen = ", ".join(f"{name}={value}" for name, value in got.items())
    return f"{function}: {rule}; got {seen}." + (f" {hint}" if hint else "")


# ---------------------------------------------------------------------------------------------- arrays


def one_library(function: str, values: Mapping[str, object]) -> tuple[Namespace, dict[str, Array]]:
    """All of `values` are plain arrays of one library; returns its namespace, and them as arrays."""
    arrays = {name: _plain(function, name, value) for name, value in values.items()}
    spaces = {name: door.namespace(array) for name, array in arrays.items()}
    first, xp = next(iter(spaces.items()))
    for name, other in spaces.items():
        if other is not xp:
            rule = f"`{first}` and `{name}` must be arrays of one library"
            got = {first: _type_name(arrays[first]), name: _type_name(arrays[name])}
            raise TypeError(message(function, rule, got, "Convert one, for example with `from_dlpack`."))
    return xp, arrays


def _plain(function: str, name: str, value: object) -> Array:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ma.MaskedArray):
        hint = "Its own mask would be ignored: pass `.data`, and an `attn_mask` of what may attend."
    elif numpy is not None and isinstance(value, numpy.matrix):
        hint = "Its `*` is a matrix product: pass numpy.asarray(...) of it."
    elif not door.is_array(value):
        hint = "numpy.asarray(...) makes one of a list."
    elif not door.is_dense(value):
        hint = "A sparse or nested tensor is none: `.to_dense()` or padding makes one."
    else:
        return value
    rule = f"`{name}` must be a plain array of a library that follows the array API standard"
    raise TypeError(message(function, rule, {name: _type_name(value)}, hint))


def one_device(function: str, arrays: Mapping[str, Array]) -> None:
    """All of `arrays` live on one device, as far as their library says."""
    devices = {name: door.device(array) for name, array in arrays.items()}
    known = {name: device for name, device in devices.items() if device is not None}
    for name, device in known.items():
        first, reference = next(iter(known.items()))
        if device != reference:
            rule = f"`{first}` and `{name}` must be on one device"
            raise ValueError(message(function, rule, {f"{first}.device": reference, f"{name}.device": device}))


def floating(function: str, name: str, array: Array) -> None:
    """`array` holds real floating numbers of a dtype that is supported."""
    if door.dtype_name(array.dtype) not in door.FLOATING:
        rule = f"`{name}` must be one of {', '.join(door.FLOATING)}"
        hint = f"Convert it first: xp.astype({name}, xp.float32)."
        raise TypeError(message(function, rule, {f"{name}.dtype": array.dtype}, hint))


def one_dtype(function: str, arrays: Mapping[str, Array]) -> None:
    """All of `arrays` have the dtype of the first."""
    first, reference = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.dtype != reference.dtype:
            rule = f"`{first}` and `{name}` must have one dtype"
            got = {f"{first}.dtype": reference.dtype, f"{name}.dtype": array.dtype}
            raise TypeError(message(function, rule, got, f"Convert one: xp.astype({name}, {first}.dtype)."))


def added_dtype(function: str, name: str, array: Array, query: Array, accumulation: Dtype) -> None:
    """What joins the scores has the query's dtype, or the one that the scores are held in."""
    floating(function, name, array)
    if array.dtype != query.dtype and array.dtype != accumulation:
        rule = f"`{name}` must have the dtype of `query` or of the scores ({door.dtype_name(accumulation)})"
        got = {f"{name}.dtype": array.dtype, "query.dtype": query.dtype}
        raise TypeError(message(function, rule, got, f"Convert it: xp.astype({name}, query.dtype)."))


def mask_dtype(function: str, mask: Array) -> bool:
    """`attn_mask` is boolean or floating; returns whether it is boolean."""
    name = door.dtype_name(mask.dtype)
    if name.startswith(("int", "uint")):
        rule = "`attn_mask` must be boolean (True = may attend) or floating (added to the scores)"
        hint = "An integer mask is ambiguous: pass `attn_mask != 0` if 1 means may attend, `== 0` if 0 does."
        raise TypeError(message(function, rule, {"attn_mask.dtype": mask.dtype}, hint))
    return name.startswith("bool")


# ---------------------------------------------------------------------------------------------- shapes


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


# ------------------------------------------------------------------------------------- keyword values


def flag(function: str, name: str, value: object) -> bool:
    """A Python or NumPy bool."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(message(function, f"`{name}` must be True or False", {name: repr(value)}))


def number(function: str, name: str, value: object, dtype: Dtype = "float64") -> float:
    """A real number, finite in `dtype`, and 0 there only if it is 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = f"`{name}` must be a real number"
        raise TypeError(message(function, rule, {name: f"{value!r} ({_type_name(value)})"}))
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    largest = door.LARGEST[door.dtype_name(dtype)]
    if not abs(result) <= largest:
        rule = f"`{name}` must be finite" + (f" in {door.dtype_name(dtype)}" if math.isfinite(result) else "")
        raise ValueError(message(function, rule, {name: result}))
    if 0 < abs(result) < 1 / largest:
        rule = f"`{name}` must be 0 or at least {1 / largest:.1e} in size"
        raise ValueError(message(function, rule, {name: result}))
    return result


def softcap(function: str, value: object, dtype: Dtype = "float64") -> float | None:
    """A positive number; None or 0 is off."""
    cap = 0.0 if value is None else number(function, "softcap", value, dtype)
    if cap < 0:
        rule = "`softcap` must be positive, or None or 0 for off"
        raise ValueError(message(function, rule, {"softcap": value}))
    return cap or None


def implementation(function: str, value: object) -> None:
    """One of the implementations that there are."""
    if not (value is None or (isinstance(value, str) and value == "xp")):
        rule = "`implementation` must be None or 'xp', the portable one"
        raise ValueError(message(function, rule, {"implementation": repr(value)}))


# --------------------------------------------------------------------------------------------- states


def states(function: str, parts: Sequence[object]) -> tuple[Namespace, Sequence[tuple[Array, Array]]]:
    """One state or more, all of one library, dtype, device and shape; returns their namespace, and them."""
    if not parts:
        raise ValueError(message(function, "`states` must hold at least one state", {"states": "nothing"}))
    for index, part in enumerate(parts):
        if not (isinstance(part, tuple) and len(part) == 2):
            rule = f"`states[{index}]` must be an AttentionState, (output, lse)"
            raise TypeError(message(function, rule, {f"states[{index}]": _type_name(part)}))
    pairs = cast(Sequence[tuple[Array, Array]], parts)
    outputs = {f"states[{index}].output": output for index, (output, _) in enumerate(pairs)}
    lses = {f"states[{index}].lse": lse for index, (_, lse) in enumerate(pairs)}
    xp, _ = one_library(function, outputs | lses)
    one_device(function, outputs | lses)
    for arrays in (outputs, lses):
        (first, reference), *_ = arrays.items()
        floating(function, first, reference)
        one_dtype(function, arrays)
        for name, array in arrays.items():
            if array.shape != reference.shape:
                rule = f"`{first}` and `{name}` must have one shape"
                got = {f"{first}.shape": reference.shape, f"{name}.shape": array.shape}
                raise ValueError(message(function, rule, got))
    output, lse = pairs[0]
    accumulation = door.accumulation_dtype(xp, output.dtype)
    if lse.dtype != accumulation:
        rule = (
            f"`lse` must be {door.dtype_name(accumulation)} where `output` is {door.dtype_name(output.dtype)}"
        )
        raise TypeError(message(function, rule, {"lse.dtype": lse.dtype}))
    if output.ndim < 2 or lse.shape != output.shape[:-1]:
        rule = "`lse` must have the shape of `output` without its width (axis -1, Ev)"
        raise ValueError(message(function, rule, {"output.shape": output.shape, "lse.shape": lse.shape}))
    return xp, pairs


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
