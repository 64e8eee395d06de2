"""The two results of size L x S: the weights of attention, and the scores that they are computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._libraries.protocols import Array, Dtype
from .._run import avoid_zero_sum, finite_shift
from .._run.executors import run
from .._run.program import Program, Results
from .._tiles import Allowed, Target
from .._tiles.plan import Plan
from . import Scores


@dataclass(frozen=True, slots=True)
class PairsProgram(Program):
    """A number for each pair: the target "weights" or "scores", computed with all keys of some queries."""

    scores: Scores
    lse: Array | None = None
    """Two numbers that add up to the log-sum-exp over more keys than these, (..., Hq, L, 2): m, and log l."""

    @property
    def keeps_scores(self) -> bool:
        return True

    def add_rows(self, results: Results, rows: range) -> None:
        s, allowed = self._scores_of_rows(rows)
        if "scores" in results:
            results["scores"].put(rows, s)
        elif 0 in s.shape:  # the maximum of no numbers is an error
            results["weights"].put(rows, s)
        else:
            results["weights"].put(rows, self._weights(rows, s, allowed))

    def _scores_of_rows(self, rows: range) -> tuple[Array, Allowed]:
        """Return the scores of some queries, (..., Hq, rows, S), and which pairs may attend."""
        scores, xp = self.scores, self.scores.xp
        query = scores.scaled_query(rows)
        shape = scores.tile(rows, scores.grid.sides[1]).shape
        for computed in scores.computed_tiles(rows, self.plan, query):  # one tile, or none
            s = computed.scores
            # A result is no view of a smaller array.
            return s if s.shape == shape else xp.broadcast_to(s, shape) + 0.0, computed.allowed
        return xp.broadcast_to(xp.zeros_like(query[..., :1]), shape) - math.inf, False

    def _weights(self, rows: range, s: Array, allowed: Allowed) -> Array:
        scores, xp, options = self.scores, self.scores.xp, self.scores.options
        row_tile = scores.tile(rows, scores.grid.sides[1])
        if self.lse is not None:
            m, log_l = (row_tile.slice_queries(self.lse)[..., part : part + 1] for part in range(2))
            p, l = xp.exp(s - finite_shift(xp, m)), xp.exp(log_l)
        else:
            m = xp.max(s, axis=-1, keepdims=True)
            m = m if options.sinks is None else xp.maximum(m, options.sinks)
            shift = finite_shift(xp, m)
            p = xp.exp(s - shift)
            l = xp.sum(p, axis=-1, keepdims=True)
            l = l if options.sinks is None else l + xp.exp(options.sinks - shift)
        # In a row with a NaN each weight is NaN, but a masked pair has weight 0.
        w = scores.without_masked(p / avoid_zero_sum(l), allowed)
        return w if options.dropout is None else options.dropout.apply(row_tile, w)


def full_matrix(name: str, scores: Scores, plan: Plan, dtype: Dtype, lse: Array | None = None) -> Array:
    """Return the "weights", after dropout, or the "scores", -inf where a pair may not attend: (..., Hq, L, S).

    The weights may be those of a part of the keys, if `lse` is over all of them.
    """
    targets = {name: Target(scores.grid.shape, ("rows", None), dtype=dtype)}
    return run(PairsProgram(scores, plan.with_common_borders(), targets, lse))[name]
