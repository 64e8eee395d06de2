"""What a mask says of a tile, and by that which tiles are computed: with NumPy, by counting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import ONE_CORE, FirstPosition, ScoreGrid, Scores, Tile, grid_of
from places import ancestors, drawn_neighbourhoods, neighbours

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp.masks import Band

BATCH, HEADS, QUERIES, KEYS = SHAPE = (2, 2, 5, 6)
B, H, R, J = np.ogrid[:BATCH, :HEADS, :QUERIES, :KEYS]
POSITIONS = (0, 3)
IDS, KEY_IDS = [4, 4, 5, 5, 8], [4, 4, 5, 5, 8, 8]
MIXED = np.asarray([[0, 1, 1, 0, 2, 1], [1, 1, 0, 0, 0, 2]])
DRAWN = np.random.default_rng(7).random(SHAPE) < 0.5

Formula: TypeAlias = Callable[[int], np.ndarray]
"""Where the first query stands -> which pairs may attend; queries stand at R + position."""
Rule: TypeAlias = tuple[masks.Mask, Formula]


def per_entry(values: Any) -> np.ndarray:
    return np.reshape(values, (-1, 1, 1, 1))


def causal(offset: Any) -> Rule:
    return masks.causal(offset), lambda p: R + p + per_entry(offset) >= J


def lower_right() -> Rule:
    return masks.causal("lower_right"), lambda _: J <= R + KEYS - QUERIES


def window(left: int | None, right: int | None, offset: Any = 0) -> Rule:
    low, high = (10**12 if width is None else width for width in (left, right))

    def formula(p: int) -> np.ndarray:
        i = R + p + per_entry(offset)
        return (i - low <= J) & (i + high >= J)

    return masks.sliding_window(left, right, offset=offset), formula


def padding(key_lengths: Any, query_lengths: Any = None) -> Rule:
    """Query lengths count rows, wherever the first stands."""
    rows = QUERIES if query_lengths is None else query_lengths
    return masks.padding(
        key_lengths, query_lengths
    ), lambda _: (per_entry(key_lengths) > J) & (per_entry(rows) > R)


def prefix(length: Any) -> Rule:
    return masks.prefix(length), lambda _: per_entry(length) > J


def chunked(size: int) -> Rule:
    return masks.chunked(size), lambda p: (R + p) // size == J // size


def dilated(step: int) -> Rule:
    return masks.dilated(step), lambda p: (R + p - J) % step == 0


def document(queries: Any, keys: Any) -> Rule:
    i, j = np.asarray(queries)[..., None, :, None], np.asarray(keys)[..., None, None, :]
    return masks.document(queries, keys), lambda _: i == j


def given_array(axes: tuple[int, ...]) -> Rule:
    array = DRAWN[tuple(slice(None) if axis in axes else slice(1) for axis in range(4))]
    return masks.from_array(array), lambda _: array


def function(share: int) -> Rule:
    return (
        masks.from_function(lambda b, h, i, j: (3 * b + 2 * h + i + j) % share > 0),
        lambda p: (3 * B + 2 * H + R + p + J) % share > 0,
    )


def places(number: int, arguments: dict[str, Any]) -> Rule:
    prefix_tokens = number % 3
    allowed = neighbours(**arguments, prefix_tokens=prefix_tokens)
    mask = masks.neighbourhood(**arguments, prefix_tokens=prefix_tokens)
    return mask, lambda p: allowed[p : p + QUERIES, :KEYS]


def blocks(*tables: int) -> Rule:
    table = np.random.default_rng(sum(tables)).random((*tables, 4, 3)) < 0.4
    return masks.blocks(table, 2), lambda p: table.repeat(2, axis=-2)[..., p : p + QUERIES, :].repeat(
        2, axis=-1
    )


def tree(offset: int, *parents: list[int]) -> Rule:
    def formula(p: int) -> np.ndarray:
        return np.stack([ancestors(x, offset + p, 20)[:, :KEYS] for x in parents])[:, None]

    return masks.tree(parents, offset=offset), formula


KNOWING: list[Rule] = [
    *(causal(offset) for offset in (0, 2, -3, 9, -20, [1, -2])),
    lower_right(),
    *(window(*widths) for widths in itertools.product((None, 0, 2), (None, 0, 1), (0, -2, 4))),
    *(padding(lengths) for lengths in (0, 3, KEYS, [2, 5])),
    *(padding(KEYS, lengths) for lengths in (0, 4, [1, 3])),
    padding(4, 2),
    *(prefix(length) for length in (0, 4, 99, [3, 99])),
    *(chunked(size) for size in (1, 2, 3, 50)),
    dilated(1),
    document(IDS, KEY_IDS),
    given_array((2, 3)),
    given_array((0, 3)),
    function(2),
]
OTHERS: list[Rule] = [
    window(1, 1, [3, -1]),
    padding([0, 5], [4, 0]),
    dilated(2),
    dilated(3),
    document(MIXED[:, :QUERIES], MIXED),
    document(MIXED[0, :QUERIES], MIXED),
    given_array((0, 1, 2, 3)),
    function(3),
]
TABLES: list[Rule] = [
    *(blocks(*tables) for tables in ((2,), (2, 1), (2, 2))),
    *(tree(offset, [-1, 0, 1, 1, -1], [-1, -1, 1, 0, 3]) for offset in (0, 1)),
    tree(1, [-1, 0, 1, 1, -1]),
]
SPACES = [case for case in drawn_neighbourhoods(30) if math.prod(case["shape"]) >= QUERIES + max(POSITIONS)]

RANGES = [[range(a, b) for a, b in itertools.combinations(range(n + 1), 2)] for n in (QUERIES, KEYS)]


def grid_at(position: int) -> ScoreGrid:
    return replace(grid_of("test", "mask", SHAPE, {}, None), position=FirstPosition(*[position] * 3))


def is_one_band(band: Band) -> bool:
    """Whether it is the same for each batch entry."""
    return all(edge is None or isinstance(edge.values, int) for edge in (band.low, band.high))


def check(
    rule: Rule, position: int, *, knows: bool = False, leading: tuple[range, range] | None = None
) -> None:
    """What is said of each tile is right, and what it leaves out attends nothing and is not attended."""
    mask, formula = rule
    grid = grid_at(position)
    pattern = mask.bind(grid)
    allowed = np.array(np.broadcast_to(formula(position), SHAPE))
    if leading is not None:
        allowed = allowed[np.ix_(*leading)]
    for rows, columns in itertools.product(*RANGES):
        tile = Tile(rows, columns, grid, leading)
        part = allowed[..., rows.start : rows.stop, columns.start : columns.stop]
        known = pattern.uniform(tile)
        assert known is None or (part == known).all(), (mask, position, rows, columns)
        allowed_here = pattern.allowed_in(tile)
        if isinstance(allowed_here, bool):
            assert (part == allowed_here).all(), (mask, position, rows, columns)
        else:
            np.testing.assert_array_equal(np.broadcast_to(allowed_here, part.shape), part)
            assert not (knows and part.all() == part.any()), (mask, position, rows, columns)
        reach = pattern.key_range(tile)
        assert not reach or (columns.start <= reach.start and reach.stop <= columns.stop)
        attended = {columns[index] for index in np.nonzero(part)[-1]}
        assert attended <= set(reach), (mask, position, rows, columns, reach)
        reached = pattern.query_range(tile)
        assert not reached or (rows.start <= reached.start and reached.stop <= rows.stop)
        attending = {rows[index] for index in np.nonzero(part)[-2]}
        assert attending <= set(reached), (mask, position, rows, columns, reached)
        if isinstance(pattern, Band) and reached and attending and is_one_band(pattern):
            assert {reached[0], reached[-1]} <= attending, (mask, position, rows, columns, reached)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("rule", KNOWING, ids=lambda rule: repr(rule[0]))
def test_knows_all_and_none(rule: Rule, position: int) -> None:
    """True and False wherever all and none may attend, since only then is work saved."""
    check(rule, position, knows=True)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("rule", OTHERS, ids=lambda rule: repr(rule[0]))
def test_right_on_every_tile(rule: Rule, position: int) -> None:
    check(rule, position)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("rule", TABLES, ids=lambda rule: repr(rule[0]))
def test_tables_are_right_for_each_entry_and_head(rule: Rule, position: int) -> None:
    for leading in (None, *itertools.product([range(1, 2), range(2)], repeat=2)):
        check(rule, position, knows=rule[0].name == "blocks", leading=leading)


@pytest.mark.parametrize("position", POSITIONS)
def test_neighbours_are_right_on_every_tile(position: int) -> None:
    assert len(SPACES) > 10
    for number, arguments in enumerate(SPACES):
        check(places(number, arguments), position)


def combined(rules: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
    return st.one_of(
        st.builds(lambda a, b: (a[0] & b[0], lambda p: a[1](p) & b[1](p)), rules, rules),
        st.builds(lambda a, b: (a[0] | b[0], lambda p: a[1](p) | b[1](p)), rules, rules),
        st.builds(lambda a: (~a[0], lambda p: ~a[1](p)), rules),
    )


@settings(max_examples=25)
@given(
    st.recursive(st.sampled_from(KNOWING + OTHERS + TABLES), combined, max_leaves=5), st.sampled_from(POSITIONS)
)
def test_combinations_are_right_on_every_tile(rule: Rule, position: int) -> None:
    check(rule, position)


def test_far_offset_and_wide_window() -> None:
    """The largest of both that are taken, without overflow."""
    far = 2**29
    rule = window(None, far, [-far, far])
    np.testing.assert_array_equal(masks.to_array(rule[0], SHAPE), np.broadcast_to(rule[1](0), SHAPE))


class Computed(list[tuple[Tile, Any]]):
    """The tiles whose scores were computed, each with the pairs that were allowed."""

    @property
    def pairs(self) -> int:
        return sum(len(tile.rows) * len(tile.columns) for tile, _ in self)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    """The scores themselves are zeros."""
    tiles = Computed()

    def record(
        self: Scores, rows: range, plan: Any, _query: np.ndarray, *, leaves_mask: bool = False, **_: Any
    ) -> Any:
        for tile, allowed in self.tiles(rows, plan, trims=leaves_mask):
            tiles.append((tile, allowed))
            zeros = np.zeros(tile.shape, np.float32)
            yield tile, zeros, allowed, zeros

    monkeypatch.setattr(Scores, "computed_tiles", record)
    return tiles


def attend(length: int, mask: masks.Mask) -> None:
    x = np.zeros((length, 1), np.float32)
    scaled_dot_product_attention(x, x, x, mask)


def test_window_is_linear_in_the_length(computed: Computed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 257 keys: twice the length is twice the tiles, asked and computed, not four times."""
    asked_tiles: list[Tile] = []
    answer = Band.query_range  # the first question about a tile
    monkeypatch.setattr(Band, "query_range", lambda self, tile: asked_tiles.append(tile) or answer(self, tile))
    counts = {}
    for length in (2**14, 2**15, 2**16):
        attend(length, masks.sliding_window(256, 0))
        counts[length] = len(asked_tiles), len(computed)
        ranges = length / ONE_CORE.rows
        assert (
            ranges
            <= len(computed)
            <= len(asked_tiles)
            <= ranges * (1 + (ONE_CORE.rows + 256) / ONE_CORE.columns)
        )
        assert computed.pairs <= length * (ONE_CORE.rows + 256)
        asked_tiles.clear()
        computed.clear()
    for length in (2**14, 2**15):
        for count_of_twice, count in zip(counts[2 * length], counts[length], strict=True):
            assert count_of_twice == pytest.approx(2 * count, abs=2)  # the first rows have fewer keys


