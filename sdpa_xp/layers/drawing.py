"""Weights drawn from an explicit generator.

Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010,
equation 16: uniform up to sqrt(6 / (in + out)), so that a map keeps the variance of what goes in and of what
comes back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, cast

from sdpa_xp import checks, generators, namespace
from sdpa_xp.layers.moving import moved, place
from sdpa_xp.protocols import AnyArray, Array

LIBRARIES = ("numpy", "torch", "jax.numpy", "mlx.core", "cupy")


def drawn(
    function: str, rng: Any, widths: Mapping[str, tuple[int, int]], *, bias: bool, like: AnyArray | None
) -> dict[str, tuple[Array, Array | None]]:
    """A weight for each of the widths (in, out), by Xavier's rule, and a bias of 0 or None.

    The generator is drawn from once, and what it gives is cut: a key of JAX has no second draw.
    """
    checks.flag(function, "bias", bias)
    count = sum(into * out for into, out in widths.values())
    numbers = _uniform(function, rng, count, like)
    dtype = numbers.dtype if like is None else like.dtype
    xp, device, start, made = namespace.namespace(numbers), namespace.device(numbers), 0, {}
    for name, (into, out) in widths.items():
        bound, stop = math.sqrt(6 / (into + out)), start + into * out
        weight = xp.reshape(numbers[start:stop] * (2 * bound) - bound, (out, into))
        zeros = xp.zeros((out,), dtype=dtype, device=device) if bias else None
        made[name], start = (namespace.converted(xp, weight, dtype), zeros), stop
    return made


def _uniform(function: str, rng: Any, count: int, like: AnyArray | None) -> Array:
    """Numbers from 0 to 1 in the library of `like`: float32, so that they are the same in each dtype."""
    own = _example(function, rng)
    library, xp = namespace.library_name(own), cast(Any, namespace.namespace(own))
    if library == "torch":
        numbers = xp.rand(count, generator=rng, dtype=xp.float32, device=rng.device)
    elif library == "jax":
        numbers = sys.modules["jax"].random.uniform(rng, (count,), xp.float32)
    elif library == "mlx":
        numbers = xp.random.uniform(shape=(count,), key=rng)
    else:
        numbers = rng.random(count, xp.float32)
    return cast(Array, numbers if like is None else moved(numbers, place(function, like)))


def _example(function: str, rng: Any) -> Array:
    """An array of the library that the generator belongs to."""
    for name in LIBRARIES:
        module: Any = sys.modules.get(name)
        array = None if module is None else module.zeros((0,), dtype=module.float32)
        if array is not None and generators.is_rng(rng, array):
            return cast(Array, array)
    return checks.generator(function, rng)
