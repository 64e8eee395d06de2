"""MLX: lazy arrays in memory that all devices share. Values can be read, except inside a transformation."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, cast

from .base import Compute, Generators, Library, Tangent
from .protocols import Access, AnyArray, Array, Device, Dtype, Namespace


class MlxKeys(Generators):
    """Keys of MLX, which are arrays."""

    name = "MLX key"

    def owns(self, rng: object) -> bool:
        key: Any = rng
        is_array = isinstance(rng, sys.modules["mlx.core"].array)
        return is_array and key.shape == (2,) and key.dtype == sys.modules["mlx.core"].uint32

    def random_words(self, rng: Any, count: int, xp: Any, _device: Device) -> Array:
        words = xp.random.split(rng, count)  # `randint` has only the 24 random bits of a float
        return cast(Array, words[:, 0].view(xp.int32))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        return cast(Array, xp.random.uniform(shape=(count,), key=rng))


class MlxTangentRules:
    """The derivatives of `mx.custom_function`. Reverse mode is that of the tangent, which is linear."""

    def may_record(self, _access: Access) -> bool:
        return True  # MLX does not show whether it differentiates

    def constant(self, array: Array) -> Array:
        return cast(Array, sys.modules["mlx.core"].stop_gradient(array))

    def define(self, compute: Compute, tangent: Tangent, *arrays: Array, of_pairs: bool = False) -> Array:
        del of_pairs
        core = sys.modules["mlx.core"]
        function: Any = core.custom_function(compute)

        def push(primals: Sequence[Array], tangents: Sequence[Array | None]) -> Array:
            return tangent(primals, function(*primals), tangents)

        def pull(primals: Sequence[Array], cotangent: Array, output: Array) -> list[Array]:
            moves = [core.issubdtype(x.dtype, core.floating) for x in primals]
            zeros = [core.zeros_like(x) for x in primals]

            def linear(*tangents: Array) -> Array:
                return tangent(
                    primals,
                    output,
                    [t if is_moved else None for t, is_moved in zip(tangents, moves, strict=True)],
                )

            return cast(list[Array], core.vjp(linear, zeros, [cotangent])[1])

        def batch(arrays: Sequence[Array], axes: Sequence[int | None]) -> tuple[Array, int]:
            return _of_entries(self.define, compute, tangent, arrays, axes), 0

        function.jvp(push)
        function.vjp(pull)
        function.vmap(batch)  # without it, MLX maps `compute`, and the derivatives here are lost
        return cast(Array, function(*arrays))


def _of_entries(
    define: Callable[..., Array],
    compute: Compute,
    tangent: Tangent,
    arrays: Sequence[Array],
    axes: Sequence[int | None],
) -> Array:
    """Return `define` for the entries of a batch, which lie along `axes` of the arrays."""
    core = sys.modules["mlx.core"]

    def of_all(*arrays: Array) -> Array:
        return cast(Array, core.vmap(compute, in_axes=axes)(*arrays))

    def tangent_of_all(arrays: Sequence[Array], output: Array, tangents: Sequence[Array | None]) -> Array:
        moves = [t is not None for t in tangents]
        of_moved = [axis for axis, moved in zip(axes, moves, strict=True) if moved]

        def of_entry(output: Array, *parts: Array) -> Array:
            rest = iter(parts[len(axes) :])
            return tangent(parts[: len(axes)], output, [next(rest) if moved else None for moved in moves])

        mapped = core.vmap(of_entry, in_axes=(0, *axes, *of_moved))
        return cast(Array, mapped(output, *arrays, *(t for t in tangents if t is not None)))

    return define(of_all, tangent_of_all, *arrays)


class Mlx(Library):
    name = "mlx"
    generators = MlxKeys()
    module = "mlx.core"
    conversion = "mlx.core.array"
    cast_code = ("{array}.astype({dtype})", "mlx.core.{name}")
    multiplies_halves = True
    tangent_rules = MlxTangentRules()

    def owns(self, array: object) -> bool:
        core = sys.modules.get("mlx.core")
        return core is not None and isinstance(array, core.array)

    def namespace(self, _array: AnyArray) -> Namespace:
        core = sys.modules["mlx.core"]
        namespace = _NAMESPACES.get(core) or _NAMESPACES.setdefault(core, MlxNamespace(core))
        return cast(Namespace, namespace)  # `__getattr__` finds the rest of `Namespace` in mlx.core

    def device(self, _array: Any) -> Device:
        """Return the device that MLX computes on. An array itself is on no device."""
        return sys.modules["mlx.core"].default_device()

    def is_accelerator(self, device: Device) -> bool:
        return bool(device.type != sys.modules["mlx.core"].cpu)

    def is_traced(self, array: Any) -> bool:
        """Return True inside mx.compile and mx.vmap. Inside mx.grad values can be read.

        MLX shows it only by refusing to evaluate an array. `async_eval` does not wait for the result, but MLX
        refuses it inside mx.grad too, so `eval` is tried after it. It refuses with a RuntimeError what mx.jvp
        computes inside mx.compile.
        """
        core = sys.modules["mlx.core"]
        for evaluate in (core.async_eval, core.eval):
            with contextlib.suppress(ValueError, RuntimeError):
                evaluate(array)
                return False
        return True

    def array_signature(self, array: Any) -> object:
        return None if self.is_traced(array) else (array.shape, array.dtype, str(self.device(array)))

    def context_maker(self, _array: Array) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext


class MlxNamespace:
    """mlx.core with the parts of the standard that it lacks: devices, copies, `bool`, and functions of float64.

    `device` is ignored, because arrays have none.
    """

    __name__ = "mlx.core"

    def __init__(self, core: ModuleType) -> None:
        self._core: Any = core
        self.bool: Dtype = core.bool_
        for name in ("arange", "asarray", "full", "zeros"):
            setattr(self, name, _without_device(getattr(core, name)))
        self._select: Any = core.custom_function(core.where)
        self._select.jvp(self._select_tangent)
        self._select.vjp(self._select_gradients)
        self._select.vmap(self._select_of_entries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def astype(self, x: Array, dtype: Dtype, /, *, copy: bool = True) -> Any:
        """Convert to a dtype. `copy` is ignored, because arrays are not written to in place."""
        del copy
        return self._core.astype(x, dtype)

    def where(self, condition: Array, x: Any, y: Any, /) -> Any:
        """Select elements. Derivatives of `mx.where` are products with the condition, and 0 * NaN is NaN."""
        core = self._core
        dtypes = [a.dtype for a in (x, y) if isinstance(a, core.array)]
        if not any(core.issubdtype(dtype, core.floating) for dtype in dtypes):
            return core.where(condition, x, y)
        arrays = (a if isinstance(a, core.array) else core.array(a, dtypes[0]) for a in (x, y))
        return self._select(*core.broadcast_arrays(condition, *arrays))

    def exp(self, x: Array, /) -> Any:
        """Return exp. MLX computes exp of float64 in float32, but powers in float64.

        The relative error of `math.e` is 5e-17.
        """
        is_float64 = x.dtype == self._core.float64
        return self._core.power(math.e, x) if is_float64 else self._core.exp(x)

    def cos(self, x: Array, /) -> Any:
        """Return cos. MLX computes cos of float64 in float32, which is wrong for large angles."""
        return self._core.cos(self._within_one_turn(x))

    def sin(self, x: Array, /) -> Any:
        """Return sin; see `cos`."""
        return self._core.sin(self._within_one_turn(x))

    def _select_tangent(self, primals: Any, tangents: Any) -> Any:
        moved = zip(primals[1:], tangents[1:], strict=True)
        return self.where(primals[0], *(self._core.zeros_like(x) if t is None else t for x, t in moved))

    def _select_gradients(self, primals: Any, cotangent: Any, _output: Any) -> Any:
        condition = primals[0]
        of_x, of_y = self.where(condition, cotangent, 0.0), self.where(condition, 0.0, cotangent)
        return self._core.zeros_like(condition), of_x, of_y

    def _select_of_entries(self, arrays: Any, axes: Any) -> Any:
        core, pairs = self._core, zip(arrays, axes, strict=True)
        moved = [core.expand_dims(x, 0) if axis is None else core.moveaxis(x, axis, 0) for x, axis in pairs]
        return self.where(*moved), 0

    def _within_one_turn(self, x: Array) -> Any:
        if x.dtype != self._core.float64:
            return x
        return x - self._core.round(x / (2 * math.pi)) * (2 * math.pi)


def _without_device(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ignores `device`. Without a `dtype`, `asarray` makes float64 float32."""

    def created(*arguments: object, dtype: Dtype = None, device: Device = None) -> Any:
        del device
        return create(*arguments, dtype=dtype)

    return created


_NAMESPACES: dict[ModuleType, MlxNamespace] = {}
"""The namespace of MLX once it is made. There is one, since calls compare namespaces: if two threads make
one at once, `setdefault` gives both the same, which `functools.cache` does not."""


MLX = Mlx()