def test_window_beside_other_masks_is_linear(computed: Computed) -> None:
    """Any mask that is met with a window looks no farther than the window."""
    for mask in (masks.causal(), masks.dilated(2), ~masks.prefix(9), masks.causal() | masks.chunked(64)):
        for both in (mask & masks.sliding_window(256, 0), masks.sliding_window(256, 0) & mask):
            attend(2**14, both)
            assert computed.pairs <= 2**14 * (ONE_CORE.rows + 256)
            computed.clear()
    attend(2**14, masks.prefix(0) | masks.sliding_window(256, 0))
    assert computed.pairs <= 2**14 * (ONE_CORE.rows + 256)


def test_chunks_are_linear_in_the_length(computed: Computed) -> None:
    for length in (2**13, 2**14):
        attend(length, masks.chunked(512))
        assert computed.pairs == length * 512
        computed.clear()


def test_padding_does_not_look_behind_the_longest(computed: Computed) -> None:
    x = np.zeros((3, 1, 5, 1), np.float32)
    keys = np.zeros((3, 1, 4096, 1), np.float32)
    scaled_dot_product_attention(x, keys, keys, masks.padding([7, 1500, 40]))
    assert max(tile.columns.stop for tile, _ in computed) == 1500
    computed.clear()
    scaled_dot_product_attention(x, keys, keys, masks.padding(9, [0, 0, 0]))
    assert not computed
    rows_of_padding = Tile(range(2, QUERIES), range(KEYS), grid_at(0))
    assert not masks.padding(4, 2).bind(grid_at(0)).key_range(rows_of_padding)


