"""Which sequences of a ragged batch are padded to one length on a device: memory stays linear in the tokens."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
from internals import WORK_OF_LAUNCHES, Entries, HeadSizes, Work, group_entries

pytestmark = pytest.mark.sampled(0, on="THIN")
Lengths = list[tuple[int, int]]
HEADS = HeadSizes(query_heads=8, key_heads=2, widths=128)


def calls_of(lengths: Lengths, sizes: HeadSizes = HEADS) -> list[Entries]:
    return group_entries(lengths, sizes, WORK_OF_LAUNCHES)


def padded_work(lengths: Lengths, entries: Entries, sizes: HeadSizes) -> Work:
    queries, keys = (max(lengths[entry][axis] for entry in entries) for axis in (0, 1))
    return sizes.work(len(entries), queries, keys)


def real_work(lengths: Lengths, entries: Entries, sizes: HeadSizes) -> Work:
    works = [sizes.work(1, *lengths[entry]) for entry in entries]
    return Work(sum(work.scores for work in works), sum(work.elements for work in works))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(1, 50)] * 32, [tuple(range(32))]),
        ([(7, 9)], [(0,)]),
        ([(1, 10 + 9 * n) for n in range(32)], [tuple(range(32))]),
        ([(n, n) for n in range(1, 33)], [tuple(range(32))]),
        # One of them would pad 31 others to 100,000 keys.
        ([(1, 10)] * 20 + [(1, 100_000)] + [(1, 10)] * 11, [(*range(20), *range(21, 32)), (20,)]),
        ([(1, n + 1) for n in range(31)] + [(1, 100_000)], [tuple(range(31)), (31,)]),
        # The next tokens of some sequences, and the prompts of others.
        ([(1, 4000), (4000, 4000), (1, 3000), (3900, 3900)], [(0, 2), (3,), (1,)]),
        # Masks and biases are never asked about a sequence without a pair.
        ([(3, 0), (2, 2), (0, 4), (0, 0), (1, 0), (5, 5)], [(2, 3), (0, 4), (1, 5)]),
    ],
    ids=["equal", "one", "next tokens", "prompts", "one giant", "all unlike", "mixed", "empty"],
)
def test_which_share_a_call(lengths: Lengths, expected: list[Entries]) -> None:
    assert calls_of(lengths) == expected


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([0, 1, 10, 50, 3000, 200_000])), min_size=1),
    st.sampled_from([HEADS, HeadSizes(1, 1, 2), HeadSizes(64, 8, 256)]),
)
def test_padding_is_bounded(lengths: Lengths, sizes: HeadSizes) -> None:
    calls = calls_of(lengths, sizes)
    assert sorted(entry for entries in calls for entry in entries) == [*range(len(lengths))]
    for entries in calls:
        assert [*entries] == sorted(entries)
        padded, real = padded_work(lengths, entries, sizes), real_work(lengths, entries, sizes)
        for work, least, fixed in zip(padded, real, WORK_OF_LAUNCHES, strict=True):
            assert work - least <= max(least, fixed)
        kinds = {(queries > 0, queries * keys > 0) for queries, keys in map(lengths.__getitem__, entries)}
        assert len(kinds) == 1


@hypothesis.given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_each_call_that_is_saved_costs_less_than_its_launches(keys: list[int]) -> None:
    lengths = [(1, length) for length in keys]
    calls = calls_of(lengths)
    saved = len({*lengths}) - len(calls)
    added = [padded_work(lengths, entries, HEADS).elements for entries in calls]
    real = [real_work(lengths, entries, HEADS).elements for entries in calls]
    assert sum(added) - sum(real) <= saved * WORK_OF_LAUNCHES.elements
    assert len(calls) <= 2 + math.log2(max(keys))


def test_many_sequences_beside_a_giant() -> None:
    lengths = [(1, 1 + n % 20) for n in range(10_000)] + [(1, 1_000_000)]
    calls = calls_of(lengths)
    padded = sum(padded_work(lengths, entries, HEADS).elements for entries in calls)
    real = real_work(lengths, tuple(range(len(lengths))), HEADS).elements
    assert len(calls) <= 5
    assert padded <= 1.2 * real
