"""How a call is cut: which tiles there are, which are looked at, and how large they get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdpa_xp import attention_weights, scaled_dot_product_attention
from sdpa_xp.masks import causal
from sdpa_xp.pairs import pairs_of
from sdpa_xp.scores import Scores
from sdpa_xp.tiles import COLUMNS, ROWS, SCORES, SMALLEST, Tile, plan, plan_rows


@pytest.mark.parametrize(
    ("rows", "columns", "offset", "expected"),
    [
        ((0, 4), (0, 1), 0, True),
        ((0, 4), (0, 2), 0, "some"),
        ((3, 6), (0, 4), 0, True),
        ((3, 6), (0, 5), 0, "some"),
        ((3, 6), (5, 9), 0, "some"),
        ((3, 6), (6, 9), 0, False),
        ((3, 6), (6, 9), 1, "some"),
        ((3, 6), (0, 6), 2, True),
        ((3, 6), (0, 4), -1, "some"),
        ((3, 6), (5, 9), -1, False),
    ],
)
def test_causal_on_a_tile(rows: Any, columns: Any, offset: int, expected: Any) -> None:
    """True and False exactly where all and none may attend; else the pairs."""
    pairs = pairs_of("test", "mask", (9, 9), [], None)
    found = causal(offset).bind(pairs).on(Tile(range(*rows), range(*columns), pairs))
    i, j = np.ogrid[slice(*rows), slice(*columns)]
    assert np.array_equal(np.broadcast_to(found, (i + j).shape), j <= i + offset)
    assert (found if isinstance(found, bool) else "some") == expected


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles whose scores are computed, in order."""
    seen: list[Tile] = []
    compute = Scores.on

    def on(self: Scores, tile: Tile, *rest: Any) -> Any:
        seen.append(tile)
        return compute(self, tile, *rest)

    monkeypatch.setattr(Scores, "on", on)
    return seen


@pytest.mark.usefixtures("small_tiles")
def test_tiles_that_no_pair_may_attend_are_skipped(visited: list[Tile]) -> None:
    """Tiles of 4 x 6 on 12 x 12: under a causal mask the upper right one is not computed in rows 0 to 3."""
    x = np.ones((12, 2), np.float32)
    scaled_dot_product_attention(x, x, x)
    assert len(visited) == 6
    visited.clear()
    scaled_dot_product_attention(x, x, x, is_causal=True)
    assert [(t.rows.start, t.columns.start) for t in visited] == [(0, 0), (4, 0), (4, 6), (8, 0), (8, 6)]


def test_nothing_is_computed_for_an_empty_result(visited: list[Tile]) -> None:
    key = np.zeros((0, 2, 10**6, 1), np.float32)
    scaled_dot_product_attention(np.zeros((0, 2, 3, 1), np.float32), key, key)
    assert visited == []


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 100_000])
def test_tile_shrinks_with_the_heads(heads: int) -> None:
    found = plan(10**6, 10**6, heads, traced=False)
    assert heads * found.rows * found.columns <= max(SCORES, heads * SMALLEST**2)
    assert SMALLEST <= found.rows <= ROWS
    assert SMALLEST <= found.columns <= COLUMNS


def test_tile_shrinks_no_more_than_it_has_to() -> None:
    found = plan(10**6, 10**6, 1, traced=False)
    assert (found.rows, found.columns) == (ROWS, COLUMNS)
    assert plan(10**6, 10**6, 100_000, traced=False).columns == SMALLEST


def test_weights_take_as_many_rows_as_their_keys_leave_room_for(visited: list[Tile]) -> None:
    assert plan_rows(10**6, 2**14, 16, traced=False).rows == SCORES // 2**18
    assert plan_rows(8, 10**9, 16, traced=False).rows == 1
    x = np.ones((8, 4096, 1), np.float32)
    attention_weights(x, x)
    assert {len(tile.rows) for tile in visited} == {SCORES // (8 * 4096)}


def test_traced_arrays_get_one_tile() -> None:
    found = plan(5000, 7000, 8, traced=True)
    assert [*found.row_ranges()] == [range(5000)]
    assert [*found.column_ranges(range(7000))] == [range(7000)]
