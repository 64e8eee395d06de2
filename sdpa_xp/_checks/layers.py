"""Checks of layers: their parameters, their inputs, and the mappings that they are read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from sdpa_xp._checks.arrays import floating, one_device, one_dtype, one_library
from sdpa_xp._checks.integers import integer
from sdpa_xp._checks.keywords import number
from sdpa_xp._checks.messages import message, type_name
from sdpa_xp._checks.shapes import axes
from sdpa_xp._libraries import array_signatures, has_override, is_array
from sdpa_xp._libraries.protocols import Array, Dtype

MOST_PASSED = 1024
_PASSED: set[object] = set()
"""Signatures of inputs that passed `inputs`, so that equal calls are checked once."""


def one_kind(function: str, values: Mapping[str, object]) -> dict[str, Array]:
    """Check that all values are floating arrays of one library, dtype and device, and return them."""
    _, arrays = one_library(function, values)
    for name, array in arrays.items():
        floating(function, name, array)
    one_dtype(function, arrays)
    one_device(function, arrays)
    return arrays


def width(function: str, name: str, value: object) -> int:
    """Check a width, an integer of at least 1, and return it."""
    return integer(function, name, value, least=1)


def maps(function: str, values: Mapping[str, object], kind: type) -> None:
    """Check that all values are maps of that kind."""
    for name, value in values.items():
        if not isinstance(value, kind):
            rule = f"`{name}` must be a {kind.__name__}"
            raise TypeError(message(function, rule, {name: type_name(value)}))


def named_arrays(function: str, name: str, value: object) -> None:
    """Check that `value` is a mapping, such as `parameters` or a file of safetensors."""
    if not isinstance(value, Mapping):
        raise TypeError(message(function, f"`{name}` must be a mapping of names", {name: type_name(value)}))


def text(function: str, name: str, value: object) -> None:
    """Check that `value` is a string."""
    if not isinstance(value, str):
        raise TypeError(message(function, f"`{name}` must be a string", {name: type_name(value)}))


def linear(function: str, weight: object, bias: object) -> dict[str, Array]:
    """Check a weight (out, in) and a bias (out,) or None, and return them as plain arrays."""
    arrays = one_kind(function, {"weight": weight} | ({} if bias is None else {"bias": bias}))
    shapes = {name: array.shape for name, array in arrays.items()}
    axes(function, {"weight": shapes["weight"]}, 2)
    if bias is not None and shapes["bias"] != shapes["weight"][:1]:
        rule = "`bias` must have a number for each row of `weight` (out)"
        raise ValueError(message(function, rule, {f"{name}.shape": shape for name, shape in shapes.items()}))
    return arrays


def inputs(function: str, arrays: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check that each input (..., length, width) has the kind and the width of its weight (out, width).

    Inputs that differ only in their numbers from inputs that passed are not checked again. Values of a graph
    have no kind, because they can be combined with arrays of any library.
    """
    kinds = array_signatures(array for name, x in arrays.items() for array in (x, weights[name]))
    signature = None if kinds is None else (function, *arrays, *kinds)
    if signature is not None and signature in _PASSED:
        return
    if not has_override(*arrays.values()):
        one_kind(function, {**arrays, **{f"{name}.weight": x for name, x in weights.items()}})
    for name, array in arrays.items():
        shape, width = array.shape, weights[name].shape[-1]
        if not shape or shape[-1] != width:
            rule = f"`{name}` must be as wide (axis -1) as the layer's `{name}` takes"
            raise ValueError(message(function, rule, {f"{name}.shape": shape, "width": width}))
    if signature is not None:
        if len(_PASSED) >= MOST_PASSED:
            _PASSED.clear()
        _PASSED.add(signature)


def with_lengths(function: str, arrays: Mapping[str, Any]) -> None:
    """Check that each input has a length and a width."""
    for name, array in arrays.items():
        if len(array.shape) < 2:
            rule = f"`{name}` must have at least 2 axes, (..., length, width)"
            raise ValueError(message(function, rule, {f"{name}.shape": array.shape}))


