"""Keys and values stored as small integers, and the source that widens them for one tile at a time.

A token x is stored as codes c and one scale s, and read as x' = c s. With magnitudes m of the channels, x / m
is stored, and x' = c s m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sdpa_xp._checks.arrays import slice_of_axis
from sdpa_xp._core.products import ArraySource, KeyValueSource
from sdpa_xp._libraries import (
    accumulation_dtype,
    astype_if_needed,
    dtype_name,
    has_override,
    is_traced,
    namespace_of,
)
from sdpa_xp._libraries.protocols import Array, Dtype
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import LeadingSlice, slice_leading

LARGEST_CODE = {8: 127, 4: 7}
"""By the bits of a code. The smallest code is its negative, so that a number and its negative are alike."""
BELOW_ONE = 1.0 - 2.0**-20
"""A factor of each scale. Without it, the largest float, divided and multiplied by its channel, may be inf."""
SMALLEST_SCALE = {"float32": 2.0**-126, "float64": 2.0**-1022}
"""The smallest normal numbers. A subnormal scale has few digits, so that codes might need more bits."""
MOST_AT_ONCE = 2**22
"""The elements that are quantised at once. Each needs a few numbers of the accumulation dtype meanwhile."""
ZERO_CODE = 8
"""What half a byte holds for code 0, as in onnxruntime's caches."""


class QuantisedSource(NamedTuple):
    """Codes and scales, which come from sources of their own: arrays, or blocks of a paged cache."""

    codes: KeyValueSource
    """(..., H, S, width) for codes of a byte; (..., H, S, width / 2) for codes of half a byte."""
    scale: KeyValueSource
    """(..., H, S, 1)."""
    channels: Array | None
    """The magnitudes of the channels, (..., H, 1, width)."""
    bits: int

    @property
    def width(self) -> int:
        return self.codes.width * 8 // self.bits

    @property
    def heads(self) -> int:
        return self.codes.heads

    def slice_leading(self, leading: LeadingSlice) -> QuantisedSource:
        return self._replace(
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
            tile = widen(codes, scale, self.channels, grid.dtype, in_place=grid.is_writeable)
            return grid.xp.matrix_transpose(tile) if transposed else tile

        return widened


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
    is_packed = bits_of(codes) == 4
    if is_packed:
        *leading, width = codes.shape
        codes = xp.reshape(xp.stack([codes & 15, codes >> 4], axis=-1), (*leading, 2 * width))
    wide = xp.astype(codes, dtype)
    factors = [astype_if_needed(xp, factor, dtype) for factor in (scale, channels) if factor is not None]
    if in_place:
        if is_packed:
            wide -= float(ZERO_CODE)
        for factor in factors:
            wide *= factor
        return wide
    if is_packed:
        wide = wide - float(ZERO_CODE)
    for factor in factors:
        wide = wide * factor
    return wide


def quantise(array: Array, channels: Array | None, bits: int, axis: int) -> tuple[Array, Array]:
    """Return the codes and the scales (..., 1) of tokens (..., width), a part of `axis` after the other.

    A token with a NaN or inf gets codes of 0 and the scale NaN or inf, so that all of it is NaN.
    """
    if has_override(array) or is_traced(array) or math.prod(array.shape) <= MOST_AT_ONCE:
        return _codes_and_scale(array, channels, bits)
    length, size = array.shape[axis], math.prod(array.shape)
    step = max(1, length * MOST_AT_ONCE // size)
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
