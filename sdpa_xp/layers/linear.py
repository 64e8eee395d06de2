"""A linear map of the last axis, and maps that are drawn at random or read from a mapping, for a layer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from .._checks import nearest_hint, shown
from .._checks.arrays import check_axes, check_one_kind
from .._checks.keywords import check_flag, check_integer, check_keys, explains_keywords
from .._libraries import (
    accumulation_dtype,
    array_signatures,
    astype_if_needed,
    computing,
    dtype_name,
    is_number,
    libraries,
    library_of,
    with_axes,
)
from .._libraries.protocols import AnyArray, Array, Rng
from ..errors import ArgumentTypeError, ArgumentValueError
from .layer import Layer, copier

A = TypeVar("A", bound=AnyArray)
ROLES = ("query", "key", "value")
MOST_PASSED = 1024
_PASSED: set[object] = set()
"""Signatures of inputs that passed `check_inputs`, so that equal calls are checked once."""
_FROM_WIDTHS = {
    "Linear": "Linear.init(rng, in_dim, out_dim)",
    "MultiHeadAttention": "MultiHeadAttention.init(rng, query_dim, num_heads=...)",
    "SingleHeadAttention": "SingleHeadAttention.init(rng, embedding_dim, attention_dim)",
}
"""How to create a layer from widths, for callers who pass them to the constructor."""


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linear(Layer):
    r"""A linear map of the last axis, $y = x W^T + b$.

    Args:
        weight: W, (out, in), as in torch and in most files.
        bias: b, (out,), or None.

    Raises:
        TypeError: An argument is not an array, or the arrays have several libraries or dtypes.
        ValueError: The shapes do not fit, or the arrays are on several devices.

    Examples:
        >>> import numpy as np
        >>> Linear(np.asarray([[1.0, 2.0]]), bias=np.asarray([0.5]))(np.ones((3, 2)))
        array([[3.5],
               [3.5],
               [3.5]])
    """

    weight: AnyArray
    bias: AnyArray | None = None

    def __post_init__(self) -> None:
        if is_number(self.weight):
            rule, got = "`weight` must be an array (out, in)", {"weight": shown(self.weight)}
            raise ArgumentTypeError("Linear", rule, got, hint_for_widths("Linear"))
        fields = {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        _, arrays = check_one_kind("Linear", fields)
        shapes = {name: array.shape for name, array in arrays.items()}
        check_axes("Linear", {"weight": shapes["weight"]}, 2)
        if self.bias is not None and shapes["bias"] != shapes["weight"][:1]:
            rule = "`bias` must have a number for each row of `weight` (out)"
            raise ArgumentValueError("Linear", rule, {f"{name}.shape": x.shape for name, x in arrays.items()})
        for name, array in arrays.items():  # without their subclasses
            object.__setattr__(self, name, array)

    def __call__(self, x: A) -> A:
        r"""Return $x W^T + b$ for each row of `x`.

        Args:
            x: (..., in), with the library, device and dtype of the map.

        Returns:
            (..., out).
        """
        check_inputs("Linear", {"x": x}, {"x": self.weight})
        return self._apply(x)

    def _apply(self, x: A) -> A:
        """Return the map of an `x` that has been checked."""
        array, weight = library_of(x).base_form(cast(Array, x)), cast(Array, self.weight)
        for part in (weight, self.bias):  # which may carry derivatives where the input carries none
            adopted = None if part is None else library_of(part).adopted(array)
            array = array if adopted is None else adopted
        library, dtype = library_of(array), array.dtype
        xp = library.namespace(array)
        if not library.multiplies_halves:  # NumPy's BLAS has no half, and Dask cannot sum bfloat16
            dtype = accumulation_dtype(xp, dtype)
        with computing(array):
            if dtype != array.dtype:
                array, weight = (astype_if_needed(xp, x, dtype) for x in (array, weight))
            shape = array.shape
            if flattens := library.flattens_products and len(shape) > 2:
                array = xp.reshape(array, (math.prod(shape[:-1]), shape[-1]))
            y = array @ xp.matrix_transpose(weight)
            if flattens:
                y = xp.reshape(y, (*shape[:-1], y.shape[-1]))
            if self.bias is not None:
                y = y + with_axes(cast(Array, self.bias), y.ndim)
            return cast(A, astype_if_needed(xp, y, x.dtype))

    def __repr__(self) -> str:
        if len(getattr(self.weight, "shape", ())) < 2:  # JAX put something else where arrays were, such as axes
            return Layer.__repr__(self)
        in_width, out_width = self.widths
        bias = ", bias=None" if self.bias is None else ""
        return f"Linear({in_width} -> {out_width}{bias}, {dtype_name(self.weight.dtype)})"

    @property
    def widths(self) -> tuple[int, int]:
        """The width of the input and the width of the output."""
        out_width, in_width = self.weight.shape[-2:]  # a stack of maps, for jax.vmap, has more axes
        return in_width, out_width

    @classmethod
    def init(
        cls, rng: Rng, in_dim: int, out_dim: int, *, bias: bool = True, like: AnyArray | None = None
    ) -> Self:
        """Create a map with random weights by Xavier's rule, and a bias of 0.

        Args:
            in_dim: The width of the input. All other arguments and errors are as in
                `layers.MultiHeadAttention.init`.
            out_dim: The width of the output.
        """
        function = "Linear.init"
        in_width, out_width = check_widths(function, in_dim=in_dim, out_dim=out_dim)
        linear = init_linears(function, rng, {"": (in_width, out_width)}, bias=bias, like=like)[""]
        return cls(linear.weight, linear.bias)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, AnyArray], prefix: str = "") -> Self:
        """Create a map from the arrays called `prefix` + "weight" and, if there is one, `prefix` + "bias".

        Args:
            mapping: Arrays by name. All other arguments and errors are as in
                `layers.MultiHeadAttention.from_mapping`.
        """
        _check_prefixed("Linear.from_mapping", mapping, prefix)
        weight = _required("Linear.from_mapping", mapping, f"{prefix}weight", ())
        return cls(weight, mapping.get(f"{prefix}bias"))


def check_widths(function: str, **widths: int | None) -> list[int]:
    """Check widths by their names; a `key_dim` or `value_dim` that is None is the width before it."""
    checked: list[int] = []
    for name, width in widths.items():
        as_before = width is None and name in ("key_dim", "value_dim")
        checked.append(checked[-1] if as_before else check_integer(function, name, width, least=1))
    return checked


def init_linears(
    function: str, rng: Any, widths: Mapping[str, tuple[int, int]], *, bias: bool, like: AnyArray | None
) -> dict[str, Linear]:
    """Return a map for each of the widths (in, out), with weights by Xavier's rule, and biases of 0 or None.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS
    2010, equation 16: uniform up to sqrt(6 / (in + out)), so that a map keeps the variance of its inputs in the
    forward pass and of its gradients in the backward pass.
    """
    check_flag(function, "bias", bias)
    count = sum(in_width * out_width for in_width, out_width in widths.values())
    with computing(rng), computing(like):
        numbers = _draw_uniform(function, rng, count, like)  # all at once: a key of JAX is good for one draw
    library, start, maps = library_of(numbers), 0, {}
    xp, device = library.namespace(numbers), library.device(numbers)
    dtype = numbers.dtype if like is None else like.dtype
    with computing(numbers):
        for name, (in_width, out_width) in widths.items():
            bound, stop = math.sqrt(6 / (in_width + out_width)), start + in_width * out_width
            weight = xp.reshape(numbers[start:stop] * (2 * bound) - bound, (out_width, in_width))
            zeros = xp.zeros((out_width,), dtype=dtype, device=device) if bias else None
            maps[name], start = Linear(astype_if_needed(xp, weight, dtype), zeros), stop
    return maps


def check_inputs(function: str, arrays: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check that each input (..., length, width) has the kind and the width of its weight (out, width).

    Inputs that differ only in their numbers from inputs that passed are not checked again. Values of a graph
    have a dtype alone, because they can be combined with arrays of any library.
    """
    kinds = array_signatures(array for name, x in arrays.items() for array in (x, weights[name]))
    signature = None if kinds is None else (function, *arrays, *kinds)
    if signature is not None and signature in _PASSED:
        return
    named = {**arrays, **{f"{name}.weight": x for name, x in weights.items()}}
    check_one_kind(function, named)
    for name, array in arrays.items():
        shape, width = array.shape, weights[name].shape[-1]
        if not shape or shape[-1] != width:
            rule = f"`{name}` must have the width (axis -1) that the layer takes for `{name}`"
            raise ArgumentValueError(function, rule, {f"{name}.shape": shape, "width": width})
    if signature is not None:
        if len(_PASSED) >= MOST_PASSED:  # no lock: a signature that a thread loses here is checked once more
            _PASSED.clear()
        _PASSED.add(signature)


