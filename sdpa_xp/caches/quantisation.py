"""How the tokens of a cache are stored as small integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .._checks import Immutable
from .._checks.arrays import check_known, check_one_device, check_one_kind, check_one_library
from .._checks.keywords import check_keys
from .._libraries import FLOATING, accumulation_dtype, astype_if_needed, computing, dtype_name, namespace_of
from .._libraries.protocols import AnyArray, Array, Dtype, Namespace, Shape
from .._libraries.trees import Tree
from .._sources.quantised import bits_of, quantise, widen
from ..errors import ArgumentTypeError, ArgumentValueError

QUANTISED_NAMES = ("key", "value", "key_scale", "value_scale")
BITS = {"int8": 8, "int4": 4}
BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Quantisation(Tree, Immutable):
    """The numbers that tokens are stored with, and what the cache was before."""

    bits: int
    dtype: str
    """The dtype of the keys and values that are appended, and the narrowest of queries.

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
        with computing(next(iter(tokens.values()))):  # a token of tiny numbers has a scale that underflows
            for name, array in tokens.items():
                kind = name.removesuffix("_blocks")
                channels = self.key_channels if kind == "key" else None
                codes[name], scales[f"{kind}_scale"] = quantise(array, channels, self.bits, axis)
        return codes | scales

    def widened(self, name: str, codes: Array, scale: Array, dtype: str = "") -> Array:
        """Return the keys or the values that codes stand for, a copy, in their dtype or in another one."""
        with computing(codes):
            channels, xp = self.key_channels if name == "key" else None, namespace_of(codes)
            wide = getattr(xp, dtype) if dtype else self._dtype(xp)
            return astype_if_needed(xp, widen(codes, scale, channels, scale.dtype), wide)

    def like(self, codes: Array) -> Array:
        """Return an array without elements that has the dtype of the keys, for checks of what is passed."""
        with computing(codes):
            xp = namespace_of(codes)
            return xp.astype(codes[:0, ...], self._dtype(xp))

    def _dtype(self, xp: Namespace) -> Dtype:
        return getattr(xp, self.dtype, self.dtype)  # NumPy knows bfloat16 only as a name


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
    check_same_but_width(function, {name: arrays[name] for name in ("key", "value")})
    of_channel = [*wide_shape(quantisation, arrays["key"])]
    of_channel[axis] = 1
    shapes = {f"{name}_scale": (*arrays[name].shape[:-1], 1) for name in ("key", "value")}
    for name, shape in {**shapes, "key_channels": tuple(of_channel)}.items():
        array = arrays.get(name, quantisation.key_channels)
        if array is not None and array.shape != shape:
            rule = f"`{name}` must have the shape of its codes, with 1 for the axis that it is shared along"
            raise ArgumentValueError(function, rule, {f"{name}.shape": array.shape, "needed": shape})
    return {name: arrays[name] for name in QUANTISED_NAMES}, quantisation


def wide_shape(quantisation: Quantisation | None, stored: Array) -> Shape:
    """Return the shape of the keys or values that are stored."""
    if quantisation is None:
        return stored.shape
    return (*stored.shape[:-1], stored.shape[-1] * 8 // quantisation.bits)


def bytes_of(*arrays: AnyArray) -> int:
    """Return the bytes of the elements of arrays."""
    return sum(math.prod(array.shape) * BYTES[dtype_name(array.dtype)] for array in arrays)


def check_same_but_width(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that keys and values have heads, a length and a width, and differ only in the width."""
    shapes = {f"{name}.shape": array.shape for name, array in arrays.items()}
    for name, array in arrays.items():
        check_known(function, name, array.shape)
    names = " and ".join(f"`{name}`" for name in arrays)
    first, second = shapes.values()
    if min(len(first), len(second)) < 3:
        raise ArgumentValueError(function, f"{names} must have at least 3 axes", shapes)
    if first[:-1] != second[:-1]:
        rule = f"{names} must have the same shape, except for the width (axis -1)"
        raise ArgumentValueError(function, rule, shapes)
