"""What mlx.core lacks of the standard: devices, a copy on demand, `bool`, and functions of float64."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from types import ModuleType
from typing import Any, TypeGuard, cast

from sdpa_xp.protocols import Array, Device, Dtype, Namespace, Shape


def is_mlx_array(array: object) -> TypeGuard[Array]:
    """Whether `array` is one of MLX."""
    core = sys.modules.get("mlx.core")
    return core is not None and isinstance(array, core.array)


def namespace() -> Namespace:
    """mlx.core with what the standard has beyond it."""
    return cast(Namespace, _compatible(sys.modules["mlx.core"]))


def device() -> Device:
    """Where MLX computes: its arrays are in memory that all devices share."""
    return sys.modules["mlx.core"].default_device()


def is_traced(array: Array) -> bool:
    """Whether values cannot be read now: inside mx.compile and mx.vmap; inside mx.grad they can.

    MLX says so only when asked to evaluate. The first way to ask does not wait for the result, but is refused
    inside mx.grad too.
    """
    core = sys.modules["mlx.core"]
    for evaluate in (core.async_eval, core.eval):
        with contextlib.suppress(ValueError):
            evaluate(array)
            return False
    return True


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


_compatible = functools.cache(Compatible)
