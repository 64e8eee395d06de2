"""Checks of the inputs of a call: plain arrays whose library, device, dtype and shapes fit each other.

The exporter checks shapes too: only shapes are read, and a length may be a symbol's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from .._libraries import FLOATING, dtype_name, has_standard_name, is_array, is_unknown, library_of, namespace_of
from .._libraries.protocols import Array, Namespace, Shape
from ..errors import PACKAGE, ArgumentTypeError, ArgumentValueError, Message, summary
from . import OTHER_KINDS, cast_text, conversion_hint, hint_for_value, rows_hint, shown, type_name

Layout: TypeAlias = Literal["...HLE", "...LHE"]
"""Heads before the length, or after it."""
HLE = "...HLE"
LHE = "...LHE"
UNDECIDED = ("InconclusiveDimensionOperation", "_DimExpr", "GuardOnDataDependentSymNode")
"""What JAX and torch say of lengths that are symbols."""
BOUNDS = "Bound them by the `constraints` of jax.export.symbolic_shape or by torch.export.Dim(min=, max=)."
LAYOUTS = (HLE, LHE)
"""Heads before the length, as in torch and ONNX; or behind the length, as in JAX, Keras and flash-attention."""


def check_one_kind(function: str, values: Mapping[str, object]) -> tuple[Namespace, dict[str, Array]]:
    """Check that all values are floating arrays of one library, dtype and device, and return both."""
    xp, arrays = check_one_library(function, values)
    for name, array in arrays.items():
        check_floating(function, name, array)
    check_one_dtype(function, arrays)
    check_one_device(function, arrays)
    return xp, arrays


def check_one_library(function: str, values: Mapping[str, object]) -> tuple[Namespace, dict[str, Array]]:
    """Check that all values are plain arrays of one library, and return its namespace and the arrays."""
    arrays = {name: check_plain_array(function, name, value) for name, value in values.items()}
    namespaces = {name: _namespace(function, name, array) for name, array in arrays.items()}
    first, xp = next(iter(namespaces.items()))
    for name, namespace in namespaces.items():
        if namespace is not xp:
            for library in map(library_of, arrays.values()):
                adopted = {name: library.adopted(array) for name, array in arrays.items()}
                if all(array is not None for array in adopted.values()):
                    return namespace_of(adopted[first]), adopted
            rule = f"`{first}` and `{name}` must be arrays of one library"
            got = {first: type_name(arrays[first]), name: type_name(arrays[name])}
            raise ArgumentTypeError(function, rule, got, conversion_hint(arrays, first, name))
    return xp, arrays


def _namespace(function: str, name: str, array: Array) -> Namespace:
    """Check that the array's method returns a namespace, and return it."""
    try:
        xp = namespace_of(array)
    except AttributeError as error:  # from array-api-compat 1.15 on
        if error.name != "__name__":
            raise
        xp = cast(Namespace, error.obj)
    if not hasattr(xp, "__name__"):
        rule = f"`{name}.__array_namespace__()` must return a namespace that has a `__name__`, such as a module"
        raise ArgumentTypeError(function, rule, {f"{name}.__array_namespace__()": xp})
    return xp


@contextmanager
def explaining_missing_names(
    function: str, array: object, context: AbstractContextManager[object]
) -> Iterator[None]:
    """Add to a context that two errors name the function.

    They are for a name that the namespace of `array` lacks, and for a question about a length that a compiler
    knows by its symbol alone.
    """
    try:
        with context:
            yield
    except Exception as error:
        if any(name in f"{type(error).__name__}: {error}" for name in UNDECIDED):
            rule = "the lengths must be numbers, or symbols of which the compiler can decide what is asked"
            raise ArgumentValueError(function, rule, {"its error": summary(error)}, BOUNDS) from error
        if not isinstance(error, AttributeError) or not is_array(array):
            raise
        if error.obj is not (xp := namespace_of(array)):
            raise
        rule = f"the namespace of the arrays must have `{error.name}` for this call"
        hint = 'Define it there; the page "Add a backend" lists what each feature needs.'
        missing = Message(function, rule, {"namespace": xp.__name__}, hint)
        raise AttributeError(missing, name=error.name, obj=xp) from error


