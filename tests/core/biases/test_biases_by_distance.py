"""Biases that depend on the distance alone: one number for each diagonal, near and far, with the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import NumPy, Tile, first_distances, grid_of

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp.biases.buckets import RelativeTerm
from sdpa_xp.biases.slopes import AlibiTerm

SHAPES = (2, 4, 21, 8), (2, 2, 33, 8), (2, 2, 33, 8)
RNG = np.random.default_rng(2)
TABLE = RNG.standard_normal((8, 4)).astype(np.float32)
MASKED = np.where(np.arange(8)[:, None] == 3, -math.inf, TABLE).astype(np.float32)
BIASES = {
    "alibi": biases.alibi(4),
    "slopes": biases.alibi(RNG.random((2, 4), np.float32)),
    "shifted": biases.alibi(4, offset=5),
    "shifts": biases.alibi(4, offset=[0, 12]),
    "lower right": biases.alibi(4, offset="lower_right"),
    "relative": biases.relative(TABLE, max_distance=16),
    "behind": biases.relative(TABLE, bidirectional=False, max_distance=40, offset=-7),
    "beyond": biases.relative(TABLE, max_distance=5, offset="lower_right"),
    "masked": biases.relative(MASKED, max_distance=16),
    "sum": biases.alibi(4) + biases.relative(TABLE),
}


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(3, 9)], ids=str)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_views_of_the_diagonals_have_the_bits_of_each_pair(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, bias: Any, mask: Any
) -> None:
    arrays = draw(rng, *SHAPES)
    with_views = scaled_dot_product_attention(*arrays, mask, bias=bias)
    monkeypatch.setattr(NumPy, "diagonals", None)
    np.testing.assert_array_equal(with_views, scaled_dot_product_attention(*arrays, mask, bias=bias))


@pytest.mark.usefixtures("small_tiles")
def test_a_masked_pair_keeps_a_special_value_out(rng: np.random.Generator) -> None:
    query, key, value = draw(rng, *SHAPES)
    value[:, :, 4, :] = math.nan
    is_masked = biases.to_array(BIASES["masked"], (4, 21, 33))[0, :, 4] == -math.inf
    assert 0 < is_masked.sum() < 21
    output = scaled_dot_product_attention(query, key, value, bias=BIASES["masked"])
    np.testing.assert_array_equal(np.isfinite(output).all(axis=(0, 1, 3)), is_masked)


@pytest.mark.usefixtures("small_tiles")
def test_a_slope_that_overflows_masks_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in tiles that compute it: NaN of a pair that is far away still shows."""
    query, key, value = draw(rng, *SHAPES)
    value[:, :, 0, :] = math.nan
    bias = biases.alibi(np.full(4, 1e38, np.float32), offset=30)
    output = scaled_dot_product_attention(query, key, value, bias=bias)
    monkeypatch.setattr(NumPy, "diagonals", None)
    np.testing.assert_array_equal(output, scaled_dot_product_attention(query, key, value, bias=bias))
    assert np.isnan(output).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("term", "bias"),
    [(AlibiTerm, BIASES["alibi"]), (RelativeTerm, BIASES["relative"])],
    ids=["alibi", "relative"],
)
def test_the_numbers_are_computed_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, term: Any, bias: Any
) -> None:
    counts: list[int] = []
    compute = term.at_distances

    def watched(self: Any, grid: Any, distances: np.ndarray) -> Any:
        counts.append(distances.size)
        return compute(self, grid, distances)

    monkeypatch.setattr(term, "at_distances", watched)
    monkeypatch.setattr(term, "added", None)
    scaled_dot_product_attention(*draw(rng, *SHAPES), bias=bias)
    assert counts == [21 + 33 - 1]


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
    begins = first_distances(count, max_distance, max_distance, bidirectional=bidirectional)
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


@pytest.mark.parametrize(("queries", "keys"), [(0, 96), (96, 0)])
def test_a_tile_of_far_pairs_takes_one_number_for_each_head(queries: int, keys: int) -> None:
    """The table is not read for each pair of it."""
    grid = grid_of("to_array", "bias", (4, 100, 100), (), TABLE)
    (term,) = biases.relative(TABLE, max_distance=16).bind(grid)
    tile = Tile(range(queries, queries + 4), range(keys, keys + 4), grid)
    assert term.added(tile).shape[-3:] == (4, 1, 1)  # type: ignore[attr-defined]
