"""Weights drawn from an explicit generator.

Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010,
equation 16: uniform up to sqrt(6 / (in + out)), so that a map keeps the variance of what goes in and of what
comes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import LIBRARIES, Library, astype_if_needed, device_of, namespace_of
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.layers.moving import moved, place


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
    xp, device, start, made = namespace_of(numbers), device_of(numbers), 0, {}
    for name, (into, out) in widths.items():
        bound, stop = math.sqrt(6 / (into + out)), start + into * out
        weight = xp.reshape(numbers[start:stop] * (2 * bound) - bound, (out, into))
        zeros = xp.zeros((out,), dtype=dtype, device=device) if bias else None
        made[name], start = (astype_if_needed(xp, weight, dtype), zeros), stop
    return made


def _uniform(function: str, rng: Any, count: int, like: AnyArray | None) -> Array:
    """Numbers from 0 to 1 in the library of `like`: float32, so that they are the same in each dtype."""
    library, example = _library_of_generator(function, rng)
    numbers = library.uniform(rng, count, library.namespace(example))
    return numbers if like is None else moved(numbers, place(function, like))


def _library_of_generator(function: str, rng: Any) -> tuple[Library, Array]:
    """The library that the generator belongs to, and an array of it."""
    for library in LIBRARIES:
        example = library.example()
        if example is not None and library.is_rng(rng):
            return library, example
    return checks.generator(function, rng)
