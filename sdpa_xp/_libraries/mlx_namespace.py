"""What mlx.core lacks of the standard: devices, a copy on demand, `bool`, and functions of float64."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, cast

from sdpa_xp._libraries.protocols import Array, Device, Dtype, Shape


class Compatible:
    """mlx.core itself, but for the functions here. It makes arrays without a device, and none is asked for."""

    __name__ = "mlx.core"

    def __init__(self, core: ModuleType) -> None:
        self._core: Any = core
        self.bool: Dtype = core.bool_

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def astype(self, x: Array, dtype: Dtype, /, *, copy: bool = True) -> Array:
        """A new array, or none where MLX sees no difference: what it holds is not written to in place."""
        del copy
        return cast(Array, self._core.astype(x, dtype))

    def exp(self, x: Array, /) -> Array:
        """MLX computes it in float32 for float64 too; the power it does not. e is off by 5e-17 of itself."""
        wide = x.dtype == self._core.float64
        return cast(Array, self._core.power(math.e, x) if wide else self._core.exp(x))

    def cos(self, x: Array, /) -> Array:
        """MLX computes it in float32 for float64 too, and there goes wrong beyond a few turns."""
        return cast(Array, self._core.cos(self._within_a_turn(x)))

    def sin(self, x: Array, /) -> Array:
        """Likewise."""
        return cast(Array, self._core.sin(self._within_a_turn(x)))

    def _within_a_turn(self, x: Array) -> Array:
        if x.dtype != self._core.float64:
            return x
        return cast(Array, x - self._core.round(x / (2 * math.pi)) * (2 * math.pi))

    def arange(self, start: int, stop: int, /, *, dtype: Dtype, device: Device = None) -> Array:
        """start, start + 1, ..., stop - 1."""
        del device
        return cast(Array, self._core.arange(start, stop, dtype=dtype))

    def asarray(self, obj: object, /, *, dtype: Dtype, device: Device = None) -> Array:
        """An array of numbers of Python."""
        del device
        return cast(Array, self._core.asarray(obj, dtype=dtype))

    def full(self, shape: Shape, fill_value: object, /, *, dtype: Dtype, device: Device = None) -> Array:
        """An array of one number."""
        del device
        return cast(Array, self._core.full(shape, fill_value, dtype=dtype))

    def zeros(self, shape: Shape, /, *, dtype: Dtype, device: Device = None) -> Array:
        """An array of zeros."""
        del device
        return cast(Array, self._core.zeros(shape, dtype=dtype))


compatible = functools.cache(Compatible)
