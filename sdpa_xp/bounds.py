"""How large scores can get at most, from the norms of queries and keys: |q k| <= |q| |k| (Cauchy, Schwarz).

Where no score is larger than LARGEST the softmax needs no maximum: exp neither overflows, nor are the sums of
any 10^20 of them, and exp(score - m) over its sum is the same for every m.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp.scores import Scores
from sdpa_xp.tiles import Part, Plan

LARGEST = 40.0
LEAST_SUM = 2.0**-32
"""In a row whose sum is smaller, weight * value may be too small a number before it is divided by that sum.

In others values of less than 2^-70 in float32 lose digits that they have with a maximum."""


class Bounds(NamedTuple):
    """Bounds of the scores of a call."""

    norms: dict[Part | None, float]
    """The largest norm of the keys of each part; each key is looked at once."""

    def hold(self, scores: Scores, query: Array, plan: Plan) -> bool:
        """Whether no score of a `scaled_query` is too large; a NaN or inf in query or key is."""
        if scores.biases or scores.sinks is not None:
            return False
        part = scores.pairs.part
        if part not in self.norms:
            everything = plan.column_ranges(range(plan.keys))
            self.norms[part] = max(_norm(scores.xp, scores.keys(columns)) for columns in everything)
        largest = self.norms[part] * _norm(scores.xp, query)
        return (largest if scores.softcap is None else min(largest, scores.softcap)) <= LARGEST

    def suffice(self, xp: Namespace, output: Array, l: Array) -> bool:
        """Whether what came out without a maximum is as exact as with it: finite, and from no tiny sums."""
        exact = xp.all((l >= LEAST_SUM) | (l <= 0.0))
        return bool(exact) and math.isfinite(float(xp.sum(output)))


def _norm(xp: Namespace, rows: Array) -> float:
    """The largest norm of `rows`, (..., width)."""
    square = float(xp.max(xp.vecdot(rows, rows)))
    return math.sqrt(square) if square == square else math.inf
