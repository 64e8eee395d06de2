"""Relative positions whose buckets reach far: exactly the formula's, and no table longer than the call."""

from __future__ import annotations

import math

import numpy as np
import pytest
from internals import grid_of

from sdpa_xp import biases

WIDE = [(32, 128), (32, 10**7), (16, 2**29), (8, 20), (4, 5), (1000, 600), (1000, 10**7), (6, 9)]
"""Buckets, and where the last begins."""


def formula(distance: int, bidirectional: bool, count: int, max_distance: int) -> int:
    """The bucket of one distance j - i by the paper's formula in float64, for those beyond float32, too."""
    if not bidirectional:
        first, away = 0, max(-distance, 0)
    else:
        count //= 2
        first, away = count * (distance > 0), abs(distance)
    exact = count // 2
    if away < exact:
        return first + away
    share = math.log(away / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (count - exact) + 1e-9), count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "max_distance"), WIDE)
def test_buckets_near_their_borders(count: int, max_distance: int, bidirectional: bool) -> None:
    """Two distances on each side of where a bucket begins, which an offset brings into a call of one query."""
    one_sided = count // 2 if bidirectional else count
    table = np.arange(float(count))[:, None]
    begins = biases.relative(table, bidirectional=bidirectional, max_distance=max_distance).first_distances
    assert len(begins) == one_sided - 1
    for begin in {*begins[:: max(1, one_sided // 16)], begins[-1], max_distance}:
        for sign in (1, -1):
            offset = max(2 - 2**29, min(-sign * begin, 2**29))
            bias = biases.relative(
                table, bidirectional=bidirectional, max_distance=max_distance, offset=offset - 2
            )
            array = biases.to_array(bias, (1, 1, 5))[0, 0]
            expected = [formula(j + 2 - offset, bidirectional, count, max_distance) for j in range(5)]
            np.testing.assert_array_equal(array, expected)


def test_far_distances_cost_what_near_ones_do() -> None:
    """The table of a call has a column for each distance of its pairs, however far these are."""
    table = np.ones((32, 1), np.float32)
    bias = biases.relative(table, max_distance=2**29, offset=-(2**28))
    grid = grid_of("to_array", "bias", (1, 3, 4), (), table)
    (term,) = bias.bind(grid)
    assert term.table.shape == (1, 3 + 4 - 1)  # type: ignore[attr-defined]
