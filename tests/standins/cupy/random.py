"""Generators. Their state is on the device, and `state` is a method that returns its address."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy import _rules
from cupy._arrays import ndarray, on_device, wrapped
from cupy.cuda import runtime


class XORWOW:
    """A source of random bits, on the device on which it was made."""

    def __init__(self, seed: Any = None) -> None:
        self._source, self._current_device_id = np.random.default_rng(seed), runtime.getDevice()

    def state(self) -> int:
        """Return the address of the state."""
        return id(self)


class Generator:
    """A generator of random numbers."""

    def __init__(self, bit_generator: XORWOW) -> None:
        self.bit_generator = bit_generator

    def random(self, size: Any = None, dtype: Any = np.float64) -> ndarray:
        return self._drawn("random", size, np.dtype(dtype))

    def integers(self, low: int, high: Any = None, size: Any = None, dtype: Any = np.int64) -> ndarray:
        return self._drawn("integers", low, high, size, dtype)

    def _drawn(self, kernel: str, *arguments: Any) -> ndarray:
        if runtime.getDevice() != self.bit_generator._current_device_id:
            raise RuntimeError("This Generator state is allocated in a different device")
        on_device(kernel)
        return wrapped(np.asarray(getattr(self.bit_generator._source, kernel)(*arguments)))


for _name in ("random", "integers"):
    setattr(Generator, _name, _rules.checked(f"Generator.{_name}", getattr(Generator, _name)))


def default_rng(seed: Any = None) -> Generator:
    """Return a generator on the current device."""
    return Generator(XORWOW(seed))
