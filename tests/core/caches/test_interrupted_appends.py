"""An exception at any line of an append in place: each cache is as it was, or says that it is not."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import Interrupted

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache
from sdpa_xp.positional import Rotary

pytestmark = pytest.mark.slow

FILES = str(Path(sdpa_xp.__file__).parent)
F = np.float32
TOKENS = np.random.default_rng(0).standard_normal((1, 2, 16, 4)).astype(F)
LENGTHS_FIRST = TOKENS.swapaxes(1, 2).copy()
KINDS = [None, ("int8", "token"), ("int8", "channel"), ("int4", "token"), ("int4", "channel")]
REFUSED = re.compile(r"must not be overwritten|can be appended to in place only once")
Family = dict[str, Any]
"""Caches that share memory; one is appended to."""


def tokens(start: int, stop: int, sign: float = 1.0, layout: str = "...HLE") -> list[np.ndarray]:
    """Keys and values of some tokens."""
    part = TOKENS[:, :, start:stop] if layout == "...HLE" else LENGTHS_FIRST[:, start:stop]
    return [sign * part, -sign * part]


def begin(kind: tuple[Any, Any] | None, capacity: int, length: int, **rules: Any) -> Any:
    layout = rules.get("layout", "...HLE")
    cache = KVCache(*tokens(0, length, layout=layout), capacity=capacity, **rules)
    return cache if kind is None else cache.quantised(kind[0], per=kind[1])


def plain(kind: Any) -> Family:
    prompt = begin(kind, 8, 3)
    window = prompt.append(*tokens(3, 4), in_place=True).drop_first(1)
    return {"prompt": prompt, "before": window.drop_last(1), "appended": window}


def rewound(kind: Any) -> Family:
    """The slots that are written have tokens of an older cache."""
    prompt = begin(kind, 8, 3, rotary=Rotary(4))
    draft = prompt.append(*tokens(3, 6, -1.0), in_place=True)
    return {"prompt": prompt, "draft": draft, "window": draft.drop_first(2), "appended": draft.drop_last(2)}


def rolling(kind: Any) -> Family:
    """The tokens move to the front, onto some of themselves."""
    prompt = begin(kind, 8, 5)
    full = prompt.append(*tokens(5, 8), in_place=True)
    return {"prompt": prompt, "full": full, "last": full.drop_first(7), "appended": full.drop_first(3)}


def rolling_with_heads_last(kind: Any) -> Family:
    prompt = begin(kind, 8, 5, layout="...LHE")
    full = prompt.append(*tokens(5, 8, layout="...LHE"), in_place=True)
    return {"full": full, "appended": full.drop_first(3)}


def rolling_apart(kind: Any) -> Family:
    """The tokens move to the front, in front of themselves."""
    full = begin(kind, 9, 5).append(*tokens(5, 9), in_place=True)
    return {"full": full, "first": full.drop_last(7), "appended": full.drop_first(6)}


def numbers(cache: Any) -> list[np.ndarray] | None:
    """What a cache has and attends to; None if it says that its tokens were overwritten."""
    query = np.ones_like(tokens(0, 1, layout=cache.layout)[0])
    try:
        return [np.array(x) for x in (cache.key, cache.value, cache.attend(query), *cache.stored.values())]
    except ValueError as error:
        assert re.search("must not be overwritten", str(error))  # noqa: PT017
        return None


def assert_same(cache: Any, expected: list[np.ndarray] | None, came: str) -> None:
    if (computed := numbers(cache)) is not None:
        assert expected is not None, came
        for part, expected_part in zip(computed, expected, strict=True):
            np.testing.assert_array_equal(part, expected_part, came)


def families(build: Callable[[], Family], append: Callable[[Any], Any]) -> Iterator[tuple[str, Family]]:
    """Yield fresh caches after an append that was interrupted, at each line once."""
    built, step = build(), 0
    while True:
        caches, step = copy.deepcopy(built), step + 1
        interrupted = Interrupted(step, FILES, exception=MemoryError if step % 2 else KeyboardInterrupt)
        interrupted(lambda caches=caches: append(caches["appended"]))  # type: ignore[misc]
        if not interrupted.came:
            break
        yield interrupted.came, caches
    assert step > 100


SCENES = [plain, rewound, rolling, rolling_with_heads_last, rolling_apart]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scene", SCENES)
def test_each_cache_is_as_it_was_or_is_refused(scene: Callable[[Any], Family], kind: Any) -> None:
    layout = "...LHE" if scene is rolling_with_heads_last else "...HLE"
    moves_onto_itself = scene in (rolling, rolling_with_heads_last)

    def append(cache: Any) -> Any:
        return cache.append(*tokens(9, 10, layout=layout), in_place=True)

    expected, whole = {name: numbers(cache) for name, cache in scene(kind).items()}, scene(kind)
    after = numbers(append(whole["appended"]))
    left = {name: numbers(cache) for name, cache in whole.items()}
    counts = {"refused": 0, "again": 0, "only once": 0}
    for came, caches in families(lambda: scene(kind), append):
        for name, cache in caches.items():
            assert_same(cache, expected[name], came)
        try:
            assert_same(append(caches["appended"]), after, came)
            counts["again"] += 1
        except ValueError as error:
            assert REFUSED.search(str(error)), came  # noqa: PT017
            counts["only once" if "only once" in str(error) else "refused"] += 1
        for name, cache in caches.items():
            assert_same(cache, expected[name], came)
            assert numbers(cache) is not None or left[name] is None or moves_onto_itself, (came, name)
    assert counts["again"] > 50
    assert counts["only once"] < 40  # the write was complete, and nobody got the new cache
    assert (counts["refused"] > 0) == moves_onto_itself, counts


def in_blocks(kind: Any) -> Family:
    """Two sequences; others over the same pool share a block, or were there before the last tokens."""
    pool = np.zeros((5, 2, 4, 4), F)
    cache: Any = PagedKVCache(pool, pool.copy(), [[0, 1], [3, 4]], [0, 0])
    cache = cache.append(*(np.concatenate([x, -x]) for x in tokens(0, 3)), in_place=True)
    cache = cache if kind is None else cache.quantised(kind[0], per=kind[1])
    more = cache.append(*(np.concatenate([x, -x]) for x in tokens(3, 5)), in_place=True)
    prefix = more.with_table([[3, 2]], lengths=[4])
    return {"before": cache, "prefix": prefix, "taken": more.take_entries([1]), "appended": more}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [None, [0, 3, 4]], ids=["one each", "packed"])
def test_blocks_that_are_not_written_to_stay(kind: Any, counts: list[int] | None) -> None:
    new = [x[0] for x in tokens(9, 13)] if counts else [np.concatenate([x, -x]) for x in tokens(9, 10)]

    def append(cache: Any) -> Any:
        return cache.append(*new, cu_seqlens_k=counts, in_place=True)

    computed: dict[bytes, list[np.ndarray]] = {}

    def outputs(cache: Any) -> list[np.ndarray]:
        """What a cache attends to, computed once for caches whose attributes and arrays are the same bytes."""
        if (key := pickle.dumps(cache)) not in computed:
            query = np.ones((len(cache.lengths), 2, 1, 4), F)
            computed[key] = [cache.attend(query), *map(np.asarray, cache.attend_state(query))]
        return computed[key]

    caches = in_blocks(kind)
    expected = {name: outputs(cache) for name, cache in caches.items()}
    after = outputs(append(caches["appended"]))
    for came, caches in families(lambda: in_blocks(kind), append):
        for name, cache in caches.items():
            np.testing.assert_array_equal(outputs(cache)[0], expected[name][0], came)
        again = append(caches["appended"])
        for part, expected_part in zip(outputs(again), after, strict=True):
            np.testing.assert_array_equal(part, expected_part, came)
        for name, cache in caches.items():
            np.testing.assert_array_equal(outputs(cache)[1], expected[name][1], came)
