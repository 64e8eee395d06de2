"""Checks of layers: their parameters, their inputs, and the mappings that they are read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from sdpa_xp._checks.arrays import check_floating, check_one_device, check_one_dtype, check_one_library
from sdpa_xp._checks.messages import shown
from sdpa_xp._checks.numbers import check_integer, check_number
from sdpa_xp._checks.shapes import check_axes
from sdpa_xp._libraries import array_signatures, has_override, is_array, is_number
from sdpa_xp._libraries.protocols import Array, Dtype
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

MOST_PASSED = 1024
_PASSED: set[object] = set()
"""Signatures of inputs that passed `inputs`, so that equal calls are checked once."""
_FROM_WIDTHS = {
    "Linear": "Linear.init(rng, in_dim, out_dim)",
    "MultiHeadAttention": "MultiHeadAttention.init(rng, query_dim, num_heads=...)",
    "SingleHeadAttention": "SingleHeadAttention.init(rng, embedding_dim, attention_dim)",
}
"""How to create a layer from widths, for callers who pass them to the constructor."""


def check_one_kind(function: str, values: Mapping[str, object]) -> dict[str, Array]:
    """Check that all values are floating arrays of one library, dtype and device, and return them."""
    _, arrays = check_one_library(function, values)
    for name, array in arrays.items():
        check_floating(function, name, array)
    check_one_dtype(function, arrays)
    check_one_device(function, arrays)
    return arrays


def check_width(function: str, name: str, value: object) -> int:
    """Check a width, an integer of at least 1, and return it."""
    return check_integer(function, name, value, least=1)


def check_maps(function: str, values: Mapping[str, object], kind: type) -> None:
    """Check that all values are maps of that kind."""
    for name, value in values.items():
        if not isinstance(value, kind):
            rule, hint = f"`{name}` must be a {kind.__name__}", ""
            if is_array(value):
                hint = f"Convert a weight (out, in): {kind.__name__}({name})."
            elif any(map(is_number, values.values())):
                hint = _hint_for_widths(function)
            raise ArgumentTypeError(function, rule, {name: shown(value)}, hint)


def _hint_for_widths(function: str) -> str:
    return f"To create it from widths, call {_FROM_WIDTHS[function]}." if function in _FROM_WIDTHS else ""


def check_named_arrays(function: str, name: str, value: object) -> None:
    """Check that `value` is a mapping, such as `parameters` or a file of safetensors."""
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(function, f"`{name}` must be a mapping of names", {name: shown(value)})


def check_text(function: str, name: str, value: object) -> None:
    """Check that `value` is a string."""
    if not isinstance(value, str):
        raise ArgumentTypeError(function, f"`{name}` must be a string", {name: shown(value)})


def check_linear(function: str, weight: object, bias: object) -> dict[str, Array]:
    """Check a weight (out, in) and a bias (out,) or None, and return them as plain arrays."""
    if is_number(weight):
        rule, got = "`weight` must be an array (out, in)", {"weight": shown(weight)}
        raise ArgumentTypeError(function, rule, got, _hint_for_widths(function))
    arrays = check_one_kind(function, {"weight": weight} | ({} if bias is None else {"bias": bias}))
    shapes = {name: array.shape for name, array in arrays.items()}
    check_axes(function, {"weight": shapes["weight"]}, 2)
    if bias is not None and shapes["bias"] != shapes["weight"][:1]:
        rule = "`bias` must have a number for each row of `weight` (out)"
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape for name, shape in shapes.items()})
    return arrays


def check_inputs(function: str, arrays: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check that each input (..., length, width) has the kind and the width of its weight (out, width).

    Inputs that differ only in their numbers from inputs that passed are not checked again. Values of a graph
    have no kind, because they can be combined with arrays of any library.
    """
    kinds = array_signatures(array for name, x in arrays.items() for array in (x, weights[name]))
    signature = None if kinds is None else (function, *arrays, *kinds)
    if signature is not None and signature in _PASSED:
        return
    if not has_override(*arrays.values()):
        check_one_kind(function, {**arrays, **{f"{name}.weight": x for name, x in weights.items()}})
    for name, array in arrays.items():
        shape, width = array.shape, weights[name].shape[-1]
        if not shape or shape[-1] != width:
            rule = f"`{name}` must have the width (axis -1) that the layer takes for `{name}`"
            raise ArgumentValueError(function, rule, {f"{name}.shape": shape, "width": width})
    if signature is not None:
        if len(_PASSED) >= MOST_PASSED:
            _PASSED.clear()
        _PASSED.add(signature)


def check_with_lengths(function: str, arrays: Mapping[str, Any]) -> None:
    """Check that each input has a length and a width."""
    for name, array in arrays.items():
        if len(array.shape) < 2:
            rule = f"`{name}` must have at least 2 axes, (..., length, width)"
            raise ArgumentValueError(function, rule, {f"{name}.shape": array.shape})


