"""The keys with the largest scores of each query, where a score joins all heads: sum_h w_h f(q_h k)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from .._libraries.protocols import Array
from .._run import key_leading_slice
from .._run.executors import run
from .._run.program import Program, Results
from .._tiles import LeadingSlice, Target, slice_leading
from .._tiles.plan import Plan
from . import Scores
from .top_keys import LargestScores, top_of_tile


@dataclass(frozen=True, slots=True)
class IndexScoresProgram(Program):
    """The keys with the largest scores. The grid has one head, and the queries have all heads."""

    scores: Scores
    score: Callable[[Array], Array] | None
    """f of the products; None is max(0, x)."""
    weights: Array | None
    """w, (..., Hq, L, 1)."""
    top_k: int

    @property
    def keeps_scores(self) -> bool:
        return self.score is not None

    def slice_leading(self, leading: LeadingSlice) -> Self:
        scores, every = self.scores, (*leading[:-1], range(self.scores.query.shape[-3]))
        key, query = scores.key.slice_leading(key_leading_slice(every, scores.group)), scores.query
        scores = scores._replace(query=slice_leading(query, every), key=key, leading=leading)
        weights = None if self.weights is None else slice_leading(self.weights, every)
        return replace(self, scores=scores, weights=weights)

    def add_rows(self, results: Results, rows: range) -> None:
        scores, xp, top = self.scores, self.scores.xp, None
        query, of_rows = scores.scaled_query(rows), scores.tile(rows, range(1))
        keys = scores.key.slices(scores.grid, transposed=True)
        weights = None if self.weights is None else of_rows._replace(leading=None).slice(self.weights)
        for tile, allowed in scores.tiles(rows, self.plan):
            s = scores.products(query, keys(tile.columns))
            s = xp.where(s < 0, 0.0, s) if self.score is None else self.score(s)  # a NaN stays
            total = xp.sum(s if weights is None else s * weights, axis=-3, keepdims=True)
            total = xp.where(xp.isnan(total), -math.inf, total)
            if not isinstance(allowed, bool):
                total = xp.where(allowed, total, -math.inf)
            top = top_of_tile(tile, total, xp.max(total, axis=-1, keepdims=True), self.top_k, top)
        top = LargestScores.none(scores.grid, query[..., :1, :, :], 1) if top is None else top
        keys_of_rows = top.padded(xp, self.top_k).keys
        results["indices"].add(of_rows, xp.broadcast_to(keys_of_rows, (*of_rows.shape[:-1], self.top_k)))


def largest_keys(
    scores: Scores, plan: Plan, score: Callable[[Array], Array] | None, weights: Array | None, top_k: int
) -> Array:
    """Return the keys (..., 1, L, `top_k`), int32; -1 where a query has fewer keys."""
    target = Target((*scores.grid.leading_shape, plan.queries, top_k), ("rows", None), dtype=scores.xp.int32)
    program = IndexScoresProgram(scores, plan, {"indices": target}, score, weights, top_k)
    return run(program)["indices"]
