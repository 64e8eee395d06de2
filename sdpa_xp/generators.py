"""Random numbers of a library, from a generator that is passed in."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, cast

from sdpa_xp import mlx
from sdpa_xp.namespace import device, dtype_name, library_name, namespace
from sdpa_xp.protocols import Array

RNGS = {"torch": "torch.Generator", "jax": "JAX key", "cupy": "cupy.random.Generator", "mlx": "MLX key"}
"""What each library draws random numbers from; the others have no generator of their own and take NumPy's."""


def rng_name(array: Array) -> str:
    """The kind of generator that belongs to the library of `array`."""
    return RNGS.get(library_name(array), "numpy.random.Generator")


def is_rng(rng: object, array: Array) -> bool:
    """Whether `rng` is a generator of the library of `array`."""
    library = library_name(array)
    if library == "jax":
        jax = sys.modules["jax"]
        key = cast(Any, rng)
        if library_name(key) != "jax":
            return False
        typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        return bool(key.ndim == 0 if typed else key.ndim == 1 and dtype_name(key.dtype) == "uint32")
    if library == "torch":
        return isinstance(rng, sys.modules["torch"].Generator)
    if library == "mlx":
        return mlx.is_mlx_array(rng) and rng.shape == (2,) and dtype_name(rng.dtype) == "uint32"
    module = sys.modules.get(library if library == "cupy" else "numpy")
    return module is not None and isinstance(rng, module.random.Generator)


def can_draw(array: Array) -> bool:
    """Whether a generator can be drawn from now: torch.compile cannot trace torch's, which has a state."""
    return not (library_name(array) == "torch" and sys.modules["torch"].compiler.is_compiling())


def random_words(rng: Any, count: int, array: Array) -> Array:
    """`count` random int32 from `rng`, which `is_rng`, as an array like `array`."""
    least, most, library = -(2**31), 2**31 - 1, library_name(array)
    if library == "jax":
        jax = sys.modules["jax"]
        return cast(Array, jax.random.bits(rng, (count,), "uint32").view("int32"))
    if library == "torch":
        torch = sys.modules["torch"]
        words = torch.randint(least, most, (count,), generator=rng, device=rng.device, dtype=torch.int32)
        return cast(Array, words.to(device(array)))
    if library == "mlx":
        mx = sys.modules["mlx.core"]
        words = mx.random.split(rng, count)  # its integers have the 24 bits of a float
        return cast(Array, words[:, 0].view(mx.int32))
    words = rng.integers(least, most, size=count, dtype="int32")
    if library == "cupy":
        return cast(Array, words)
    xp = namespace(array)
    return xp.asarray(words.tolist(), dtype=xp.int32, device=device(array))


class Undrawn:
    """A context in which an error leaves a generator as it was before, so that the call can be made again.

    Keys of JAX and MLX have no state, and that of a cupy.random.Generator cannot be read.
    """

    def __init__(self, rng: Any, inner: AbstractContextManager[object]) -> None:
        self.rng, self.inner = rng, inner

    def __enter__(self) -> None:
        self.state = self._state()
        self.inner.__enter__()

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        self.inner.__exit__(error, *rest)
        if error is None or self.state is None:
            return
        if hasattr(self.rng, "set_state"):
            self.rng.set_state(self.state)
        else:
            self.rng.bit_generator.state = self.state

    def _state(self) -> Any:
        if hasattr(self.rng, "get_state"):  # torch
            return self.rng.get_state()
        return getattr(getattr(self.rng, "bit_generator", None), "state", None)
