"""What layers are made of, and what goes into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from sdpa_xp._checks.arrays import floating, one_device, one_dtype, one_library
from sdpa_xp._checks.integers import integer
from sdpa_xp._checks.keywords import number
from sdpa_xp._checks.messages import message, type_name
from sdpa_xp._checks.shapes import axes
from sdpa_xp._libraries import array_signature, is_array
from sdpa_xp._libraries.overrides import override
from sdpa_xp._libraries.protocols import Array, Dtype

MOST_PASSED = 1024
_PASSED: set[object] = set()


def one_kind(function: str, values: Mapping[str, object]) -> dict[str, Array]:
    """All of `values` are floating arrays of one library, dtype and device."""
    _, arrays = one_library(function, values)
    for name, array in arrays.items():
        floating(function, name, array)
    one_dtype(function, arrays)
    one_device(function, arrays)
    return arrays


def width(function: str, name: str, value: object) -> int:
    """How wide something is: an integer of at least 1."""
    return integer(function, name, value, least=1)


def maps(function: str, given: Mapping[str, object], kind: type) -> None:
    """Each of `given` is a map of that kind."""
    for name, value in given.items():
        if not isinstance(value, kind):
            rule = f"`{name}` must be a {kind.__name__}"
            raise TypeError(message(function, rule, {name: type_name(value)}))


def named_arrays(function: str, name: str, value: object) -> None:
    """A mapping, such as a file of safetensors or `parameters` gives."""
    if not isinstance(value, Mapping):
        raise TypeError(message(function, f"`{name}` must be a mapping of names", {name: type_name(value)}))


def text(function: str, name: str, value: object) -> None:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(message(function, f"`{name}` must be a string", {name: type_name(value)}))


def linear(function: str, weight: object, bias: object) -> dict[str, Array]:
    """Return a weight (out, in), and a bias (out,) if there is one, as plain arrays."""
    given = {"weight": weight} | ({} if bias is None else {"bias": bias})
    arrays = one_kind(function, given)
    found = {name: array.shape for name, array in arrays.items()}
    axes(function, {"weight": found["weight"]}, 2)
    if bias is not None and found["bias"] != found["weight"][:1]:
        rule = "`bias` must have a number for each row of `weight` (out)"
        raise ValueError(message(function, rule, {f"{name}.shape": shape for name, shape in found.items()}))
    return arrays


def inputs(function: str, given: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Each input (..., length, width) is of the kind of the weights, and as wide as its own, (out, width).

    A value of a graph is of none: what is computed of it meets arrays of any library. What is alike but for its
    numbers is looked at once.
    """
    kinds = [array_signature(array) for name, x in given.items() for array in (x, weights[name])]
    alike = None if None in kinds else (function, *given, *kinds)
    if alike is not None and alike in _PASSED:
        return
    if override(*given.values()) is None:
        one_kind(function, {**given, **{f"{name}.weight": x for name, x in weights.items()}})
    for name, array in given.items():
        shape, width = array.shape, weights[name].shape[-1]
        if not shape or shape[-1] != width:
            rule = f"`{name}` must be as wide (axis -1) as the layer's `{name}` takes"
            raise ValueError(message(function, rule, {f"{name}.shape": shape, "width": width}))
    if alike is not None:
        if len(_PASSED) >= MOST_PASSED:
            _PASSED.clear()
        _PASSED.add(alike)


def with_lengths(function: str, given: Mapping[str, Any]) -> None:
    """Each input has a length and a width."""
    for name, array in given.items():
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
    """The maps give whole heads: of queries and keys equally wide, and as many keys as values."""
    count = integer(function, "num_heads", num_heads, least=1)
    shared = count if num_kv_heads is None else integer(function, "num_kv_heads", num_kv_heads, least=1)
    if count % shared:
        rule = "`num_heads` must be a multiple of `num_kv_heads`"
        raise ValueError(message(function, rule, {"num_heads": count, "num_kv_heads": shared}))
    for name, width in widths.items():
        letter, number_of = ("num_heads", count) if name == "query" else ("num_kv_heads", shared)
        if width == 0 or width % number_of:
            rule = f"`{name}` must give a multiple of `{letter}`"
            raise ValueError(message(function, rule, {f"{name} gives": width, letter: number_of}))
    if widths["query"] // count != widths["key"] // shared:
        rule = "the heads of `query` and `key` must be equally wide"
        got = {"query's": widths["query"] // count, "key's": widths["key"] // shared}
        raise ValueError(message(function, rule, got))
    joined = widths["value"] // shared * count
    if out_width not in (None, joined):
        rule = "`out` must take the heads of `value`, one for each of `num_heads`"
        raise ValueError(message(function, rule, {"out takes": out_width, "heads give": joined}))
    return count, shared


def of_heads(function: str, name: str, value: object, count: int, dtype: Dtype) -> None:
    """A number, or an array of one number or of one for each head."""
    if not is_array(value):
        number(function, name, value, dtype)
    elif value.shape not in ((), (count,)):
        rule = f"`{name}` must be a number, or an array of one for each head"
        raise ValueError(message(function, rule, {f"{name}.shape": value.shape, "num_heads": count}))


def known_names(function: str, given: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Each of the given names is the name of a parameter."""
    for name in given:
        if name not in known:
            rule = "the parameters must be among " + ", ".join(known)
            raise ValueError(message(f"{function}.with_parameters", rule, {"name": repr(name)}))


def entry(function: str, mapping: Mapping[str, object], name: str) -> object:
    """What the mapping has under a name."""
    if name not in mapping:
        hint = "`prefix` is what the names begin with, and `names` says what each map is called."
        got = {"names": ", ".join(sorted(mapping)[:8]) + ", ..." * (len(mapping) > 8) or "none"}
        raise ValueError(message(function, f"`mapping` must have {name!r}", got, hint))
    return mapping[name]


def module_of_arrays(function: str, like: Any) -> None:
    """A library that makes arrays."""
    if not callable(getattr(like, "zeros", None)):
        rule = "`like` must be a library of arrays, or an array of it"
        raise TypeError(message(function, rule, {"like": type_name(like)}))


def generator(function: str, rng: object) -> NoReturn:
    """Reached where `rng` is no generator of a library that is known."""
    rule = (
        "`rng` must be a numpy.random.Generator, cupy.random.Generator, torch.Generator, or key of JAX or MLX"
    )
    raise TypeError(message(function, rule, {"rng": type_name(rng)}))


def without_bias_of_keys(function: str, mapping: Mapping[str, object], names: tuple[str, ...]) -> None:
    """torch's key and value that every query may attend are no parameters here."""
    for name in names:
        if name in mapping:
            rule = "a layer must not have `bias_k` and `bias_v`, a key and a value of its own"
            hint = "Attend the inputs and that key apart, and merge with `merge_states`."
            raise ValueError(message(function, rule, {"mapping": name}, hint))


def multi_head_module(function: str, module: object) -> None:
    """torch.nn.MultiheadAttention."""
    if not all(hasattr(module, name) for name in ("in_proj_bias", "num_heads", "add_zero_attn", "state_dict")):
        rule = "`module` must be a torch.nn.MultiheadAttention"
        raise TypeError(message(function, rule, {"module": type_name(module)}))


def whole_heads(function: str, width: int, count: int) -> int:
    """The width of a head, where the heads are to share a width evenly."""
    if width % count:
        rule = "`query_dim` must be a multiple of `num_heads`"
        hint = "`head_dim` sets the width of a head."
        raise ValueError(message(function, rule, {"query_dim": width, "num_heads": count}, hint))
    return width // count
