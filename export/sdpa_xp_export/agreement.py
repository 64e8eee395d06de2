"""When two results agree: the rule of flash-attention's tests, relative to the textbook formula.

A result in dtype d may be off by twice the error of the textbook formula computed in d by the same library,
plus a few roundings. So nothing is tuned by hand: what a dtype and a library can do sets the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.checks import message

ROUNDINGS = 4
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a result is from the float64 reference, and how far it may be."""

    absolute: float
    """Largest absolute error; inf where NaN and inf stand at other places than in the reference."""
    relative: float
    """The same, over the largest absolute value of the reference."""
    bound: float
    """What `absolute` may be at most."""

    @property
    def agrees(self) -> bool:
        return self.absolute <= self.bound

    @property
    def share(self) -> float:
        """How much of the bound is used up; beyond 1 it does not hold."""
        if self.absolute == 0:
            return 0.0
        return self.absolute / self.bound if self.bound else math.inf


def judge(
    result: NDArray[np.generic], reference: NDArray[np.float64], textbook: NDArray[np.generic], dtype: str
) -> Agreement:
    """Compare `result`, whose dtype is `dtype`, with the reference; `textbook` sets the bound."""
    if result.shape != reference.shape:
        rule = "`result` must have the shape of the reference"
        raise ValueError(message("judge", rule, {"result": result.shape, "reference": reference.shape}))
    finite = np.isfinite(reference)
    largest = float(np.max(np.abs(reference[finite]), initial=0.0))
    error = _error(result, reference)
    own = _error(np.where(finite, textbook, reference), reference)
    own = own if math.isfinite(own) else 0.0  # a textbook formula that overflows allows nothing
    bound = 2 * own + ROUNDINGS * EPS[dtype] * largest
    return Agreement(error, error / largest if largest else error, bound)


def textbook(
    xp: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    scale: Any = None,
    softcap: float | None = None,
) -> Any:
    """softmax(q k^T * scale + bias) v as a textbook has it: whole arrays, each step in the dtype of the input.

    `xp` is an array-API namespace. A row without a key is set to 0.
    """
    dtype, width = query.dtype, query.shape[-1]

    def rounded(x: Any) -> Any:
        return xp.astype(x, dtype)

    if query.ndim > 2:
        group = query.shape[-3] // (key.shape[-3] if key.ndim > 2 else 1)
        key, value = (xp.repeat(x, group, axis=-3) if x.ndim > 2 and group > 1 else x for x in (key, value))
    scale = 1 / math.sqrt(width) if scale is None else scale
    scale = scale if isinstance(scale, int | float) else rounded(scale)
    scores = rounded(rounded(query @ xp.matrix_transpose(key)) * scale)
    if softcap:
        scores = rounded(rounded(xp.tanh(rounded(scores / softcap))) * softcap)
    for term in (attn_mask, bias):
        if term is None:
            continue
        if str(term.dtype).endswith("bool"):
            scores = xp.where(term, scores, -math.inf)
        else:
            scores = rounded(scores + rounded(term))
    if is_causal:
        later = xp.triu(xp.ones_like(scores), k=1) > 0
        scores = xp.where(later, -math.inf, scores)
    scores = rounded(scores)
    largest = xp.max(scores, axis=-1, keepdims=True)
    empty = largest == -math.inf
    exponentials = rounded(xp.exp(rounded(scores - xp.where(empty, xp.zeros_like(largest), largest))))
    total = rounded(xp.sum(exponentials, axis=-1, keepdims=True))
    weights = rounded(exponentials / xp.where(empty, xp.ones_like(total), total))
    return rounded(weights @ value)


def _error(result: NDArray[np.generic], reference: NDArray[np.float64]) -> float:
    finite = np.isfinite(reference)
    actual = np.asarray(result, np.float64)
    if not np.array_equal(np.isfinite(actual), finite):
        return math.inf
    if not np.array_equal(actual[~finite], reference[~finite], equal_nan=True):
        return math.inf
    return float(np.max(np.abs(actual[finite] - reference[finite]), initial=0.0))
