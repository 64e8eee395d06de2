"""The lengths that `verify` runs a model at follow from its call, and its rows from both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import internals
import numpy as np
import onnx
import pytest
from internals import HUGE, LARGE, ExportCall, blocks_of, checked_call, constants, sampled_rows, trial_settings
from short_runs import short_settings

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export.spec import evaluated

PAST = TensorSpec("float32", ("B", 2, "P", 8))
TABLE = TensorSpec("float32", (32, 2))


def call_of(*, keys: str = "L", heads: int = 2, **rules: Any) -> ExportCall:
    query = TensorSpec("float32", ("B", heads, "L", 8))
    key = TensorSpec("float32", ("B", heads, keys, 8))
    return checked_call("test", query, key, key, **rules)


def lengths_of(call: ExportCall, blocks: Sequence[int] = (), **options: Any) -> list[tuple[int, int, int]]:
    """B, L and S of each setting."""
    return [
        tuple(evaluated(n, setting.lengths) for n in (call.sizes.batch[0], call.sizes.queries, call.sizes.keys))
        for setting in trial_settings(call, blocks, **options)
    ]


@pytest.mark.parametrize(
    ("rules", "numbers"),
    [
        ({"attn_mask": masks.sliding_window(40, 0)}, [40]),
        ({"attn_mask": masks.sliding_window(None, 40)}, [40]),
        ({"attn_mask": masks.causal(-30)}, [30]),
        ({"attn_mask": ~masks.chunked(30) | masks.prefix(5)}, [5, 30]),
        ({"attn_mask": masks.padding(np.asarray([3, 9, 3]))}, [3, 9]),
        ({"bias": biases.relative(TABLE, max_distance=60)}, [60]),
        ({"bias": biases.alibi(2)}, []),
        ({"is_causal": True}, []),
    ],
)
def test_numbers_of_a_call(rules: dict[str, Any], numbers: list[int]) -> None:
    assert constants(call_of(**rules)) == numbers


@pytest.mark.parametrize("keys", ["L", "S"])
def test_lengths_lie_on_both_sides_of_each_number(keys: str) -> None:
    call = call_of(keys=keys, attn_mask=masks.sliding_window(40, 300) & masks.chunked(77))
    queries = {queries for _, queries, _ in lengths_of(call)}
    for number in (40, 77, 300):
        assert {number, number + 2} <= queries
    assert max(queries) > 2 * 300


def test_lengths_lie_on_both_sides_of_a_block() -> None:
    assert {128, 129} <= {queries for _, queries, _ in lengths_of(call_of(), blocks=[128])}
    assert max(queries for _, queries, _ in lengths_of(call_of(), blocks=[128])) > 3 * 128


def test_every_call_is_tried_with_a_batch_of_7_and_with_thousands() -> None:
    for call in (call_of(), call_of(keys="S"), call_of(past_key=PAST, past_value=PAST)):
        lengths = lengths_of(call)
        assert any(batch == 7 for batch, _, _ in lengths)
        assert any(queries > 2000 and keys > 2000 for _, queries, keys in lengths)
    apart = lengths_of(call_of(keys="S"))
    assert any(queries < 5 and keys > 2000 for _, queries, keys in apart)
    assert any(queries > 2000 and keys < 5 for _, queries, keys in apart)


def test_a_past_is_empty_and_long() -> None:
    call = call_of(past_key=PAST, past_value=PAST)
    pasts = {setting.lengths["P"] for setting in trial_settings(call)}
    assert 0 in pasts
    assert max(pasts) > 2000


def test_many_heads_leave_room_for_shorter_lengths() -> None:
    lengths = lengths_of(call_of(heads=64))
    assert 500 < max(queries for _, queries, _ in lengths) < 1000


def test_scores_have_three_sizes() -> None:
    settings = trial_settings(call_of())
    assert {setting.size for setting in settings} == {1.0, LARGE, HUGE["float32"]}
    assert {setting.size for setting in short_settings(call_of())} == {1.0, LARGE}


def test_integers_are_drawn_and_at_their_ends() -> None:
    padded = call_of(attn_mask=masks.padding(TensorSpec("int64", ("B",))))
    masked = call_of(attn_mask=TensorSpec("bool", ("L", "L")))
    ends = {"least integers", "most integers"}
    assert {setting.operands for setting in trial_settings(padded)} == {"drawn", *ends}
    tried = {setting.operands for setting in trial_settings(masked)}
    assert tried == {"drawn", "mask of False", "mask of True"}
    assert {setting.operands for setting in trial_settings(call_of())} == {"drawn"}


@pytest.mark.parametrize("keys", ["L", "S"])
def test_small_numbers_multiples_and_batches(keys: str) -> None:
    lengths = lengths_of(call_of(keys=keys))
    for number in range(1, 10):
        assert any(batch == number for batch, _, _ in lengths)
        assert any(queries == number for _, queries, _ in lengths)
        assert any(count == number for _, _, count in lengths)
    for number in (64, 1024):
        assert any(queries == count == number for _, queries, count in lengths)
    assert any(batch > 2 and queries > 128 for batch, queries, _ in lengths)
    assert any(batch > 2 and queries > 512 for batch, queries, _ in lengths)
    large = [setting.lengths for setting in trial_settings(call_of(keys=keys)) if setting.size == LARGE]
    assert any(setting["B"] > 2 and setting["L"] > 512 for setting in large)


def test_one_query_beside_few_and_many_keys() -> None:
    cached = call_of(past_key=PAST, past_value=PAST)
    pasts = {setting.lengths["P"] for setting in trial_settings(cached) if setting.lengths["L"] == 1}
    assert set(range(1, 10)) <= pasts
    assert max(pasts) > 2000
    assert any(queries == 1 and keys > 2000 for _, queries, keys in lengths_of(call_of(keys="S")))


def test_each_input_has_a_nan_once() -> None:
    settings = [setting for setting in trial_settings(call_of()) if setting.nan_in]
    assert {setting.nan_in for setting in settings} == {"query", "key", "value"}
    assert {setting.lengths["L"] for setting in settings} == {19, 130}


def test_no_setting_is_tried_twice() -> None:
    for thorough in (False, True):
        shown = [setting.shown for setting in trial_settings(call_of(keys="S"), [128], thorough=thorough)]
        assert len(set(shown)) == len(shown)


def test_fixed_lengths_are_drawn_several_times() -> None:
    fixed = TensorSpec("float32", (1, 2, 6, 8))
    call = checked_call("test", fixed, fixed, fixed, attn_mask=masks.sliding_window(3, 0))
    shown = [setting.shown for setting in trial_settings(call)]
    assert shown.count("fixed") == shown.count("fixed, large scores") == 3


def test_thorough_has_all_small_lengths_and_longer_ones() -> None:
    lengths = lengths_of(call_of(), thorough=True)
    assert set(range(1, 18)) <= {queries for _, queries, _ in lengths}
    assert max(queries for _, queries, _ in lengths) > 4000


class TestRows:
    """Which rows of a run are compared."""

    def rows(self, queries: int, borders: Sequence[int] = (), heads: int = 2) -> list[int]:
        lengths = {"B": 1, "L": queries}
        rows: Any = sampled_rows(call_of(heads=heads), lengths, borders, np.random.default_rng(0)).tolist()
        return rows

    def test_all_of_a_short_run(self) -> None:
        assert self.rows(100) == list(range(100))

    def test_ends_and_borders_of_a_long_one(self) -> None:
        rows = self.rows(2000, [300])
        assert {0, 1, 1998, 1999, 299, 300, 301, 1699, 1700, 1701} <= set(rows)
        assert len(rows) == 256
        assert rows == sorted(set(rows))

    def test_some_at_random(self) -> None:
        between = [row for row in self.rows(2000, [300]) if 400 < row < 1600]
        assert 80 < len(between) < 220

    def test_a_few_of_many_heads(self) -> None:
        assert len(self.rows(2000, [3, 5, 7, 9], heads=200)) == 6


def test_blocks_are_read_from_the_file() -> None:
    """Also where the heads of a block are cut; the numbers of another program need not be those of this one."""
    x = TensorSpec("float32", ("B", 8, "L", 32))
    model = export_attention(x, x, x, is_causal=True, form="tiled")
    assert blocks_of(model) == ([128], 2**17)
    assert blocks_of(export_attention(x, x, x, is_causal=True, form="primitive")) == ([], 0)
    for part in internals.exporter_model.messages(model.graph):
        if isinstance(part, onnx.TensorProto) and part.raw_data == np.int64(128).tobytes():
            part.raw_data = np.int64(96).tobytes() + b"cut"
    assert blocks_of(model) == ([96], 2**17)
