"""Inputs in which some tokens are very large, so that a wrong mask shows.

A mask that adds -1e4 instead of -inf works as long as scores are ordinary. So some tokens are multiplied by a
number so large that their scores are far beyond 1e4. If a mask hides them, other tokens must not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._verify.agreement import EPS
from sdpa_xp_export._verify.pair_terms import Arrays

FACTORS = {
    "float16": (2.0**13, 2.0**10, 2.0**6),
    "bfloat16": (2.0**30, 2.0**20, 2.0**10, 2.0**6),
    "float32": (2.0**30, 2.0**20, 2.0**10, 2.0**6),
    "float64": (2.0**30, 2.0**20, 2.0**10, 2.0**6),
}
"""Tokens are multiplied by the first factor; if a layer overflows, the next one is tried. If scores are far
larger than 1e7, a rounding error of float32 almost never decides which of two keys gets all the weight."""
WHOLE = 256
"""The whole numbers up to this one are exact in every dtype."""
PART = 0.25
"""The fraction of tokens that become large."""


def factors(arrays: Arrays, drawn: Sequence[str]) -> tuple[float, ...]:
    """Return the factors to try, the largest first, for the narrowest dtype that is enlarged."""
    dtypes = {arrays[name].dtype.name for name in _enlarged(arrays, drawn)}
    return min((FACTORS[dtype] for dtype in dtypes), default=())


def with_large_tokens(arrays: Arrays, drawn: Sequence[str], factor: float, rng: np.random.Generator) -> Arrays:
    """Multiply some tokens of each floating input by `factor`, except of inputs in `drawn`."""
    large = {}
    for name in _enlarged(arrays, drawn):
        x = arrays[name]
        chosen = rng.random((*x.shape[:-1], 1)) < PART
        large[name] = np.where(chosen, x * np.asarray(factor, x.dtype), x).astype(x.dtype)
    return {**arrays, **large}


def perturbed(arrays: Arrays, rng: np.random.Generator) -> Arrays:
    """Return inputs with each number changed by at most two rounding errors.

    The change of the result shows how much rounding errors of that size may change it, in any order of
    operations.
    """
    return {name: moved(x, rng) for name, x in arrays.items()}


def moved(x: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return floats with each number changed by at most two rounding errors; other arrays stay.

    Small whole numbers stay too: no rounding changes them, and they may be positions that are compared.
    """
    if x.dtype.name not in EPS:
        return x
    wide = x.astype(np.float64)
    step = 2 * EPS[x.dtype.name] * rng.uniform(-1, 1, x.shape)
    with np.errstate(invalid="ignore"):
        is_small_and_whole = (wide == np.rint(wide)) & (np.abs(wide) <= WHOLE)
        return np.asarray(wide * (1 + np.where(is_small_and_whole, 0.0, step))).astype(x.dtype)


def furthest(exact: NDArray[Any], candidates: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return for each element the candidate with the largest error."""
    worst = candidates[0]
    for candidate in candidates[1:]:
        with np.errstate(invalid="ignore"):
            is_float = exact.dtype.kind not in "iub"  # booleans have no difference, and unsigned ones wrap
            further = np.abs(candidate - exact) > np.abs(worst - exact) if is_float else candidate != exact
        worst = np.where(further, candidate, worst)
    return worst


def overflows(ordinary: Mapping[str, NDArray[Any]], *large: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether an output has inf or NaN in other places than with ordinary inputs."""
    return any(
        not np.array_equal(np.isfinite(ordinary[name]), np.isfinite(outputs[name]))
        for outputs in large
        for name in outputs
    )


def _enlarged(arrays: Arrays, drawn: Sequence[str]) -> list[str]:
    return [name for name, x in arrays.items() if x.dtype.name in FACTORS and x.ndim > 1 and name not in drawn]
