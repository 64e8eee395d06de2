"""Initial weights, drawn from an explicit generator.

Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010,
equation 16: uniform up to sqrt(6 / (in + out)), so that a map keeps the variance of its inputs in the forward
pass and of its gradients in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sdpa_xp._checks.keywords import check_flag
from sdpa_xp._checks.layers import refuse_unknown_generator
from sdpa_xp._libraries import LIBRARIES, Library, astype_if_needed, device_of, namespace_of, quiet
from sdpa_xp._libraries.protocols import AnyArray, Array, Dtype
from sdpa_xp.layers.transfer import copy_to, destination_of


def draw_parameters(
    function: str, rng: Any, widths: Mapping[str, tuple[int, int]], *, bias: bool, like: AnyArray | None
) -> dict[str, tuple[Array, Array | None]]:
    """Return for each of the widths (in, out) a weight by Xavier's rule, and a bias of 0 or None.

    All numbers are drawn at once and then split, because a key of JAX must not be used for a second draw.
    """
    check_flag(function, "bias", bias)
    count = sum(in_width * out_width for in_width, out_width in widths.values())
    with quiet(rng), quiet(like):
        numbers = _draw_uniform(function, rng, count, like)
    with quiet(numbers):
        return _scaled(numbers, widths, bias=bias, dtype=numbers.dtype if like is None else like.dtype)


def _scaled(
    numbers: Array, widths: Mapping[str, tuple[int, int]], *, bias: bool, dtype: Dtype
) -> dict[str, tuple[Array, Array | None]]:
    """Return the weights of each map out of numbers from 0 to 1, and its bias."""
    xp, device, start = namespace_of(numbers), device_of(numbers), 0
    parameters: dict[str, tuple[Array, Array | None]] = {}
    for name, (in_width, out_width) in widths.items():
        bound, stop = math.sqrt(6 / (in_width + out_width)), start + in_width * out_width
        weight = xp.reshape(numbers[start:stop] * (2 * bound) - bound, (out_width, in_width))
        zeros = xp.zeros((out_width,), dtype=dtype, device=device) if bias else None
        parameters[name], start = (astype_if_needed(xp, weight, dtype), zeros), stop
    return parameters


def _draw_uniform(function: str, rng: Any, count: int, like: AnyArray | None) -> Array:
    """Return float32 from 0 to 1 in the library of `like`, so that all dtypes get the same numbers."""
    library, example = _library_of_generator(function, rng)
    numbers = library.uniform(rng, count, library.namespace(example))
    return numbers if like is None else copy_to(numbers, destination_of(function, like))


def _library_of_generator(function: str, rng: Any) -> tuple[Library, Array]:
    """Return the library that the generator belongs to, and an array of that library."""
    for library in LIBRARIES:
        example = library.example()
        if example is not None and library.is_rng(rng):
            return library, example
    return refuse_unknown_generator(function, rng)
