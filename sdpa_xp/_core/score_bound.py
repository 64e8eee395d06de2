"""A bound of the scores from the norms of queries and keys: |q k| <= |q| |k| (Cauchy-Schwarz).

If no score is larger than LARGEST_SCORE, the softmax needs no maximum: exp does not overflow, nor does the sum
of 10^20 of them, and exp(score - m) over its sum is the same for every m.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sdpa_xp._core.scores import Scores
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp._tiles.plan import Plan
from sdpa_xp._tiles.tile import LeadingSlice

LARGEST_SCORE = 40.0
LEAST_SUM = 2.0**-32
"""Below this sum of a row, weight * value may underflow before it is divided by the sum. Above it, float32
loses only digits of values under 2^-70."""


class ScoreNormBound(NamedTuple):
    """The bound of the scores of a call."""

    key_norms: dict[LeadingSlice | None, float]
    """The largest norm of the keys of each leading slice, so that each key is read once."""

    def is_small(self, scores: Scores, query: Array, plan: Plan) -> bool:
        """Return whether all finite scores of a `scaled_query` are small.

        NaN and inf are not small, but a small soft cap hides them: `is_accurate` sees them in the output.
        """
        if scores.biases or scores.sinks is not None:
            return False
        if scores.leading not in self.key_norms:
            all_columns = plan.column_ranges(range(plan.keys))
            norms = [_largest_norm(scores.xp, scores.keys(columns)) for columns in all_columns]
            self.key_norms[scores.leading] = max(norms)
        largest = self.key_norms[scores.leading] * _largest_norm(scores.xp, query)
        return (largest if scores.softcap is None else min(largest, scores.softcap)) <= LARGEST_SCORE


def is_accurate(xp: Namespace, output: Array, l: Array) -> bool:
    """Return whether an output is as exact without a maximum as with it: finite, and no sum l is tiny."""
    no_tiny_sum = xp.all((l >= LEAST_SUM) | (l <= 0.0))
    return bool(no_tiny_sum) and math.isfinite(float(xp.sum(output)))


def _largest_norm(xp: Namespace, rows: Array) -> float:
    """Return the largest norm of `rows`, (..., width)."""
    square = float(xp.max(xp.vecdot(rows, rows)))
    return math.sqrt(square) if square == square else math.inf
