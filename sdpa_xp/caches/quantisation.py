"""How the tokens of a cache are stored as small integers: the checks, the arrays, and their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .._call.options import CallOptions
from .._call.prepared_call import PreparedCall, prepare
from .._checks.arrays import check_one_device, check_one_kind, check_one_library
from .._checks.keywords import check_choice, check_keys
from .._checks.messages import Immutable, brief
from .._core.quantised import bits_of, channel_magnitudes, quantise, widen
from .._display import array_facts
from .._libraries import (
    FLOATING,
    accumulation_dtype,
    astype_if_needed,
    computing,
    dtype_name,
    has_override,
    is_array,
    library_of,
    namespace_of,
)
from .._libraries.jax_trees import Tree
from .._libraries.protocols import AnyArray, Array, Dtype, Namespace, Shape
from ..errors import ArgumentTypeError, ArgumentValueError
from .memory import check_same_but_width

QUANTISED_NAMES = ("key", "value", "key_scale", "value_scale")
BITS = {"int8": 8, "int4": 4}
BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Quantisation(Tree, Immutable):
    """The numbers that tokens are stored with, and what the cache was before."""

    bits: int
    dtype: str
    """The dtype of the keys and values that are appended, and of the queries.

    A name, since MLX cannot copy its dtypes.
    """
    key_channels: Array | None = None
    """The magnitudes of the channels of keys, of which an entry is (..., H, 1, E) in the default layout."""

    @property
    def per(self) -> str:
        return "token" if self.key_channels is None else "channel"

    def stored(self, tokens: Mapping[str, Array], axis: int) -> dict[str, Array]:
        """Return the codes of keys and values, and their scales, by name; the `axis` may be cut into parts."""
        codes, scales = {}, {}
        with computing(tokens["key"]):  # a token of tiny numbers has a scale that underflows
            for name, array in tokens.items():
                codes[name], scales[f"{name}_scale"] = quantise(array, self._channels(name), self.bits, axis)
        return codes | scales

    def widened(self, name: str, codes: Array, scale: Array) -> Array:
        """Return the keys or the values that codes stand for, a copy."""
        with computing(codes):
            wide = widen(codes, scale, self._channels(name), scale.dtype)
            xp = namespace_of(wide)
            return astype_if_needed(xp, wide, self._dtype(xp))

    def like(self, codes: Array) -> Array:
        """Return an array without elements that has the dtype of the keys, for checks of what is passed."""
        library = library_of(codes)
        with computing(codes):
            xp = library.namespace(codes)
            if has_override(codes):  # zeros would be no value of the graph, which drops what it does not use
                return xp.astype(codes, self._dtype(xp))
            return xp.zeros((0,), dtype=self._dtype(xp), device=library.device(codes))

    def shown(self, codes: object) -> str:
        """Return the keys or the values for a repr."""
        if not is_array(codes):  # in a tree of JAX, anything may stand where an array was
            return brief(codes)
        return f"<{self.dtype} {wide_shape(self, codes)} as int{self.bits}>"

    def facts(self, codes: object) -> str:
        """Return the keys or the values for the table of a notebook."""
        shape = wide_shape(self, codes) if is_array(codes) else None
        return array_facts(codes, shape, f"{self.dtype} as int{self.bits}")

    def shown_saving(self, nbytes: int, stored: Mapping[str, Array]) -> str:
        """Return how many times as many bytes the tokens took that now take `nbytes`; "" if there are none."""
        numbers = sum(math.prod(wide_shape(self, stored[name])) for name in ("key", "value"))
        wide = numbers * BYTES[self.dtype]
        return f", {wide / nbytes:.2f} times fewer than {self.dtype}" if nbytes else ""

    def of_entries(self, take: Callable[[Array], Array]) -> Quantisation:
        """Return the quantisation of some batch entries, which have channels of their own."""
        channels = self.key_channels
        return replace(self, key_channels=None if channels is None else take(channels))

    def call(
        self, function: str, query: AnyArray, stored: Mapping[str, Array], options: CallOptions
    ) -> PreparedCall:
        """Check a call of a query and the tokens that are `stored`."""
        inputs = {"query": query, **stored, **self.channels_by_name()}
        shapes = wide_shape(self, stored["key"]), wide_shape(self, stored["value"])
        return prepare(function, inputs, options, queries_at_end=True, cache_shapes=shapes)

    def channels_by_name(self) -> dict[str, Array]:
        return {} if self.key_channels is None else {"key_channels": self.key_channels}

    def _dtype(self, xp: Namespace) -> Dtype:
        return getattr(xp, self.dtype, self.dtype)  # NumPy knows bfloat16 only as a name

    def _channels(self, name: str) -> Array | None:
        return self.key_channels if name == "key" else None


def new_quantisation(
    function: str,
    dtype: object,
    per: object,
    arrays: Mapping[str, Array],
    measured: Array,
    axes: tuple[int, ...],
) -> Quantisation:
    """Check the arguments of `quantised`, for the keys and values of a cache, `arrays`.

    The channels are measured on the keys `measured` along `axes`, the tokens among them.
    """
    check_choice(function, "dtype", dtype, [*BITS])
    check_choice(function, "per", per, ["token", "channel"])
    bits, (name_of_keys, key) = BITS[str(dtype)], next(iter(arrays.items()))
    for name, array in arrays.items():
        if bits == 4 and array.shape[-1] % 2:
            rule = f"`cache.{name}` must have an even width (axis -1) for int4, which has two numbers in a byte"
            raise ArgumentValueError(function, rule, {f"cache.{name}.shape": array.shape})
    if per == "token":
        return Quantisation(bits, dtype_name(key.dtype))
    if any(isinstance(length, int) and length == 0 for length in measured.shape):  # others are symbols
        rule = "the cache must have tokens, on which the magnitudes of the channels are measured"
        hint = "Call it after the prompt, or pass per='token'."
        raise ArgumentValueError(function, rule, {f"cache.{name_of_keys}.shape": measured.shape}, hint)
    with computing(key):
        return Quantisation(bits, dtype_name(key.dtype), channel_magnitudes(measured, axes))


def check_stored(
    function: str, stored: Mapping[str, AnyArray], dtype: Dtype | None, axis: int
) -> tuple[dict[str, Array], Quantisation]:
    """Check the arrays of a quantised cache whose tokens lie along `axis`, by their names in `stored`."""
    check_keys(function, "stored", stored, (*QUANTISED_NAMES, "key_channels"), QUANTISED_NAMES)
    _, arrays = check_one_library(function, stored)
    check_one_device(function, arrays)
    code_dtypes = {f"{name}.dtype": dtype_name(arrays[name].dtype) for name in ("key", "value")}
    if [*code_dtypes.values()] not in (["int8"] * 2, ["uint8"] * 2):
        rule = "the codes of a quantised cache must be int8, or uint8 with two of them in a byte"
        raise ArgumentTypeError(function, rule, code_dtypes)
    check_one_kind(function, {name: x for name, x in arrays.items() if name not in ("key", "value")})
    xp, scale_dtype = namespace_of(arrays["key"]), arrays["key_scale"].dtype
    wide_dtype = dtype_name(scale_dtype if dtype is None else dtype)
    if wide_dtype not in FLOATING or accumulation_dtype(xp, wide_dtype) != scale_dtype:
        rule = "scales must be float64 for keys of float64, and float32 for others"
        got = {"key_scale.dtype": dtype_name(scale_dtype), "dtype": wide_dtype}
        raise ArgumentTypeError(function, rule, got)
    quantisation = Quantisation(bits_of(arrays["key"]), wide_dtype, arrays.pop("key_channels", None))
    check_same_but_width(function, {name: arrays[name].shape for name in ("key", "value")})
    of_channel = [*wide_shape(quantisation, arrays["key"])]
    of_channel[axis] = 1
    shapes = {f"{name}_scale": (*arrays[name].shape[:-1], 1) for name in ("key", "value")}
    for name, shape in {**shapes, "key_channels": tuple(of_channel)}.items():
        array = arrays.get(name, quantisation.key_channels)
        if array is not None and array.shape != shape:
            rule = f"`{name}` must have the shape of its codes, with 1 for the axis that it is shared along"
            raise ArgumentValueError(function, rule, {f"{name}.shape": array.shape, "needed": shape})
    return {name: arrays[name] for name in QUANTISED_NAMES}, quantisation


def refuse_quantised(function: str, quantisation: Quantisation | None) -> None:
    """Check that a cache is not quantised yet."""
    if quantisation is not None:
        rule = "the cache must not be quantised already"
        raise ArgumentValueError(function, rule, {"cache": f"int{quantisation.bits} per {quantisation.per}"})


def wide_shape(quantisation: Quantisation | None, stored: Array) -> Shape:
    """Return the shape of the keys or values that are stored."""
    if quantisation is None:
        return stored.shape
    return (*stored.shape[:-1], stored.shape[-1] * 8 // quantisation.bits)


def kinds(quantisation: Quantisation | None, stored: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return arrays that have the library, the dtype and the device of keys and values."""
    if quantisation is None:
        return stored
    return {name: quantisation.like(stored[name]) for name in [*stored][:2]}


def bytes_of(*arrays: AnyArray) -> int:
    """Return the bytes of the elements of arrays."""
    return sum(math.prod(array.shape) * BYTES[dtype_name(array.dtype)] for array in arrays)


def check_query_of_cache(
    function: str, query: Array, name: str, cached: Array, quantisation: Quantisation | None
) -> None:
    """Check that a query has the library, the dtype and the device of a cache, whose array is called `name`."""
    device, dtype = library_of(query).device, query.dtype
    fits = dtype == cached.dtype if quantisation is None else dtype_name(dtype) == quantisation.dtype
    if fits and type(query) is type(cached) and device(query) == device(cached):
        return  # hot: each step of a decoder comes here
    if not has_override(query, cached):
        kind = cached if quantisation is None else quantisation.like(cached)
        check_one_kind(function, {"query": query, name: kind})