def read_fields(
    function: str,
    mapping: Mapping[str, AnyArray],
    prefix: str,
    names: Mapping[str, str] | None,
    fields: Sequence[str],
) -> dict[str, Any]:
    """Return the fields that the mapping has: it calls `query` `prefix` + `names["query"]`, and so on.

    Query, key and value must be there, and so must what `names` asks for. Without `names`, a layer that has an
    `out` may have the names of torch.nn.MultiheadAttention.
    """
    _check_prefixed(function, mapping, prefix)
    if not names and "out" in fields:
        mapping, prefix = _with_layer_names(function, mapping, prefix)
    names = {} if names is None else names
    check_keys(function, "names", names, fields)
    places = {field: f"{prefix}{names.get(field, field)}" for field in fields}
    values: dict[str, Any] = {}
    for field, place in places.items():
        is_needed, is_map = field in ROLES or field in names, field in (*ROLES, "out")
        parts = [f"{place}.weight", f"{place}.bias"] if is_map else [place]
        if is_needed or any(part in mapping for part in parts):
            array = _required(function, mapping, parts[0], places.values())
            values[field] = Linear(array, mapping.get(parts[1])) if is_map else array
    return values


def _required(function: str, mapping: Mapping[str, AnyArray], name: str, places: Iterable[str]) -> AnyArray:
    """Return an array of the mapping; of what lies at the other `places`, none is meant."""
    if name in mapping:
        return mapping[name]
    names = sorted(map(str, mapping))
    others = [other for other in names if other.rpartition(".")[0] not in places]
    hint = (
        "`prefix` is what the names begin with, and `names` says what each map is called. "
        "If one matrix has query, key and value, split it first."
    )
    got = {"names": ", ".join(names[:8]) + ", ..." * (len(names) > 8) or "none"}
    hint = f"{hint} {nearest_hint(name, others, 0.75)}".rstrip()
    raise ArgumentValueError(function, f"`mapping` must have {name!r}", got, hint)


