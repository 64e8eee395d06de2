"""MLX: lazy arrays in memory that all devices share. Values can be read, except inside a transformation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from sdpa_xp._libraries.base import CPU, Library
from sdpa_xp._libraries.dtypes import dtype_name
from sdpa_xp._libraries.mlx_namespace import mlx_namespace
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Namespace


class Mlx(Library):
    """Arrays of MLX."""

    name = "mlx"
    rng_name = "MLX key"
    module = "mlx.core"
    conversion = "mlx.core.array"
    multiplies_halves = exchanges_memory = True

    def cast_text(self, name: str, dtype: str) -> str:
        return f"{name}.astype({dtype if '.' in dtype else f'mlx.core.{dtype}'})"

    def owns(self, array: object) -> bool:
        core = sys.modules.get("mlx.core")
        return core is not None and isinstance(array, core.array)

    def namespace(self, array: AnyArray) -> Namespace:
        del array
        return cast(Namespace, mlx_namespace(sys.modules["mlx.core"]))

    def device(self, array: Any) -> Device:
        """Return the device that MLX computes on. An array itself is on no device."""
        del array
        return sys.modules["mlx.core"].default_device()

    def is_accelerator(self, device: Device) -> bool:
        return bool(device.type != sys.modules["mlx.core"].cpu)

    def on_device(self, array: Array, device: Device) -> Array:
        del device
        return array

    def takes_memory(self, device_type: int) -> bool:
        return device_type == CPU

    def to_list(self, array: Any) -> Any:
        return array.tolist()

    def is_traced(self, array: Any) -> bool:
        """Return True inside mx.compile and mx.vmap. Inside mx.grad values can be read.

        MLX shows it only by refusing to evaluate an array. `async_eval` does not wait for the result, but MLX
        refuses it inside mx.grad too, so `eval` is tried after it.
        """
        core = sys.modules["mlx.core"]
        for evaluate in (core.async_eval, core.eval):
            with contextlib.suppress(ValueError):
                evaluate(array)
                return False
        return True

    def array_signature(self, array: Any) -> object:
        return None if self.is_traced(array) else (array.shape, array.dtype, str(self.device(array)))

    def quiet(self, array: Array) -> Callable[[], AbstractContextManager[object]]:
        del array
        return nullcontext

    def is_rng(self, rng: object) -> bool:
        key: Any = rng
        return self.owns(key) and key.shape == (2,) and dtype_name(key.dtype) == "uint32"

    def random_words(self, rng: Any, count: int, array: Array) -> Array:
        del array
        mx = sys.modules["mlx.core"]
        words = mx.random.split(rng, count)  # `randint` has only the 24 random bits of a float
        return cast(Array, words[:, 0].view(mx.int32))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        return cast(Array, xp.random.uniform(shape=(count,), key=rng))
