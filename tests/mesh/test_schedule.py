"""Which way keys travel: each block that has a pair is computed once, and devices have equally much to do."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from internals import Schedule, plan_ring


def computed(schedule: Schedule) -> Counter[tuple[int, int]]:
    """The pieces that meet while keys travel, from the walks alone."""
    met: Counter[tuple[int, int]] = Counter()
    for walk in schedule.walks:
        assert walk.steps == tuple(range(walk.steps[0], walk.steps[-1] + walk.direction, walk.direction))
        for step, device in itertools.product(walk.steps, range(schedule.devices)):
            owner = (device - step) % schedule.devices
            for i, j in itertools.product(schedule.pieces[device], schedule.pieces[owner]):
                met[i, j] += schedule.meets[i][j]
    return +met


@given(st.data())
def test_each_block_is_computed_once(data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 7))
    queries, keys = (data.draw(st.integers(1, 3)) * devices for _ in range(2))
    pairs = data.draw(st.sets(st.tuples(st.integers(0, queries - 1), st.integers(0, keys - 1))))
    schedule = plan_ring(
        devices, queries, keys, lambda rows, columns: any(i in rows and j in columns for i, j in pairs)
    )
    assert sorted(itertools.chain(*schedule.pieces)) == [*range(devices * schedule.pieces_each)]
    assert computed(schedule) == Counter({(i // schedule.queries, j // schedule.keys) for i, j in pairs})
    assert schedule.hops < devices or devices == 1


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_causal_work_is_the_same_on_all_devices_in_every_step(devices: int) -> None:
    schedule = plan_ring(
        devices, 4 * devices, 8 * devices, lambda rows, columns: columns.start <= 2 * rows[-1] + 1
    )
    assert schedule.is_zigzag
    assert [set(schedule.blocks_at(step)) for step in range(devices)] == [{3}] + [{2}] * (devices - 1)
    assert schedule.walks == ((1, tuple(range(devices))),)


def test_a_window_travels_as_far_as_it_reaches() -> None:
    """One part to the left, half of a part to the right; nothing is exchanged."""

    def near(rows: range, columns: range) -> bool:
        return rows[0] - 8 <= columns[-1] and columns[0] <= rows[-1] + 4

    schedule = plan_ring(8, 64, 64, near)
    assert not schedule.is_zigzag
    assert [(walk.direction, walk.steps) for walk in schedule.walks] == [(1, (0, 1)), (-1, (-1,))]
    assert schedule.hops == 2


def test_all_pairs_need_no_halves() -> None:
    schedule = plan_ring(4, 16, 16, lambda rows, columns: True)
    assert schedule.is_full
    assert (schedule.pieces_each, schedule.hops) == (1, 3)
