"""What all programs over the tiles of a call have in common."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from .._libraries import computing
from .._run.buffers import CallBuffers
from .._run.results import Results
from .._tiles.plan import Plan
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import LeadingSlice, RowBlock, Target, Tile
from .scores import Scores


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A program over the tiles of some scores, as executors run it (`Program` of `_run/executors.py`)."""

    scores: Scores
    plan: Plan
    targets: Mapping[str, Target]
    shares_tiles: ClassVar[bool] = True
    """Whether the answers of a mask are kept for the heads of a range of queries, which takes memory."""

    @property
    def grid(self) -> ScoreGrid:
        return self.scores.grid

    @property
    def keeps_scores(self) -> bool:
        # A function may keep the scores that it gets.
        return self.scores.options.has_functions

    @property
    def is_recomputed(self) -> bool:
        return False

    def add_rows(self, results: Results, rows: range) -> None:
        raise NotImplementedError

    def computing(self) -> AbstractContextManager[object]:
        return computing(self.scores.query)

    def tile(self, rows: range, columns: range) -> Tile:
        return self.scores.tile(rows, columns)

    def key_range(self, rows: range) -> range:
        return self.scores.key_range(rows)

    def slice_leading(self, leading: LeadingSlice) -> Self:
        return replace(self, scores=self.scores.slice_leading(leading))

    def with_plan(self, plan: Plan) -> Self:
        return replace(self, plan=plan)

    def in_block(self, block: RowBlock) -> Self:
        return replace(self, scores=self.scores._replace(block=block))

    def in_memory(self, buffers: CallBuffers | None) -> Self:
        # Each part of the heads has tiles of the same queries: a mask that answers alike is asked once.
        is_shared = self.shares_tiles and self.plan.leading_slices and self.scores.options.mask.is_shared
        known: Any = {} if is_shared else None
        return replace(self, scores=self.scores._replace(buffers=buffers, known_tiles=known))
