"""The array libraries that are installed, and how NumPy arrays get into them and back."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from sdpa_xp._libraries.dtypes import dtype_name
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._dtypes.conversion import numpy_dtype

BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Backend:
    """One library on one device."""

    name: str
    device: str
    version: str
    put: Callable[[NDArray[Any]], Any]
    """A NumPy array -> an array of the library."""
    get: Callable[[Any], NDArray[Any]]
    """An array of the library -> a NumPy array, once it is computed."""

    def namespace(self) -> Any:
        """Return the array-API namespace of the library."""
        return array_api_compat.array_namespace(self.put(np.zeros(1, np.float32)))

    def holds(self, dtype: str) -> bool:
        """Return whether the library keeps this dtype; JAX turns float64 into float32 unless told otherwise."""
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
            raise ArgumentValueError("find", rule, {"backend": repr(name)})
        opened = _OPEN[name]() if _installed(name) else []
        if names is not None and not opened:
            rule = "`backends` must be installed and have a device here"
            raise ArgumentValueError("find", rule, {"backend": repr(name)})
        backends += opened
    return backends


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _version(name: str) -> str:
    module = importlib.import_module(name.replace("-", "_"))
    return str(getattr(module, "__version__", "unknown"))


def _numpy() -> list[Backend]:
    return [Backend("numpy", "cpu", np.__version__, lambda x: x, np.asarray)]


def _torch() -> list[Backend]:
    import torch

    def put(x: NDArray[Any], device: str) -> Any:
        if x.dtype.name == BFLOAT16:  # torch does not take NumPy's bfloat16
            return torch.asarray(x.astype(np.float32), device=device).to(torch.bfloat16)
        return torch.asarray(x, device=device)

    def get(x: Any) -> NDArray[Any]:
        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:
            return _in_bfloat16(x.float().numpy())
        array: NDArray[Any] = x.numpy()
        return array

    devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [Backend("torch", device, torch.__version__, partial(put, device=device), get) for device in devices]


def _strict() -> list[Backend]:
    import array_api_strict

    version = array_api_strict.__version__
    return [Backend("array-api-strict", "cpu", version, array_api_strict.asarray, np.asarray)]


def _jax() -> list[Backend]:
    import jax

    return [
        Backend(
            "jax",
            str(device),
            jax.__version__,
            partial(jax.device_put, device=device),
            np.asarray,
        )
        for device in jax.devices()
    ]


def _cupy() -> list[Backend]:
    import cupy

    if not cupy.is_available():
        return []
    return [Backend("cupy", "cuda:0", cupy.__version__, cupy.asarray, cupy.asnumpy)]


def _dask() -> list[Backend]:
    import dask.array

    def put(x: NDArray[Any]) -> Any:
        halves = {axis: -(-x.shape[axis] // 2) for axis in (x.ndim - 2,) if x.ndim >= 2}
        return dask.array.from_array(x, chunks=tuple(halves.get(i, -1) for i in range(x.ndim)))

    return [Backend("dask", "cpu", _version("dask"), put, lambda x: np.asarray(x.compute()))]


def _mlx() -> list[Backend]:
    import mlx.core as mx

    def put(x: NDArray[Any]) -> Any:
        if x.dtype.name == BFLOAT16:  # MLX does not take NumPy's bfloat16
            return mx.array(x.astype(np.float32)).astype(mx.bfloat16)
        wide = x.dtype == np.float64  # MLX makes float64 of it only if told to
        return mx.array(x, dtype=mx.float64) if wide else mx.array(x)

    def get(x: Any) -> NDArray[Any]:
        if x.dtype == mx.bfloat16:
            return _in_bfloat16(np.asarray(x.astype(mx.float32)))
        return np.asarray(x)

    return [Backend("mlx", mx.default_device().type.name, _version("mlx.core"), put, get)]


def _in_bfloat16(x: NDArray[Any]) -> NDArray[Any]:
    """Convert numbers to NumPy's bfloat16, which other libraries do not return."""
    return x.astype(numpy_dtype(BFLOAT16))


_OPEN: dict[str, Callable[[], list[Backend]]] = {
    "numpy": _numpy,
    "torch": _torch,
    "array-api-strict": _strict,
    "jax": _jax,
    "cupy": _cupy,
    "dask": _dask,
    "mlx": _mlx,
}
LIBRARIES = tuple(_OPEN)
