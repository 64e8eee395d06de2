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
    override,
    plan_full_rows,
    plan_tiles,
)

from sdpa_xp import attention_weights, scaled_dot_product_attention


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


def test_nothing_is_computed_for_an_empty_result(visited: list[Tile]) -> None:
    key = np.zeros((0, 2, 10**6, 1), np.float32)
    scaled_dot_product_attention(np.zeros((0, 2, 3, 1), np.float32), key, key)
    assert visited == []


OUR_THREADS = Access(is_writeable=True, uses_our_threads=True)
ITS_THREADS = Access(is_writeable=True)


def call_of(access: Access, queries: int, keys: int, *leading: int) -> Any:
    return replace(grid_of("test", "mask", (*leading, queries, keys), [], None), access=access)


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
        (of_task,), (rows,) = task.slices, task.ranges
        ranges = of_task or tuple(map(range, leading))
        times[tuple(slice(r.start, r.stop) for r in (*ranges, rows))] += 1
        assert ranges[-1].start % group == len(ranges[-1]) % group == 0
        heads = math.prod(len(heads_range) for heads_range in ranges)
        assert heads * len(rows) * min(plan.columns, keys) <= most
    assert np.all(times == 1)


def test_threads_get_a_task_each() -> None:
    """Also where there is one head, or one query a head."""
    cores = os.cpu_count() or 1
    for shape in ((512, 10**5, 1), (1, 10**5, 8 * cores), (256, 256, 8 * cores)):
        assert len(plan_tiles(call_of(OUR_THREADS, *shape), 1, 128).tasks()) >= cores


def test_weights_take_as_many_rows_as_their_keys_leave_room_for(
    visited: list[Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_full_rows(call_of(OUR_THREADS, 10**6, 2**14, 16)).rows == DEVICE.scores // 2**18
    assert plan_full_rows(call_of(OUR_THREADS, 8, 2**29, 16)).rows == 1
    override(monkeypatch, "DEVICE", DEVICE._replace(scores=2**16))
    x = np.ones((8, 256, 1), np.float32)
    attention_weights(x, x)
    assert {len(tile.rows) for tile in visited} == {2**16 // (8 * 256)}


def test_traced_arrays_get_one_tile() -> None:
    plan = plan_tiles(call_of(TRACED, 5000, 7000, 8), 1, 128)
    assert [*plan.row_ranges()] == [range(5000)]
    assert [*plan.column_ranges(range(7000))] == [range(7000)]
