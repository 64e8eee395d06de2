"""A paged cache whose queries attend to all tokens: the blocks are computed where they lie in the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from calls import assert_agrees, draw_named, moved
from internals import PagedSource, override, pool_order, reference
from libraries import WRITEABLE, Library

from sdpa_xp import PagedKVCache, masks

Arrays = dict[str, np.ndarray]
QUERY_HEADS, HEADS, SIZE, POOL, WIDTHS = 4, 2, 8, 150, {"key": 16, "value": 12}
LENGTHS = [200, 7, 131, 8, 264, 1]
LONGEST = max(LENGTHS)


@pytest.fixture
def arrays(rng: np.random.Generator) -> Arrays:
    """One query for each sequence; keys and values as if padded."""
    shapes = {name: (len(LENGTHS), HEADS, LONGEST, width) for name, width in WIDTHS.items()}
    return draw_named(rng, {"query": (len(LENGTHS), QUERY_HEADS, 1, 16), **shapes})


@pytest.fixture
def table(rng: np.random.Generator) -> list[list[int]]:
    """Blocks in any order, so that some blocks between them belong to no sequence."""
    blocks = iter(rng.permutation(POOL).tolist())
    return [[next(blocks) for _ in range(0, length, SIZE)] for length in LENGTHS]


@pytest.fixture(autouse=True)
def small_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls as small as these are computed in this way, too, where sums are written to."""
    if "library" in request.fixturenames and request.getfixturevalue("library").name not in WRITEABLE:
        pytest.skip("blocks are computed in the order of the pool where arrays are written to")
    override(monkeypatch, "LEAST_POOL_SCORES", 0)