def _with_layer_names(
    function: str, mapping: Mapping[str, AnyArray], prefix: str
) -> tuple[Mapping[str, AnyArray], str]:
    """Return a mapping, and the prefix of its names, with a layer's names for torch.nn.MultiheadAttention's:

    in_proj_weight (3 E, E)     ->  query.weight, key.weight, value.weight: a third each
    q_proj_weight, ...          ->  query.weight, ...: if kdim or vdim differs from embed_dim
    in_proj_bias (3 E,)         ->  query.bias, key.bias, value.bias
    out_proj.weight, .bias      ->  out.weight, out.bias
    """
    if f"{prefix}in_proj_weight" not in mapping and f"{prefix}q_proj_weight" not in mapping:
        return mapping, prefix  # nothing else of it is read: a file may load each array when it is asked for
    named = ((name, x) for name, x in mapping.items() if name.startswith(prefix))
    arrays: dict[str, Any] = {name.removeprefix(prefix): x for name, x in named}
    for name in ("bias_k", "bias_v"):  # torch appends them as a key and a value
        if name in arrays:
            rule = "a layer cannot have `bias_k` and `bias_v`, an additional key and value"
            hint = "Attend to the inputs and to that key separately, and merge the results with `merge_states`."
            raise ArgumentValueError(function, rule, {"mapping": name}, hint)
    renamed = {
        name.replace("out_proj.", "out."): x for name, x in arrays.items() if name.startswith("out_proj.")
    }
    for n, role in enumerate(ROLES):
        if f"{role[0]}_proj_weight" in arrays:
            renamed[f"{role}.weight"] = arrays[f"{role[0]}_proj_weight"]
        for kind in ("weight", "bias"):
            if (packed := arrays.get(f"in_proj_{kind}")) is not None:
                size = packed.shape[0] // 3
                renamed[f"{role}.{kind}"] = packed[n * size : (n + 1) * size, ...]
    return renamed, ""


def hint_for_widths(function: str) -> str:
    """Return how to create a layer from widths; "" if `function` is none that has an `init`."""
    return f"To create it from widths, call {_FROM_WIDTHS[function]}." if function in _FROM_WIDTHS else ""


def _check_prefixed(function: str, mapping: object, prefix: object) -> None:
    """Check a mapping of arrays, and the string that the names of a layer's arrays begin with."""
    if not isinstance(mapping, Mapping):
        raise ArgumentTypeError(function, "`mapping` must be a mapping of names", {"mapping": shown(mapping)})
    if not isinstance(prefix, str):
        raise ArgumentTypeError(function, "`prefix` must be a string", {"prefix": shown(prefix)})


def _draw_uniform(function: str, rng: Any, count: int, like: AnyArray | None) -> Array:
    """Return float32 from 0 to 1 in the library of `like`, so that all dtypes get the same numbers."""
    for library in libraries():
        module: Any = sys.modules.get(library.module)
        if module is not None and library.generators.owns(rng):
            xp = library.namespace(module.zeros((0,), dtype=module.float32))
            numbers = library.generators.uniform(rng, count, xp)
            return numbers if like is None else copier(function, like)(numbers)
    rule = (
        "`rng` must be a numpy.random.Generator, cupy.random.Generator, torch.Generator, or key of JAX or MLX"
    )
    hint = f"Pass it first: {function}(numpy.random.default_rng(0), ...)."
    raise ArgumentTypeError(function, rule, {"rng": shown(rng)}, hint)
