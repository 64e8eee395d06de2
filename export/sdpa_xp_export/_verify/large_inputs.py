"""Inputs in which some tokens are very large, so that a wrong mask shows.

A mask constant of -1e4 in place of -inf hides keys with ordinary scores. So some tokens are multiplied by a
number so large that their scores are far beyond 1e4. Where a mask hides them, other tokens must not change.
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
"""What tokens are multiplied by; the next one is tried if a layer overflows. If scores are far larger than 1e7,
two of them are almost never so close that a rounding of float32 decides which key is attended."""
PART = 0.25
"""The part of the tokens that is large."""


def factors(arrays: Arrays, drawn: Sequence[str]) -> tuple[float, ...]:
    """Return the factors to try, the largest first: those of the narrowest dtype that is enlarged."""
    dtypes = {arrays[name].dtype.name for name in _enlarged(arrays, drawn)}
    return min((FACTORS[dtype] for dtype in dtypes), default=())


def with_large_tokens(arrays: Arrays, drawn: Sequence[str], factor: float, rng: np.random.Generator) -> Arrays:
    """Multiply a part of the tokens of each floating input by `factor`, but not of what `draw` returns."""
    large = {}
    for name in _enlarged(arrays, drawn):
        x = arrays[name]
        chosen = rng.random((*x.shape[:-1], 1)) < PART
        large[name] = np.where(chosen, x * np.asarray(factor, x.dtype), x).astype(x.dtype)
    return {**arrays, **large}


def perturbed(arrays: Arrays, rng: np.random.Generator) -> Arrays:
    """Return inputs of which each number is off by a rounding or two.

    What a result changes by is what roundings of that size may change it by, in whichever order they are made.
    """
    moved = {}
    for name, x in arrays.items():
        if x.dtype.name in EPS:
            step = 2 * EPS[x.dtype.name] * rng.uniform(-1, 1, x.shape)
            moved[name] = (x.astype(np.float64) * (1 + step)).astype(x.dtype)
    return {**arrays, **moved}


def furthest(exact: NDArray[Any], candidates: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return for each element the candidate that is furthest from the exact one."""
    worst = candidates[0]
    for candidate in candidates[1:]:
        with np.errstate(invalid="ignore"):
            further = np.abs(candidate - exact) > np.abs(worst - exact)
        worst = np.where(further, candidate, worst)
    return worst


def overflows(ordinary: Mapping[str, NDArray[Any]], *large: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether an output has inf or NaN where that of ordinary inputs has not, or the other way round."""
    return any(
        not np.array_equal(np.isfinite(ordinary[name]), np.isfinite(outputs[name]))
        for outputs in large
        for name in outputs
    )


def _enlarged(arrays: Arrays, drawn: Sequence[str]) -> list[str]:
    return [name for name, x in arrays.items() if x.dtype.name in FACTORS and x.ndim > 1 and name not in drawn]