def attend(
    library: Library,
    arrays: Arrays,
    table: list[list[int]],
    *,
    rest: float = 0.0,
    layout: str = "...HLE",
    packed: bool = False,
    state: bool = False,
    **rules: Any,
) -> Any:
    """The output of a cache in whose pool `rest` is wherever no token is, and with `state` the log-sum-exp."""
    pools = []
    for name, width in WIDTHS.items():
        pool = np.full((POOL, HEADS, SIZE, width), rest, arrays[name].dtype)
        for blocks, length, tokens in zip(table, LENGTHS, arrays[name], strict=True):
            for t in range(length):
                pool[blocks[t // SIZE], :, t % SIZE] = tokens[:, t]
        pools.append(moved(pool, layout))
    with library.guard():
        key, value, query = (library.put(x) for x in (*pools, moved(arrays["query"], layout)))
        placed = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
        cache: PagedKVCache[Any] = PagedKVCache(key, value, table, LENGTHS, layout=layout)  # type: ignore[arg-type]
        if packed:  # (Hq, N, E): one query for each sequence
            query = library.put(np.ascontiguousarray(library.get(query)[..., 0, :].swapaxes(0, 1)))
            placed["cu_seqlens_q"] = range(len(LENGTHS) + 1)
        results = [library.get(x) for x in cache.attend_state(query, **placed)] if state else []
        output = results[0] if state else library.get(cache.attend(query, **placed))
        if packed:
            output, results[1:] = output.swapaxes(0, 1)[..., None, :], [x.T[..., None] for x in results[1:]]
        return (moved(output, layout), *results[1:]) if state else moved(output, layout)


def padded(arrays: Arrays) -> Arrays:
    """The same call over padded arrays."""
    allowed = np.arange(LONGEST) < np.asarray(LENGTHS)[:, None, None, None]
    shape = (len(LENGTHS), QUERY_HEADS, arrays["query"].shape[-2], LONGEST)
    return arrays | {"attn_mask": np.broadcast_to(allowed, shape).copy()}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The ranges of keys that are read through block tables."""
    ranges: list[range] = []
    cut = PagedSource.slice_keys

    def watched(self: PagedSource, columns: range) -> Any:
        ranges.append(columns)
        return cut(self, columns)

    monkeypatch.setattr(PagedSource, "slice_keys", watched)
    return ranges


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("most", [2**17, 1000], ids=["one run", "many runs"])
def test_it_is_attention_over_each_sequence(
    library: Library,
    arrays: Arrays,
    table: list[list[int]],
    layout: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    override(monkeypatch, "MOST_POOL_ELEMENTS", most)
    assert_agrees(library, attend(library, arrays, table, layout=layout), padded(arrays))


@pytest.mark.parametrize(
    "rules",
    [
        {"scale": 0.5},
        {
            "scale": np.linspace(-1, 2, len(LENGTHS) * QUERY_HEADS, dtype=np.float32).reshape(
                -1, QUERY_HEADS, 1, 1
            )
        },
        {"softcap": 1.5},
    ],
    ids=["scale", "scale of a head", "softcap"],
)
def test_scores(library: Library, arrays: Arrays, table: list[list[int]], rules: dict[str, Any]) -> None:
    assert_agrees(library, attend(library, arrays, table, **rules), padded(arrays), **rules)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_states(
    library: Library, arrays: Arrays, table: list[list[int]], copies: list[range], packed: bool, sinks: bool
) -> None:
    """The log-sum-exp too, without a copy; and of queries that are packed."""
    logits = np.linspace(-3, 4, len(LENGTHS) * QUERY_HEADS, dtype=np.float32).reshape(-1, QUERY_HEADS)
    told: dict[str, Any] = {"sinks": logits} if sinks else {}
    output, lse = attend(library, arrays, table, packed=packed, state=True, **told)
    assert_agrees(library, output, padded(arrays), **told)
    np.testing.assert_allclose(lse, reference.attention(**padded(arrays), **told)[1], rtol=0, atol=2e-6)
    alone = attend(library, arrays, table, packed=packed, **told)
    np.testing.assert_array_equal(alone, output)
    assert copies == []


def test_half_precision(library: Library, arrays: Arrays, table: list[list[int]]) -> None:
    library.needs("float16")
    arrays = {name: x.astype(np.float16) for name, x in arrays.items()}
    assert_agrees(library, attend(library, arrays, table), padded(arrays))


def test_several_queries(
    library: Library, arrays: Arrays, table: list[list[int]], rng: np.random.Generator
) -> None:
    arrays["query"] = rng.standard_normal((len(LENGTHS), QUERY_HEADS, 3, 16)).astype(np.float32)
    assert_agrees(library, attend(library, arrays, table, is_causal=False), padded(arrays))


@pytest.mark.parametrize("rest", [math.nan, math.inf, 1e38])
def test_what_lies_where_no_token_is_does_not_matter(
    library: Library, arrays: Arrays, table: list[list[int]], rest: float
) -> None:
    assert_agrees(library, attend(library, arrays, table, rest=rest), padded(arrays))


def test_unused_blocks_are_not_read(arrays: Arrays, table: list[list[int]], copies: list[range]) -> None:
    """NaN in them costs no second computation."""
    full = [length - length % SIZE for length in LENGTHS if length >= SIZE]
    pools = [np.full((POOL, HEADS, SIZE, width), math.nan, np.float32) for width in WIDTHS.values()]
    tables = [blocks for blocks, length in zip(table, LENGTHS, strict=True) if length >= SIZE]
    for pool in pools:
        pool[[block for blocks in tables for block in blocks]] = 1.0
    query = arrays["query"][: len(full)]
    output = PagedKVCache(*pools, tables, full).attend(query)
    np.testing.assert_allclose(output, np.ones_like(output), rtol=1e-6)
    assert not copies


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_special_value_stays_in_its_sequence(
    library: Library, arrays: Arrays, table: list[list[int]], name: str, special: float
) -> None:
    arrays[name][0, :, 40, 3] = special
    assert_agrees(library, attend(library, arrays, table), padded(arrays))


@pytest.mark.parametrize("factor", [1e3, 1e18])
def test_large_scores(library: Library, arrays: Arrays, table: list[list[int]], factor: float) -> None:
    """exp of the distance to the last token's score overflows: the largest score is needed."""
    arrays["key"][2] *= np.float32(factor)
    assert_agrees(library, attend(library, arrays, table), padded(arrays))


@pytest.mark.parametrize(
    ("rules", "change"),
    [
        ({}, None),
        ({"is_causal": False}, None),
        ({"attn_mask": np.ones((1, 1, 1, 1), bool)}, "a mask"),
        ({"attn_mask": masks.causal(-1)}, "a shifted diagonal"),
        ({"attn_mask": masks.causal(np.zeros(len(LENGTHS), np.int64))}, "a diagonal for each sequence"),
        ({"bias": np.zeros((1, 1, 1, 1), np.float32)}, "a bias"),
        ({}, "a shared block"),
        ({}, "a small part of the pool"),
        ({}, "several queries"),
        ({"dropout_p": 0.5, "rng": np.random.default_rng(0)}, "dropout"),
    ],
    ids=[
        "decoding",
        "no mask",
        "mask",
        "shifted",
        "shifts",
        "bias",
        "shared",
        "sparse",
        "several queries",
        "dropout",
    ],
)
def test_when_blocks_are_copied(
    arrays: Arrays, table: list[list[int]], copies: list[range], rules: dict[str, Any], change: str | None
) -> None:
    blocks, lengths, query = POOL, LENGTHS, arrays["query"]
    if change == "a shared block":
        table[4][0] = table[2][0]
    if change == "a small part of the pool":
        table, blocks = [[block * 7 for block in row] for row in table], POOL * 7
    if change == "several queries":
        query, lengths = np.repeat(query, 2, axis=-2), [max(2, length) for length in LENGTHS]
    pools = [np.ones((blocks, HEADS, SIZE, width), np.float32) for width in WIDTHS.values()]
    output = PagedKVCache(*pools, table, lengths).attend(query, **rules)
    assert bool(copies) == (change is not None)
    if change not in ("dropout", "a shifted diagonal"):
        np.testing.assert_allclose(output, np.ones_like(output), rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "sequences", "length", "is_copied"),
    [
        (8, 64, 8, False),
        (4, 4, 64, True),  # small blocks
        (8, 65, 8, True),  # many sequences
        (64, 2, 31, True),  # mostly empty
        (64, 2, 32, False),
        (65, 2, 65, True),  # the scores of a block, 4 * 65, are more than `MOST_ELEMENTS`
    ],
)
def test_blocks_of_a_size_that_fits(
    copies: list[range],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    sequences: int,
    length: int,
    is_copied: bool,
) -> None:
    override(monkeypatch, "MOST_POOL_ELEMENTS", 4 * 64)
    table = np.arange(sequences * -(-length // size)).reshape(sequences, -1)
    pools = [np.ones((table.size, 1, size, 4), np.float32) for _ in range(2)]
    output = PagedKVCache(*pools, table, [length] * sequences).attend(np.ones((sequences, 4, 1, 4), np.float32))
    assert bool(copies) == is_copied
    np.testing.assert_allclose(output, np.ones_like(output), rtol=1e-6)


@pytest.mark.parametrize("is_copied", [True, False])
def test_values_of_no_width(copies: list[range], is_copied: bool) -> None:
    query = np.ones((2, 1, 1, 4))
    cache = PagedKVCache(np.ones((2, 1, 9, 4)), np.ones((2, 1, 9, 0)), [[0], [1]], [9, 9])
    mask = np.ones((1, 1, 1, 1), bool) if is_copied else None
    assert cache.attend(query, attn_mask=mask).shape == (2, 1, 1, 0)
    assert bool(copies) == is_copied


def test_the_number_of_threads_changes_no_bit(
    library: Library, arrays: Arrays, table: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is cut into parts for the cores of the machine, and threads share the parts."""
    override(monkeypatch, "MOST_POOL_ELEMENTS", 1000)
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    parts: list[int] = []
    run = pool_order.threads.run

    def watched(function: Any, tasks: Sequence[int], threads: int | None) -> None:
        parts.append(len(tasks))
        run(function, tasks, threads)

    monkeypatch.setattr(pool_order.threads, "run", watched)
    outputs = []
    for threads in "1", "3":
        monkeypatch.setenv("SDPA_XP_NUM_THREADS", threads)
        outputs.append(attend(library, arrays, table))
    assert_agrees(library, outputs[0], padded(arrays))
    np.testing.assert_array_equal(*outputs)
    assert parts == ([1, 1] if library.name == "torch" else [5, 5])
