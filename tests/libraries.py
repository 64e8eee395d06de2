"""The array libraries of the tests, among them the strictest variants that there are of each.

Each variant is a `Library`: how a NumPy array gets in and out, and what must hold while the code under test
runs (no write, no computing of a lazy graph, no use of what the standard lacks).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_xp._libraries import namespace_of
from sdpa_xp_export._agree import backends


@dataclass(frozen=True)
class Library:
    """A way to hold arrays."""

    name: str
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    jit: Callable[..., Any] | None = None
    """What traces a function of arrays, by its own name or another."""

    @property
    def xp(self) -> Any:
        return namespace_of(self.put(np.zeros(1, np.float32)))

    @property
    def lazy(self) -> bool:
        return self.name == "dask"

    def holds(self, dtype: str) -> bool:
        """Whether the library keeps this dtype; only for what cannot hold it may a test be left out."""
        with self.guard():
            try:
                return str(self.put(np.zeros(1, dtype)).dtype).rpartition(".")[2] == dtype
            except (TypeError, ValueError):  # the second from a device of array-api-strict that lacks it
                return False

    def call(self, function: Callable[..., Any], *arrays: np.ndarray, **rules: Any) -> Any:
        """`function` of the arrays in this library; NumPy arrays among the keywords are put in as well."""
        with self.guard():
            placed = {k: self.put(x) if isinstance(x, np.ndarray) else x for k, x in rules.items()}
            return function(*(self.put(x) for x in arrays), **placed)


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _base(name: str) -> backends.Backend:
    return backends.find_backends([name])[0]


def _numpy() -> Library:
    return Library("numpy", lambda x: x, np.asarray)


def _read_only() -> Library:
    return Library("numpy-readonly", read_only, np.asarray)


def _torch() -> Library:
    base = _base("torch")
    return Library("torch", base.put, base.get)


def _torch_cuda() -> Library:
    base = next(each for each in backends.find_backends(["torch"]) if each.device.startswith("cuda"))
    return Library("torch-cuda", base.put, base.get)


def _strict(device: str) -> Callable[[], Library]:
    def make() -> Library:
        import array_api_strict as strict

        where = strict.Device(device)
        flags = {
            "api_version": "2024.12",
            "boolean_indexing": False,
            "data_dependent_shapes": False,
            "enabled_extensions": (),
        }

        def put(x: np.ndarray) -> Any:
            if device == "no_x64" and x.dtype == np.float64:
                raise TypeError("this device has no 64 bits")
            return strict.asarray(x, device=where)

        def get(x: Any) -> np.ndarray:
            assert x.device == where
            return np.asarray(x.to_device(strict.Device("CPU_DEVICE")))

        return Library(f"strict-{device}", put, get, lambda: strict.ArrayAPIStrictFlags(**flags))

    return make


def _jax(x64: bool) -> Callable[[], Library]:
    def make() -> Library:
        import jax

        jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time here

        @contextlib.contextmanager
        def guard() -> Iterator[None]:
            with jax.enable_x64(x64), jax.default_matmul_precision("float32"):
                yield

        return Library("jax-x64" if x64 else "jax", _put, np.asarray, guard, jax.jit)

    def _put(x: np.ndarray) -> Any:
        import jax

        return jax.device_put(x) if x.dtype != np.float64 or x64 else _no_float64()

    return make


def _no_float64() -> Any:
    raise TypeError("JAX without x64 has no float64")


def _cupy() -> Library:
    base = _base("cupy")
    return Library("cupy", base.put, base.get)


def _dask() -> Library:
    import dask

    base = _base("dask")

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a lazy graph was computed")

    def get(x: Any) -> np.ndarray:
        with dask.config.set(scheduler="synchronous"), np.errstate(all="ignore"):
            return base.get(x)

    return Library("dask", base.put, get, lambda: dask.config.set(scheduler=forbidden))


def _mlx() -> Library:
    import mlx.core as mx

    base = _base("mlx")
    compiler = shutil.which("g++")  # without one MLX compiles nothing on the CPU
    return Library("mlx", base.put, base.get, jit=mx.compile if compiler else None)


LIBRARIES: dict[str, tuple[str, Callable[[], Library]]] = {
    "numpy": ("numpy", _numpy),
    "numpy-readonly": ("numpy", _read_only),
    "torch": ("torch", _torch),
    "strict-CPU_DEVICE": ("array_api_strict", _strict("CPU_DEVICE")),
    "strict-device1": ("array_api_strict", _strict("device1")),
    "strict-no_x64": ("array_api_strict", _strict("no_x64")),
    "jax": ("jax", _jax(x64=False)),
    "jax-x64": ("jax", _jax(x64=True)),
    "dask": ("dask", _dask),
    "mlx": ("mlx", _mlx),
    "cupy": ("cupy", _cupy),
    "torch-cuda": ("torch", _torch_cuda),
}
"""By name: the module to import, and how the library is made. The last two run only when asked for by name."""

DEFAULT = [name for name in LIBRARIES if name not in ("cupy", "torch-cuda")]


def generator(library: Library, seed: int = 20170612) -> Any:
    """What the library draws from."""
    name = library.name.split("-")[0]
    if name == "torch":
        import torch

        return torch.Generator(library.put(np.zeros(1)).device).manual_seed(seed)
    if name == "jax":
        import jax

        return jax.random.key(seed)
    if name == "mlx":
        import mlx.core as mx

        return mx.random.key(seed)
    if name == "cupy":
        import cupy

        return cupy.random.default_rng(seed)
    return np.random.default_rng(seed)
