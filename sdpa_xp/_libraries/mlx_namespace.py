"""The parts of the standard that mlx.core lacks: devices, copies, `bool`, and functions of float64."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, cast

from sdpa_xp._libraries.protocols import Array, Device, Dtype, Shape


class MlxNamespace:
    """mlx.core with the functions below instead of its own. They ignore `device`, because arrays have none."""

    __name__ = "mlx.core"

    def __init__(self, core: ModuleType) -> None:
        self._core: Any = core
        self.bool: Dtype = core.bool_

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def astype(self, x: Array, dtype: Dtype, /, *, copy: bool = True) -> Array:
        """Convert to a dtype. `copy` is ignored, because arrays are not written to in place."""
        del copy
        return cast(Array, self._core.astype(x, dtype))

    def exp(self, x: Array, /) -> Array:
        """Return exp. MLX computes exp of float64 in float32, but powers in float64.

        The relative error of `math.e` is 5e-17.
        """
        is_float64 = x.dtype == self._core.float64
        return cast(Array, self._core.power(math.e, x) if is_float64 else self._core.exp(x))

    def cos(self, x: Array, /) -> Array:
        """Return cos. MLX computes cos of float64 in float32, which is wrong for large angles."""
        return cast(Array, self._core.cos(self._within_one_turn(x)))

    def sin(self, x: Array, /) -> Array:
        """Return sin; see `cos`."""
        return cast(Array, self._core.sin(self._within_one_turn(x)))

    def _within_one_turn(self, x: Array) -> Array:
        if x.dtype != self._core.float64:
            return x
        return cast(Array, x - self._core.round(x / (2 * math.pi)) * (2 * math.pi))

    def arange(self, start: int, stop: int, /, *, dtype: Dtype, device: Device = None) -> Array:
        """Return the numbers from `start` up to `stop`."""
        del device
        return cast(Array, self._core.arange(start, stop, dtype=dtype))

    def asarray(self, obj: object, /, *, dtype: Dtype, device: Device = None) -> Array:
        """Return an array of Python numbers."""
        del device
        return cast(Array, self._core.asarray(obj, dtype=dtype))

    def full(self, shape: Shape, fill_value: object, /, *, dtype: Dtype, device: Device = None) -> Array:
        """Return an array of one repeated number."""
        del device
        return cast(Array, self._core.full(shape, fill_value, dtype=dtype))

    def zeros(self, shape: Shape, /, *, dtype: Dtype, device: Device = None) -> Array:
        """Return an array of zeros."""
        del device
        return cast(Array, self._core.zeros(shape, dtype=dtype))


mlx_namespace = functools.cache(MlxNamespace)
