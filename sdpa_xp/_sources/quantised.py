"""Keys and values stored as small integers, and the source that widens them for one tile at a time.

A token x is stored as codes c and one scale s, and read as x' = c s. With magnitudes m of the channels, x / m
is stored, and x' = c s m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .._checks.arrays import slice_of_axis
from .._libraries import accumulation_dtype, astype_if_needed, dtype_name, is_traced, library_of, namespace_of
from .._libraries.protocols import Array, Dtype
from .._run import multiply_columns
from .._tiles import ArraySource, FactoredSlices, KeyValueSource, LeadingSlice, slice_leading, tuning
from .._tiles.grid import ScoreGrid

LARGEST_CODE = {8: 127, 4: 7}
"""By the bits of a code. The smallest code is its negative, so that a number and its negative are alike."""
BELOW_ONE = 1.0 - 2.0**-20
"""A factor of each scale. Without it, the largest float, divided and multiplied by its channel, may be inf."""
SMALLEST_SCALE = {"float32": 2.0**-126, "float64": 2.0**-1022}
"""The smallest normal numbers. A subnormal scale has few digits, so that codes might need more bits."""
ZERO_CODE = 8
"""What half a byte holds for code 0, as in onnxruntime's caches."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedSource(KeyValueSource):
    """Codes and scales, which come from sources of their own: arrays, or blocks of a paged cache."""

    codes: KeyValueSource
    """(..., H, S, width) for codes of a byte; (..., H, S, width / 2) for codes of half a byte."""
    scale: KeyValueSource
    """(..., H, S, 1)."""
    channels: Array | None
    """The magnitudes of the channels, (..., H, 1, width)."""
    bits: int
    is_factored: bool = False
    """Whether `factored_slices` are codes and scales: then products are multiplied by the scales."""

    @property
    def width(self) -> int:
        return self.codes.width * 8 // self.bits

    @property
    def heads(self) -> int:
        return self.codes.heads

    def slice_leading(self, leading: LeadingSlice) -> QuantisedSource:
        return replace(
            self,
            codes=self.codes.slice_leading(leading),
            scale=self.scale.slice_leading(leading),
            channels=None if self.channels is None else slice_leading(self.channels, leading),
        )

    def slice_keys(self, columns: range) -> Array:
        scale = self.scale.slice_keys(columns)
        return widen(self.codes.slice_keys(columns), scale, self.channels, scale.dtype)

    def slices(self, grid: ScoreGrid, *, transposed: bool = False) -> Callable[[range], Array]:
        def widened(columns: range) -> Array:
            codes, scale = self.codes.slice_keys(columns), self.scale.slice_keys(columns)
            tile = widen(codes, scale, self.channels, grid.dtype, in_place=grid.access.is_writeable)
            return grid.xp.matrix_transpose(tile) if transposed else tile

        return widened

    def factored_slices(self, grid: ScoreGrid, *, transposed: bool = False) -> FactoredSlices:
        if not self.is_factored:
            return self.slices(grid, transposed=transposed), None
        xp = grid.xp

        def codes(columns: range) -> Array:
            tile = xp.astype(signed_codes(self.codes.slice_keys(columns)), grid.dtype)
            return xp.matrix_transpose(tile) if transposed else tile

        def scales(columns: range) -> Array:
            return xp.matrix_transpose(astype_if_needed(xp, self.scale.slice_keys(columns), grid.dtype))

        return codes, scales


