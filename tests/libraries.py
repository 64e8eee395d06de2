"""The array libraries of the tests, among them the strictest variants that there are of each.

Each variant is a `Library`: how a NumPy array gets in and out, and what must hold while the code under test
runs (no write, no computing of a lazy graph, no use of what the standard lacks).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy knows the name bfloat16 from here on
import numpy as np
import pytest
from internals import dtype_name, kernels, namespace


@dataclass(frozen=True)
class Library:
    """A way to hold arrays."""

    name: str
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    jit: Callable[..., Any] | None = None
    """What traces a function of arrays, by its own name or another."""
    traces: bool = False
    """Whether `call` runs the function inside of `jit`."""
    lenient: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """The guard of what the tests themselves compute, if `guard` has settings that are for sdpa_xp alone."""

    @property
    def xp(self) -> Any:
        return namespace(self.put(np.zeros(1, np.float32)))

    @property
    def lazy(self) -> bool:
        return self.name == "dask"

    @property
    def compiled(self) -> Library:
        """JAX inside of `jit`, which compiles a function, not each operation of it; the others as they are."""
        return replace(self.without_settings, traces=self.name.startswith("jax"))

    @property
    def without_settings(self) -> Library:
        """The library for what a test itself computes."""
        return self if self.lenient is None else replace(self, guard=self.lenient)

    def holds(self, dtype: str) -> bool:
        """Whether the library keeps this dtype; only for what cannot hold it may a test be left out."""
        with self.guard():
            try:
                return dtype_name(self.put(np.zeros(1, dtype)).dtype) == dtype
            except (TypeError, ValueError):  # the second from a device of array-api-strict that lacks it
                return False

    def needs(self, dtype: str) -> None:
        """Skip the test if the library lacks a dtype."""
        if not self.holds(dtype):
            pytest.skip(f"{self.name} has no {dtype}")

    def needs_empty_arrays(self) -> None:
        if self.lazy:
            pytest.skip("Dask has no arrays of size 0")

    def needs_jit(self) -> None:
        if self.jit is None:
            pytest.skip(f"{self.name} has no jit")

    def call(self, function: Callable[..., Any], *arrays: np.ndarray, **rules: Any) -> Any:
        """`function` of the arrays in this library; NumPy arrays among the keywords are put in as well."""
        with self.guard():
            placed = {k: self.put(x) for k, x in rules.items() if isinstance(x, np.ndarray)}
            fixed = {k: x for k, x in rules.items() if k not in placed}
            bound = functools.partial(function, **fixed)
            if self.traces and self.jit is not None:
                bound = self.jit(bound)
            return bound(*(self.put(x) for x in arrays), **placed)


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _exported(name: str, device: str = "") -> Any:
    """The library on one of its devices, as the exporter holds its arrays; onnx is not needed."""
    from internals import backends

    fitting = [backend for backend in backends.find_backends([name]) if backend.device.startswith(device)]
    assert fitting, f"{name} has no device {device} here"
    return fitting[0]


def _numpy() -> Library:
    return Library("numpy", lambda x: x, np.asarray)


def _read_only() -> Library:
    return Library("numpy-readonly", read_only, np.asarray)


def _numpy_raise() -> Library:
    """NumPy as it is set to raise an error where it would warn."""
    return _with_settings(_numpy(), "numpy-raise", lambda: np.errstate(all="raise"))


def _numpy_torch() -> Library:
    """NumPy with `implementation="torch"` in all calls that torch's kernel computes."""
    import torch  # noqa: F401  # not as a part of what the first call does

    kernel = kernels.BY_NAME["torch"]()
    default = types.SimpleNamespace(
        not_default_reason=lambda _: None,
        unsupported_reason=kernel.unsupported_reason,
        attend=lambda call: kernel.attend(call._replace(implementation="torch")),
    )

    guards: list[object] = []  # those that are open, one in another or in several threads
    lock = threading.Lock()

    @contextlib.contextmanager
    def preferred() -> Iterator[None]:
        with lock:
            guards.append(default)
            kernels.KERNELS["other"] = lambda _call: default
        try:
            yield
        finally:
            with lock:
                guards.pop()
                if not guards:
                    del kernels.KERNELS["other"]

    return _with_settings(_numpy(), "numpy-torch", preferred)


def _torch() -> Library:
    base = _exported("torch", "cpu")
    return Library("torch", base.put, base.get)


