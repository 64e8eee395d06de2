"""The array libraries that are installed, and how NumPy arrays get into them and back."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdpa_xp._checks import nearest_hint
from sdpa_xp._libraries import dtype_name, library_of
from sdpa_xp.errors import ArgumentValueError

from ._dtypes.dtype import numpy_dtype, to_numpy


@dataclass(frozen=True, slots=True)
class Backend:
    """One library on one device."""

    name: str
    device: str
    version: str
    put: Callable[[NDArray[Any]], Any]
    """A NumPy array -> an array of the library."""

    def get(self, array: Any) -> NDArray[Any]:
        """Return an array of the library as one of NumPy, once it is computed."""
        return to_numpy("find", "array", array)

    def namespace(self) -> Any:
        """Return the array-API namespace of the library."""
        array = self.put(np.zeros(1, np.float32))
        return library_of(array).namespace(array)

    def holds(self, dtype: str) -> bool:
        """Return whether the library keeps this dtype; JAX turns float64 into float32 unless told otherwise."""
        self.put(np.zeros(1, np.float32))  # each library has it: what fails here is no lack of a dtype
        try:
            return dtype_name(self.put(np.zeros(1, numpy_dtype(dtype))).dtype) == dtype
        except (TypeError, ValueError):  # array-api-strict has only the dtypes of the standard
            return False


def find_backends(names: Sequence[str] | None = None) -> list[Backend]:
    """Return each of the libraries in `names` on each of its devices; without names, all that are installed.

    Raises:
        ValueError: A library that is not known, not installed, or has no device here.
    """
    backends: list[Backend] = []
    for name in LIBRARIES if names is None else dict.fromkeys(names):
        if name not in LIBRARIES:
            rule = f"`backends` must be among {', '.join(LIBRARIES)}"
            raise ArgumentValueError("find", rule, {"backend": repr(name)}, nearest_hint(name, LIBRARIES))
        opened = _open(name) if is_installed(name) else []
        if names is not None and not opened:
            rule = "`backends` must be installed and have a device here"
            hint = "The command `sdpa-xp backends` lists those that are."
            raise ArgumentValueError("find", rule, {"backend": repr(name)}, hint)
        backends += opened
    return backends


def is_installed(name: str) -> bool:
    """Return whether a library can be imported."""
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _open(name: str) -> list[Backend]:
    package = _PACKAGES[name]
    module = importlib.import_module(package.module)
    devices = package.devices(module)
    if not devices:
        return []
    like = module.zeros((1,))
    version = getattr(module, "__version__", None) or importlib.import_module(name).__version__
    return [
        Backend(name, shown, str(version), package.put or _on_device(like, device))
        for shown, device in devices.items()
    ]


def _on_device(like: Any, device: Any) -> Callable[[NDArray[Any]], Any]:
    """Return what puts NumPy arrays on a device of the library of `like`."""
    library, xp = library_of(like), library_of(like).namespace(like)
    return lambda x: library.from_numpy(x, xp, device)


def _in_halves(x: NDArray[Any]) -> Any:
    """Return an array of Dask that is cut in the middle of the rows."""
    halves = {axis: -(-x.shape[axis] // 2) for axis in (x.ndim - 2,) if x.ndim >= 2}
    chunks = tuple(halves.get(axis, -1) for axis in range(x.ndim))
    return importlib.import_module("dask.array").from_array(x, chunks=chunks)


def _in_mlx(x: NDArray[Any]) -> Any:
    """Return an array of MLX, which has float64 only if it is asked for."""
    mx = importlib.import_module("mlx.core")
    if x.dtype == np.float64:
        return mx.array(np.array(x, order="C"), dtype=mx.float64)
    on_default: Any = _on_device(mx.zeros(1), None)(x)
    return on_default


class Package(NamedTuple):
    """How a library is found."""

    module: str
    """What makes its arrays."""
    devices: Callable[[Any], dict[str, Any]] = lambda _: {"cpu": None}
    """The devices of the module by the names that are shown; None is the library's default."""
    put: Callable[[NDArray[Any]], Any] | None = None
    """A NumPy array -> an array of the library, if not as for the rest of sdpa_xp."""


_PACKAGES = {
    "numpy": Package("numpy"),
    "torch": Package(
        "torch", lambda torch: {x: x for x in ("cpu", *map("cuda:{}".format, range(torch.cuda.device_count())))}
    ),
    "array-api-strict": Package("array_api_strict"),
    "jax": Package(
        "jax.numpy", lambda _: {str(device): device for device in importlib.import_module("jax").devices()}
    ),
    "cupy": Package("cupy", lambda cupy: {"cuda:0": None} if cupy.is_available() else {}),
    "dask": Package("dask.array", put=_in_halves),
    "mlx": Package("mlx.core", lambda mx: {mx.default_device().type.name: None}, _in_mlx),
}
LIBRARIES = tuple(_PACKAGES)