@pytest.mark.parametrize("small_tiles", ["maximum"], indirect=True)  # the other one cuts them down
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.causal(-5),
        masks.sliding_window(3, 1),
        masks.padding(11),
        masks.padding(24, 7),
        masks.prefix(10),
        masks.chunked(5),
        masks.document([0] * 9 + [1] * 3 + [2] * 12),
        masks.causal() & masks.document([0] * 9 + [1] * 3 + [2] * 12),
        masks.causal() | masks.prefix(10),
        ~masks.causal(),
        masks.from_array(np.eye(24, dtype=bool)),
        masks.from_function(lambda _b, _h, i, j: (i > 20) & (j < 6)),
    ],
    ids=repr,
)
def test_computes_the_tiles_that_some_pair_attends(computed: Computed, mask: masks.Mask) -> None:
    """Those alone, each key once; where every pair may attend nothing is masked."""
    attend(24, mask)
    left = masks.to_array(mask, (24, 24))
    for tile, allowed in computed:
        pairs = (slice(tile.rows.start, tile.rows.stop), slice(tile.columns.start, tile.columns.stop))
        part = left[pairs]
        assert part.any()
        assert (allowed is True) == part.all()
        left[pairs] = False
    assert not left.any()


def test_without_a_mask_nothing_is_masked(computed: Computed) -> None:
    attend(2 * ONE_CORE.rows, masks.sliding_window(None, None))
    assert len(computed) == 2 * (2 * ONE_CORE.rows / ONE_CORE.columns)
    assert all(allowed is True for _, allowed in computed)