def check_layer_heads(
    function: str,
    widths: Mapping[str, int],
    num_heads: object,
    num_kv_heads: object,
    out_width: int | None,
) -> tuple[int, int]:
    """Check that the maps split into heads, and return the number of query heads and of key heads.

    The heads of queries and keys must be equally wide, and there must be as many heads of keys as of values.
    """
    count = check_integer(function, "num_heads", num_heads, least=1)
    key_heads = (
        count if num_kv_heads is None else check_integer(function, "num_kv_heads", num_kv_heads, least=1)
    )
    if count % key_heads:
        rule = "`num_heads` must be a multiple of `num_kv_heads`"
        raise ArgumentValueError(function, rule, {"num_heads": count, "num_kv_heads": key_heads})
    for name, width in widths.items():
        argument, heads = ("num_heads", count) if name == "query" else ("num_kv_heads", key_heads)
        if width == 0 or width % heads:
            rule = f"the output width of `{name}` must be a multiple of `{argument}`"
            got = {f"output width of {name}": width, argument: heads}
            raise ArgumentValueError(function, rule, got, _hint_for_groups(widths, count))
    if widths["query"] // count != widths["key"] // key_heads:
        rule = "the heads of `query` and `key` must have the same width"
        got = {"width in query": widths["query"] // count, "width in key": widths["key"] // key_heads}
        raise ArgumentValueError(function, rule, got, _hint_for_groups(widths, count))
    joined = widths["value"] // key_heads * count
    if out_width not in (None, joined):
        rule = "the input width of `out` must be the width of all `num_heads` heads of `value` together"
        raise ArgumentValueError(function, rule, {"input width of out": out_width, "width of heads": joined})
    return count, key_heads


def _hint_for_groups(widths: Mapping[str, int], count: int) -> str:
    """Hint at the number of key heads that fits the widths and `count` query heads; "" if none does."""
    head = widths["query"] // count
    key_heads, rest = divmod(widths["key"], head) if head and not widths["query"] % count else (0, 0)
    if rest or not key_heads or count % key_heads or not widths["value"] or widths["value"] % key_heads:
        return ""
    if key_heads == count:
        return "The heads are not grouped: leave out num_kv_heads."
    return f"For grouped heads, pass num_kv_heads={key_heads}."


def check_one_per_head(function: str, name: str, value: object, count: int, dtype: Dtype) -> None:
    """Check a number, or an array of one number or of one number for each head."""
    if not is_array(value):
        check_number(function, name, value, dtype)
    elif value.shape not in ((), (count,)):
        rule = f"`{name}` must be a number, or an array with one number for each head"
        raise ArgumentValueError(function, rule, {f"{name}.shape": value.shape, "num_heads": count})


def check_known_names(function: str, names: Iterable[str], known: Mapping[str, object]) -> None:
    """Check that all names are names of parameters."""
    for name in names:
        if name not in known:
            rule = "the parameters must be among " + ", ".join(known)
            raise ArgumentValueError(f"{function}.with_parameters", rule, {"name": repr(name)})


def check_mapping_entry(function: str, mapping: Mapping[str, object], name: str) -> object:
    """Check that the mapping has a name, and return its value."""
    if name not in mapping:
        hint = "`prefix` is what the names begin with, and `names` says what each map is called."
        got = {"names": ", ".join(sorted(mapping)[:8]) + ", ..." * (len(mapping) > 8) or "none"}
        raise ArgumentValueError(function, f"`mapping` must have {name!r}", got, hint)
    return mapping[name]


def check_module_of_arrays(function: str, like: Any) -> None:
    """Check that `like`, which is not an array, is the module of an array library."""
    if not callable(getattr(like, "zeros", None)):
        rule = "`like` must be a library of arrays, or an array of it"
        raise ArgumentTypeError(function, rule, {"like": shown(like)})


def refuse_unknown_generator(function: str, rng: object) -> NoReturn:
    """Refuse an `rng` that is not a generator of a known library."""
    rule = (
        "`rng` must be a numpy.random.Generator, cupy.random.Generator, torch.Generator, or key of JAX or MLX"
    )
    hint = f"Pass it first: {function}(numpy.random.default_rng(0), ...)."
    raise ArgumentTypeError(function, rule, {"rng": shown(rng)}, hint)


def refuse_bias_of_keys(function: str, mapping: Mapping[str, object], names: tuple[str, ...]) -> None:
    """Refuse the biases that torch appends as a key and a value: they are no parameters of a layer."""
    for name in names:
        if name in mapping:
            rule = "a layer cannot have `bias_k` and `bias_v`, an additional key and value"
            hint = "Attend to the inputs and to that key separately, and merge the results with `merge_states`."
            raise ArgumentValueError(function, rule, {"mapping": name}, hint)


def check_multi_head_module(function: str, module: object) -> None:
    """Check that `module` is a torch.nn.MultiheadAttention."""
    if not all(hasattr(module, name) for name in ("in_proj_bias", "num_heads", "add_zero_attn", "state_dict")):
        rule = "`module` must be a torch.nn.MultiheadAttention"
        raise ArgumentTypeError(function, rule, {"module": shown(module)})


def check_whole_heads(function: str, width: int, count: int) -> int:
    """Check that `count` heads share a width evenly, and return the width of a head."""
    if width % count:
        rule = "`query_dim` must be a multiple of `num_heads`"
        hint = "`head_dim` sets the width of a head."
        raise ArgumentValueError(function, rule, {"query_dim": width, "num_heads": count}, hint)
    return width // count