def _torch_strict() -> Library:
    """Torch with other defaults, for a tensor that sdpa_xp makes without a dtype, a device or values."""
    import torch

    @contextlib.contextmanager
    def float64() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @contextlib.contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)  # memory that was not written to holds NaN, too
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return _with_settings(_torch(), "torch-strict", float64, deterministic, lambda: torch.device("meta"))


def _torch_inference() -> Library:
    import torch

    return _with_settings(_torch(), "torch-inference", torch.inference_mode)


def _torch_cuda_rules() -> Library:
    """Tensors that say they are on cuda:0, and keep its rules without a GPU."""
    from standins import torch_cuda

    on_cpu, torch_get = _torch(), torch_cuda.get
    torch_cuda.begin()  # for the whole process, since tests make tensors outside of `guard` too
    return Library(
        "torch-cuda-rules", lambda x: torch_cuda.put(on_cpu.put(x)), lambda x: on_cpu.get(torch_get(x))
    )


def _torch_cuda() -> Library:
    base = _exported("torch", "cuda")
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


def jax_x64(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """JAX with arrays of 64 bits, or without them; its name before JAX 0.8 was another."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    return importlib.import_module("jax.experimental").enable_x64(enabled)


def _jax(x64: bool, traces: bool = False) -> Callable[[], Library]:
    def make() -> Library:
        import jax

        jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time here

        @contextlib.contextmanager
        def guard() -> Iterator[None]:
            with jax_x64(x64), jax.default_matmul_precision("float32"):
                yield

        name = "jax-jit" if traces else "jax-x64" if x64 else "jax"
        return Library(name, _put, np.asarray, guard, jax.jit, traces)

    def _put(x: np.ndarray) -> Any:
        import jax

        return jax.device_put(x) if x.dtype != np.float64 or x64 else _no_float64()

    return make


def _jax_strict() -> Library:
    """JAX as it is set to refuse arrays of unlike ranks and dtypes."""
    import jax

    settings = (lambda: jax.numpy_rank_promotion("raise"), lambda: jax.numpy_dtype_promotion("strict"))
    return _with_settings(_jax(x64=True)(), "jax-strict", *settings)


def _jax_debug() -> Library:
    """JAX as it is set to refuse NaN and inf in results, and numbers that are not on the device yet."""
    import jax

    settings = (
        lambda: jax.debug_nans(True),
        lambda: jax.debug_infs(True),
        lambda: jax.transfer_guard("disallow"),
    )
    return _with_settings(_jax(x64=True)(), "jax-debug", *settings)


def _with_settings(
    base: Library, name: str, *settings: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Library:
    """A library under settings that are for sdpa_xp alone: a test itself computes without them."""

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in (base.guard, *settings):
                stack.enter_context(context())
            yield

    return replace(base, name=name, guard=guard, lenient=base.guard)


def _no_float64() -> Any:
    raise TypeError("JAX without x64 has no float64")


def _cupy() -> Library:
    base = _exported("cupy")
    return Library("cupy", base.put, base.get)


def _cupy_rules() -> Library:
    """The rules of CuPy, in tests/standins/cupy: what passes there has not run on CuPy."""
    import cupy

    assert not cupy.is_available()
    return Library("cupy-rules", cupy.asarray, cupy.asnumpy)


def _cupy_rules_device1() -> Library:
    """The same, with arrays on a device that is not the current one while sdpa_xp computes."""
    import cupy

    def put(x: np.ndarray) -> Any:
        with cupy.cuda.Device(1):
            return cupy.asarray(x)

    base = replace(_cupy_rules(), put=put, guard=lambda: cupy.cuda.Device(1))
    return _with_settings(base, "cupy-rules-device1", lambda: cupy.cuda.Device(0))


def _dask() -> Library:
    import dask

    base = _exported("dask")

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a lazy graph was computed")

    def get(x: Any) -> np.ndarray:
        with dask.config.set(scheduler="synchronous"), np.errstate(all="ignore"):
            return base.get(x)

    return Library("dask", base.put, get, lambda: dask.config.set(scheduler=forbidden))


def _mlx() -> Library:
    import mlx.core as mx

    base = _exported("mlx")
    compiler = shutil.which("g++")  # without one MLX compiles nothing on the CPU
    return Library("mlx", base.put, base.get, jit=mx.compile if compiler else None)


LIBRARIES: dict[str, tuple[str, Callable[[], Library]]] = {
    "numpy": ("numpy", _numpy),
    "numpy-readonly": ("numpy", _read_only),
    "numpy-raise": ("numpy", _numpy_raise),
    "numpy-torch": ("torch", _numpy_torch),
    "torch": ("torch", _torch),
    "torch-strict": ("torch", _torch_strict),
    "torch-inference": ("torch", _torch_inference),
    "strict-CPU_DEVICE": ("array_api_strict", _strict("CPU_DEVICE")),
    "strict-device1": ("array_api_strict", _strict("device1")),
    "strict-no_x64": ("array_api_strict", _strict("no_x64")),
    "jax": ("jax", _jax(x64=False)),
    "jax-x64": ("jax", _jax(x64=True)),
    "jax-jit": ("jax", _jax(x64=False, traces=True)),
    "jax-strict": ("jax", _jax_strict),
    "jax-debug": ("jax", _jax_debug),
    "dask": ("dask", _dask),
    "mlx": ("mlx", _mlx),
    "cupy": ("cupy", _cupy),
    "cupy-rules": ("cupy", _cupy_rules),
    "cupy-rules-device1": ("cupy", _cupy_rules_device1),
    "torch-cuda": ("torch", _torch_cuda),
    "torch-cuda-rules": ("torch", _torch_cuda_rules),
}
"""By name: the module to import, and how the library is made."""

SETTINGS = (
    *("numpy-raise", "numpy-torch", "torch-strict", "torch-inference", "torch-cuda-rules"),
    *("jax-strict", "jax-debug", "cupy-rules-device1"),
)
"""Libraries that are set to refuse what they compute by default; and NumPy with torch's kernel."""
CUPY_RULES = ("cupy-rules", "cupy-rules-device1")
"""The rules of CuPy. In their process, they have the name of the module."""
BY_NAME_ALONE = ("jax-jit", "cupy", "torch-cuda", "cupy-rules", *SETTINGS)
"""These run only if they are asked for."""
DEFAULT = [name for name in LIBRARIES if name not in BY_NAME_ALONE]
FAST = ["numpy", "torch"]
"""The libraries of a contributor's loop, as far as they are installed."""
WRITEABLE = ("numpy", "numpy-readonly", "torch")
"""The libraries whose results are written to: there a softmax without a maximum is tried first."""

THIN = {
    "numpy-readonly": 5,
    "strict-CPU_DEVICE": 2,
    "strict-no_x64": 7,
    "strict-device1": 7,
    "dask": 7,
    "jax": 11,
    "jax-x64": 5,
    "jax-jit": 3,
    "mlx": 3,
    "cupy-rules": 5,
    **dict.fromkeys(SETTINGS, 24),
}
"""With `--thin`, one of so many cases of a test function runs.

What that leaves out: a case in which alone an input is written to, an array is made on another device, a lazy
graph is computed, or JAX is wrong without jit. The same lines make and write arrays in all cases of a test, but
for those that are marked `sampled(1)`. Tests that are marked `sampled(0, on="THIN")` are left out whole, and on
eager JAX those that are marked `sampled(0, on="EAGER_JAX")` are too. The numbers are primes, so that a sample
has each value of each decorator of a test that has several.

Other tests say by the marker `sampled` that one of so many cases runs. Their cases run the same lines with
other numbers; a case that alone runs a branch is marked `sampled(1)`.
"""

EAGER_JAX = ("jax", "jax-x64", "jax-strict", "jax-debug")


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def each_module(*modules: str) -> list[Any]:
    """Parameters of a test, each with the mark that it needs the module."""
    return [pytest.param(module, marks=pytest.mark.needs(module)) for module in modules]


NAMESPACES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax.numpy",
    "dask": "dask.array",
    "mlx": "mlx.core",
    "strict-CPU_DEVICE": "array_api_strict",
}
"""The libraries that arrays are moved between: what a user imports."""
each_other = pytest.mark.parametrize(
    "other",
    [pytest.param(name, marks=pytest.mark.needs(place.split(".")[0])) for name, place in NAMESPACES.items()],
)


def can_write(library: Library) -> bool:
    """Whether an array that a function of the library returns can be written to."""
    return not library.name.startswith(("jax", "dask"))


def generator(library: Library, seed: int = 20170612) -> Any:
    """What the library draws from."""
    name = library.name.split("-")[0]
    if name == "torch":
        import torch

        device = "cpu" if library.name == "torch-cuda-rules" else library.put(np.zeros(1)).device
        return torch.Generator(device).manual_seed(seed)
    if name == "jax":
        import jax

        with jax.transfer_guard("allow"):
            return jax.random.key(seed)
    if name == "mlx":
        import mlx.core as mx

        return mx.random.key(seed)
    if name == "cupy":
        import cupy

        with library.put(np.zeros(1)).device:
            return cupy.random.default_rng(seed)
    return np.random.default_rng(seed)