def check_plain_array(function: str, name: str, value: object) -> Array:
    """Check that `value` is an array with the arithmetic of the standard; return it without its subclass."""
    library = library_of(value)
    reason = library.unsupported_reason(value)
    if is_array(value) and not reason:
        return library.base_form(value)
    other = f"{OTHER_KINDS[name]} or " if name in OTHER_KINDS else ""
    rule = f"`{name}` must be {other}a plain array of a library that follows the array API standard"
    raise ArgumentTypeError(function, rule, {name: shown(value)}, reason or hint_for_value(name, value))


def check_one_device(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays are on one device, as far as their library names one."""
    devices = {name: library_of(array).device(array) for name, array in arrays.items()}
    known = {name: device for name, device in devices.items() if device is not None}
    for name, device in known.items():
        first, reference = next(iter(known.items()))
        if device != reference:
            rule = f"`{first}` and `{name}` must be on one device"
            raise ArgumentValueError(function, rule, {f"{first}.device": reference, f"{name}.device": device})


def check_floating(function: str, name: str, array: Array) -> None:
    """Check that `array` has a supported real floating dtype."""
    if dtype_name(array.dtype) not in FLOATING:
        rule = f"`{name}` must be one of {', '.join(FLOATING)}"
        hint = f"Convert it first: {cast_text(array, name, 'float32')}."
        if is_unknown(array) and not has_standard_name(array.dtype):
            hint = f"{PACKAGE} reads no standard name in it: add the attribute `name`, such as 'float32'."
        if dtype_name(array.dtype).startswith("complex"):
            hint = f"Attention of complex numbers is not defined; xp.real({name}) and xp.imag({name}) are real."
        if getattr(array.dtype, "kind", "") in ("O", "S", "T", "U"):  # NumPy's objects, bytes and strings
            hint = rows_hint(library_of(array).to_list(array)) or hint
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": array.dtype}, hint)


def check_one_dtype(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays have the dtype of the first."""
    first, reference = next(iter(arrays.items()))
    for name, array in arrays.items():
        # By name if they are not the same object: a value of a graph has no dtype of an array's library.
        if array.dtype != reference.dtype and dtype_name(array.dtype) != dtype_name(reference.dtype):
            rule = f"`{first}` and `{name}` must have one dtype"
            got = {f"{first}.dtype": reference.dtype, f"{name}.dtype": array.dtype}
            hint = f"Convert one: {cast_text(array, name, f'{first}.dtype')}."
            if name.endswith(".weight"):  # not one weight alone, but all of the layer
                hint = f"Convert the input: {cast_text(array, first, dtype_name(array.dtype))}"
                hint += f", or the layer: layer.to(dtype={dtype_name(reference.dtype)!r})."
            elif name.startswith("cache."):  # nor what a cache holds
                hint = cast_text(array, first, f"{name}.dtype")
                hint = f"A cache takes new tokens in its own dtype: {hint}."
            raise ArgumentTypeError(function, rule, got, hint)


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
        what = "the cache needs" if "KVCache." in function else "it is"
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
        hint = "Query head h reads key head h // (Hq // H)."
        if query_heads == 1:
            hint = "For one query head that meets every key head, broadcast `query` to the heads of `key`."
        raise ArgumentValueError(function, rule, {"query.shape": query, "key.shape": key}, hint)
    batch = broadcast(*(shape[:-3] for shape in heads_first.values()))
    if batch is None:
        rule = "the leading axes of " + ", ".join(f"`{name}`" for name in named) + " must broadcast"
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape for name, shape in named.items()})
    is_2d = all(len(shape) == 2 for shape in named.values())
    return Sizes(batch, query_heads, heads, heads_first["query"][-2], heads_first["key"][-2], query[-1], is_2d)


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


def swap_heads_and_length(xp: Namespace, array: Array, layout: str) -> Array:
    """Convert (..., L, H, E) to (..., H, L, E), or back, as a view; in the layout "...HLE" nothing is to do."""
    if layout == HLE or array.ndim < 3:
        return array
    *batch, heads, length, width = range(array.ndim)
    return xp.permute_dims(array, (*batch, length, heads, width))


def slice_of_axis(axis: int, start: int, stop: int) -> tuple[Any, ...]:
    """Return the index of `start` to `stop` on one axis, counted from the last (-1)."""
    return (..., slice(start, stop), *[slice(None)] * (-1 - axis))


def check_axes(function: str, named: Mapping[str, Shape], count: int) -> None:
    """Check that each shape has `count` axes."""
    for name, shape in named.items():
        if len(shape) != count:
            raise ArgumentValueError(function, f"`{name}` must have {count} axes", {f"{name}.shape": shape})


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
