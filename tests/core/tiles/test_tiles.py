"""How a call is cut: which tiles there are, which are looked at, and how large they get."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from internals import (
    ALL_CORES,
    DEVICE,
    ONE_CORE,
    READ_ONLY,
    SMALLEST_SIDE,
    TRACED,
    Access,
    Scores,
    Tile,
    grid_of,
    plan_full_rows,
    plan_tiles,
)

from sdpa_xp import attention_weights, scaled_dot_product_attention
from sdpa_xp.masks import causal


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
    """True and False exactly where all and none may attend; else the grid."""
    grid = grid_of("test", "mask", (9, 9), [], None)
    allowed = causal(offset).bind(grid).allowed_in(Tile(range(*rows), range(*columns), grid))
    i, j = np.ogrid[slice(*rows), slice(*columns)]
    assert np.array_equal(np.broadcast_to(allowed, (i + j).shape), j <= i + offset)
    assert (allowed if isinstance(allowed, bool) else "some") == expected


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles whose scores are computed, in order."""
    tiles: list[Tile] = []
    compute = Scores.computed_tiles

    def record(*arguments: Any, **keywords: Any) -> Any:
        for computed in compute(*arguments, **keywords):
            tiles.append(computed[0])
            yield computed

    monkeypatch.setattr(Scores, "computed_tiles", record)
    return tiles


@pytest.mark.usefixtures("small_tiles")
def test_tiles_that_no_pair_may_attend_are_skipped(visited: list[Tile]) -> None:
    """Tiles of 4 x 6 on 12 x 12: under a causal mask the upper right one is not computed in rows 0 to 3.

    Without a maximum, the queries that attend no key of a tile are left out of it as well.
    """
    x = np.ones((12, 2), np.float32)
    scaled_dot_product_attention(x, x, x)
    assert len(visited) == 6
    visited.clear()
    scaled_dot_product_attention(x, x, x, is_causal=True)
    assert sorted((t.rows.stop, t.columns.start) for t in visited) == [(4, 0), (8, 0), (8, 6), (12, 0), (12, 6)]


def test_nothing_is_computed_for_an_empty_result(visited: list[Tile]) -> None:
    key = np.zeros((0, 2, 10**6, 1), np.float32)
    scaled_dot_product_attention(np.zeros((0, 2, 3, 1), np.float32), key, key)
    assert visited == []


OUR_THREADS = Access(is_writeable=True, uses_our_threads=True)
ITS_THREADS = Access(is_writeable=True)


def call_of(access: Access, queries: int, keys: int, *leading: int) -> Any:
    grid = grid_of("test", "mask", (*leading, queries, keys), [], None)
    return replace(grid, access=access)


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 100_000])
def test_tile_of_a_device_shrinks_with_the_heads(heads: int) -> None:
    plan = plan_tiles(call_of(READ_ONLY, 10**6, 10**6, heads), 1, 128)
    assert heads * plan.rows * plan.columns <= max(DEVICE.scores, heads * SMALLEST_SIDE**2)
    assert SMALLEST_SIDE <= plan.rows <= DEVICE.rows
    assert SMALLEST_SIDE <= plan.columns <= DEVICE.columns
    assert not plan.leading_slices


def test_tile_of_a_device_shrinks_no_more_than_it_has_to() -> None:
    plan = plan_tiles(call_of(READ_ONLY, 10**6, 10**6, 1), 1, 128)
    assert (plan.rows, plan.columns) == DEVICE[:2]
    assert plan_tiles(call_of(READ_ONLY, 10**6, 10**6, 100_000), 1, 128).columns == SMALLEST_SIDE


SHAPES = [(4096, 4096, 8), (1, 4096, 8), (3, 5, 1), (256, 256, 2, 3, 8), (7, 100, 64, 16), (900, 70, 5, 1)]


@pytest.mark.parametrize("access", [OUR_THREADS, ITS_THREADS], ids=["ours", "its own"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("queries", "keys", "leading"), [(q, k, tuple(rest)) for q, k, *rest in SHAPES])
def test_tasks_cover_each_row_of_each_head_once(
    queries: int, keys: int, leading: tuple[int, ...], group: int, access: Access
) -> None:
    """And no tile has more scores than it may, or splits the query heads of a key head."""
    leading = (*leading[:-1], leading[-1] * group)
    plan = plan_tiles(call_of(access, queries, keys, *leading), group, 128)
    most = ONE_CORE.scores if access.uses_our_threads else ALL_CORES.scores * (os.cpu_count() or 1)
    times = np.zeros((*leading, queries), int)
    for task in plan.tasks():
        ranges = task.leading or tuple(map(range, leading))
        times[tuple(slice(r.start, r.stop) for r in (*ranges, task.rows))] += 1
        assert ranges[-1].start % group == len(ranges[-1]) % group == 0
        heads = math.prod(len(heads_range) for heads_range in ranges)
        assert heads * len(task.rows) * min(plan.columns, keys) <= most
    assert np.all(times == 1)


def test_threads_get_a_task_each() -> None:
    """Also where there is one head, or one query a head."""
    cores = os.cpu_count() or 1
    for shape in ((512, 10**5, 1), (1, 10**5, 8 * cores), (256, 256, 8 * cores)):
        assert len(plan_tiles(call_of(OUR_THREADS, *shape), 1, 128).tasks()) >= cores


@pytest.mark.slow
def test_weights_take_as_many_rows_as_their_keys_leave_room_for(visited: list[Tile]) -> None:
    assert plan_full_rows(10**6, 2**14, 16, is_traced=False).rows == DEVICE.scores // 2**18
    assert plan_full_rows(8, 10**9, 16, is_traced=False).rows == 1
    x = np.ones((8, 4096, 1), np.float32)
    attention_weights(x, x)
    assert {len(tile.rows) for tile in visited} == {DEVICE.scores // (8 * 4096)}


def test_traced_arrays_get_one_tile() -> None:
    plan = plan_tiles(call_of(TRACED, 5000, 7000, 8), 1, 128)
    assert [*plan.row_ranges()] == [range(5000)]
    assert [*plan.column_ranges(range(7000))] == [range(7000)]