def factored_operands(
    grid: ScoreGrid, query: Array, key: KeyValueSource, value: KeyValueSource
) -> tuple[Array, KeyValueSource, KeyValueSource]:
    """Return the operands of a call; of a small one with the scales of tokens as factors of scores and weights.

    Few queries have fewer scores than keys have elements. On a CPU, a pass over short rows takes longer than a
    product with them: one query of 8 heads and 4,096 keys takes 0.6 times as long as with widened keys.
    """
    if not (
        isinstance(key, QuantisedSource) and isinstance(value, QuantisedSource) and grid.access.is_writeable
    ):
        return query, key, value
    if grid.queries * (grid.heads // max(1, key.heads)) > key.width:
        return query, key, value
    if key.channels is not None:
        query = astype_if_needed(grid.xp, query, grid.dtype)
        channels = astype_if_needed(grid.xp, key.channels, grid.dtype)
        query = multiply_columns(grid.xp, query, channels, in_place=False)
    return query, replace(key, channels=None, is_factored=True), replace(value, is_factored=True)


def source_of(
    arrays: Mapping[str, Array], name: str, place: Callable[[Array], KeyValueSource] = ArraySource
) -> KeyValueSource:
    """Return the keys or the values of a call, `arrays[name]`, which are quantised if there is a scale."""
    kind = name.removesuffix("_blocks")
    codes, scale = arrays[name], arrays.get(f"{kind}_scale")
    if scale is None:
        return place(codes)
    return QuantisedSource(place(codes), place(scale), arrays.get(f"{kind}_channels"), bits_of(codes))


def bits_of(codes: Array) -> int:
    """Return the bits of a code: bytes without a sign have two codes each."""
    return 4 if dtype_name(codes.dtype) == "uint8" else 8


def widen(codes: Array, scale: Array, channels: Array | None, dtype: Dtype, *, in_place: bool = False) -> Array:
    """Return the numbers (..., width) of codes. `in_place` saves an array for each product."""
    xp = namespace_of(codes)
    factors = [astype_if_needed(xp, factor, dtype) for factor in (scale, channels) if factor is not None]
    if in_place:
        wide = xp.astype(signed_codes(codes), dtype)
        for factor in factors:
            wide *= factor
        return wide
    is_packed = bits_of(codes) == 4
    wide = xp.astype(library_of(codes).halves_of_bytes(codes) if is_packed else codes, dtype)
    if is_packed:
        wide = wide - float(ZERO_CODE)
    for factor in factors:
        wide = wide * factor
    return wide


def signed_codes(codes: Array) -> Array:
    """Return the codes, two of which may lie in a byte, as int8 (..., width)."""
    if bits_of(codes) == 8:
        return codes
    xp = namespace_of(codes)
    return xp.astype(library_of(codes).halves_of_bytes(codes), xp.int8) - ZERO_CODE


def quantise(array: Array, channels: Array | None, bits: int, axis: int) -> tuple[Array, Array]:
    """Return the codes and the scales (..., 1) of tokens (..., width), a part of `axis` after the other.

    A token with a NaN or inf gets codes of 0 and the scale NaN or inf, so that all of it is NaN.
    """
    if is_traced(array) or math.prod(array.shape) <= tuning.MOST_AT_ONCE:
        return _codes_and_scale(array, channels, bits)
    length, size = array.shape[axis], math.prod(array.shape)
    step = max(1, length * tuning.MOST_AT_ONCE // size)
    parts = [array[slice_of_axis(axis, n, min(n + step, length))] for n in range(0, length, step)]
    codes, scales = zip(*(_codes_and_scale(part, channels, bits) for part in parts), strict=True)
    concat = namespace_of(array).concat
    return concat(codes, axis=axis), concat(scales, axis=axis)


def _codes_and_scale(array: Array, channels: Array | None, bits: int) -> tuple[Array, Array]:
    xp = namespace_of(array)
    wide = astype_if_needed(xp, array, accumulation_dtype(xp, array.dtype))
    if channels is not None:
        # Packed tokens have no axis of sequences, and a pool has the same channels for all blocks.
        wide = wide / (channels[0, ...] if channels.ndim > array.ndim else channels)
    if array.shape[-1] == 0:
        return xp.astype(wide, xp.int8 if bits == 8 else xp.uint8), xp.sum(wide, axis=-1, keepdims=True)
    largest = xp.max(xp.abs(wide), axis=-1, keepdims=True)
    is_finite = xp.isfinite(largest)
    scale, least = largest * (BELOW_ONE / LARGEST_CODE[bits]), SMALLEST_SCALE[dtype_name(wide.dtype)]
    scale = xp.where(scale < least, least, scale)
    # A NaN is converted to no integer.
    scaled = xp.where(is_finite, wide, 0.0) / xp.where(is_finite, scale, 1.0)
    codes = xp.round(scaled)
    if bits == 8:
        return xp.astype(codes, xp.int8), scale
    *leading, width = codes.shape
    pairs = xp.reshape(codes + float(ZERO_CODE), (*leading, width // 2, 2))
    return xp.astype(pairs[..., 0] + pairs[..., 1] * 16.0, xp.uint8), scale


def channel_magnitudes(array: Array, axes: tuple[int, ...]) -> Array:
    """Return the largest magnitude of each channel along `axes`, by their mean and at least 1, for `quantise`.

    A smaller channel counts as an average one. So a later token, however unlike the others, has no channel that
    is divided by little, and its scale is at most that of the token alone.
    """
    xp = namespace_of(array)
    wide = astype_if_needed(xp, array, accumulation_dtype(xp, array.dtype))
    largest = xp.max(xp.abs(xp.where(xp.isfinite(wide), wide, 0.0)), axis=axes, keepdims=True)
    # Divided before the sum, which otherwise may overflow.
    mean = xp.sum(largest / float(array.shape[-1]), axis=-1, keepdims=True)
    relative = largest / xp.where(mean > 0.0, mean, 1.0)
    return xp.where(relative > 1.0, relative, 1.0)