def layer_heads(
    function: str,
    widths: Mapping[str, int],
    num_heads: object,
    num_kv_heads: object,
    out_width: int | None,
) -> tuple[int, int]:
    """Check that the maps split into heads, and return the number of query heads and of key heads.

    The heads of queries and keys must be equally wide, and there must be as many heads of keys as of values.
    """
    count = integer(function, "num_heads", num_heads, least=1)
    key_heads = count if num_kv_heads is None else integer(function, "num_kv_heads", num_kv_heads, least=1)
    if count % key_heads:
        rule = "`num_heads` must be a multiple of `num_kv_heads`"
        raise ValueError(message(function, rule, {"num_heads": count, "num_kv_heads": key_heads}))
    for name, width in widths.items():
        argument, heads = ("num_heads", count) if name == "query" else ("num_kv_heads", key_heads)
        if width == 0 or width % heads:
            rule = f"`{name}` must give a multiple of `{argument}`"
            raise ValueError(message(function, rule, {f"{name} gives": width, argument: heads}))
    if widths["query"] // count != widths["key"] // key_heads:
        rule = "the heads of `query` and `key` must be equally wide"
        got = {"query's": widths["query"] // count, "key's": widths["key"] // key_heads}
        raise ValueError(message(function, rule, got))
    joined = widths["value"] // key_heads * count
    if out_width not in (None, joined):
        rule = "`out` must take the heads of `value`, one for each of `num_heads`"
        raise ValueError(message(function, rule, {"out takes": out_width, "heads give": joined}))
    return count, key_heads


def one_per_head(function: str, name: str, value: object, count: int, dtype: Dtype) -> None:
    """Check a number, or an array of one number or of one number for each head."""
    if not is_array(value):
        number(function, name, value, dtype)
    elif value.shape not in ((), (count,)):
        rule = f"`{name}` must be a number, or an array of one for each head"
        raise ValueError(message(function, rule, {f"{name}.shape": value.shape, "num_heads": count}))


def known_names(function: str, names: Iterable[str], known: Mapping[str, object]) -> None:
    """Check that all names are names of parameters."""
    for name in names:
        if name not in known:
            rule = "the parameters must be among " + ", ".join(known)
            raise ValueError(message(f"{function}.with_parameters", rule, {"name": repr(name)}))


def mapping_entry(function: str, mapping: Mapping[str, object], name: str) -> object:
    """Check that the mapping has a name, and return its value."""
    if name not in mapping:
        hint = "`prefix` is what the names begin with, and `names` says what each map is called."
        got = {"names": ", ".join(sorted(mapping)[:8]) + ", ..." * (len(mapping) > 8) or "none"}
        raise ValueError(message(function, f"`mapping` must have {name!r}", got, hint))
    return mapping[name]


def module_of_arrays(function: str, like: Any) -> None:
    """Check that `like`, which is no array, is the module of an array library."""
    if not callable(getattr(like, "zeros", None)):
        rule = "`like` must be a library of arrays, or an array of it"
        raise TypeError(message(function, rule, {"like": type_name(like)}))


def unknown_generator(function: str, rng: object) -> NoReturn:
    """Refuse an `rng` that is no generator of a known library."""
    rule = (
        "`rng` must be a numpy.random.Generator, cupy.random.Generator, torch.Generator, or key of JAX or MLX"
    )
    raise TypeError(message(function, rule, {"rng": type_name(rng)}))


def without_bias_of_keys(function: str, mapping: Mapping[str, object], names: tuple[str, ...]) -> None:
    """Refuse the biases that torch appends as a key and a value: they are no parameters of a layer."""
    for name in names:
        if name in mapping:
            rule = "a layer must not have `bias_k` and `bias_v`, a key and a value of its own"
            hint = "Attend the inputs and that key apart, and merge with `merge_states`."
            raise ValueError(message(function, rule, {"mapping": name}, hint))


def multi_head_module(function: str, module: object) -> None:
    """Check that `module` is a torch.nn.MultiheadAttention."""
    if not all(hasattr(module, name) for name in ("in_proj_bias", "num_heads", "add_zero_attn", "state_dict")):
        rule = "`module` must be a torch.nn.MultiheadAttention"
        raise TypeError(message(function, rule, {"module": type_name(module)}))


def whole_heads(function: str, width: int, count: int) -> int:
    """Check that `count` heads share a width evenly, and return the width of a head."""
    if width % count:
        rule = "`query_dim` must be a multiple of `num_heads`"
        hint = "`head_dim` sets the width of a head."
        raise ValueError(message(function, rule, {"query_dim": width, "num_heads": count}, hint))
    return width // count
