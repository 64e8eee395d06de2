"""What statistics promise beside their numbers, which test_agreement.py has: ties, NaN, memory, derivatives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from agreement import BLOCK, OF, OF_CHUNKS, K, Results, assert_right, host, statistics_of
from calls import draw_named, gradients
from internals import DEVICE, Scores, cut_small, namespace, override, reference, threads
from libraries import Library

from sdpa_xp import AttentionStatistics, attention_statistics, biases, jvp, masks

F = np.float32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that blocks of queries and keys begin and end inside of tiles."""
    cut_small(monkeypatch)


def results_of(library: Library, *arrays: np.ndarray, **rules: Any) -> Results:
    """All statistics that the library has, as NumPy arrays."""
    return host(library, **statistics_of(library, *arrays, **rules))


@pytest.mark.parametrize("block", [1, 2, 5, 6, 30, (4, 12), (1, 7), (13, 1)])
def test_blocks_of_any_size(library: Library, rng: np.random.Generator, block: Any) -> None:
    """Blocks smaller and larger than tiles, which begin where tiles begin or not."""
    if library.lazy:
        pytest.skip("Dask has no sums of blocks")
    arrays = draw_named(rng, {"query": (2, 13, 4), "key": (2, 17, 4)})
    computed = library.call(attention_statistics, **arrays, of="block_sums", block_size=block, is_causal=True)
    weights = reference.attention(value=arrays["key"], **arrays, is_causal=True)[2]
    for axis, size in enumerate(block if isinstance(block, tuple) else (block, block)):
        weights = np.add.reduceat(weights, np.arange(0, weights.shape[axis + 1], size), axis=axis + 1)
    np.testing.assert_allclose(library.get(computed.block_sums), weights, rtol=0, atol=2e-6)


def test_of_equal_weights_the_lower_index_comes_first(library: Library) -> None:
    """All scores are small integers, so many are equal, in one tile and in several."""
    if library.lazy:
        pytest.skip("Dask has no top-k")
    rng = np.random.default_rng(7)
    q = np.ones((9, 1), F)
    k = rng.integers(0, 3, (40, 1)).astype(F)
    k[20:26] = 3  # the last tiles have larger scores
    for count in (1, 3, 8, 50):
        top = library.call(attention_statistics, q, k, of="top_keys", top_k=count, is_causal=True).top_keys
        scores = np.where(np.tri(9, 40, dtype=bool), k[:, 0], -np.inf)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
        order = np.where(np.take_along_axis(scores, order, -1) > -np.inf, order, -1)
        expected = np.pad(order, ((0, 0), (0, count - order.shape[1])), constant_values=-1)
        np.testing.assert_array_equal(library.get(top.indices), expected)
        assert library.get(top.indices).dtype.name == ("int64" if library.holds("int64") else "int32")


@pytest.mark.leaves_out("jax-debug")
def test_masked_nan_never_shows_and_attended_nan_shows_in_its_rows(library: Library) -> None:
    """Key 3 is NaN, and queries 4 and 5 attend to it; query 1 and key 8, which no pair has, are NaN too."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((7, 4)).astype(F), rng.standard_normal((9, 4)).astype(F)
    mask = rng.random((7, 9)) < 0.8
    mask[1], mask[:, 8], mask[:, 3] = False, False, False
    mask[4:6, 3] = True
    clean_q, clean_k = q.copy(), k.copy()
    q[1], k[8], k[3] = np.nan, np.inf, np.nan
    computed = results_of(library, q, k, attn_mask=mask)
    hit = np.isin(np.arange(7), (4, 5))
    without = results_of(library, clean_q, clean_k, attn_mask=mask)
    for name in ("row_max", "entropy", "top_weights", "top_indices"):
        if name in computed:
            np.testing.assert_array_equal(computed[name][~hit], without[name][~hit], err_msg=name)
    assert np.isnan(computed["row_max"][hit]).all()
    assert np.isnan(computed["entropy"][hit]).all()
    np.testing.assert_array_equal(np.isnan(computed["key_sums"]), mask[hit].any(axis=0))
    if not library.lazy:
        assert np.isnan(computed["top_weights"][hit]).all()
        assert (computed["top_indices"][hit] == -1).all()
        blocks = np.isnan(np.where(mask & hit[:, None], np.nan, 0))
        starts = [np.arange(0, n, size) for n, size in zip((7, 9), BLOCK, strict=True)]
        blocks = np.logical_or.reduceat(np.logical_or.reduceat(blocks, starts[0], 0), starts[1], 1)
        np.testing.assert_array_equal(np.isnan(computed["block_sums"]), blocks)


def test_large_scores_lose_no_digits_of_the_entropy(library: Library) -> None:
    """Scores around 1e5 whose differences are exact: the entropy is that of the differences."""
    q = np.asarray([[1.0]], F)
    k = np.asarray([[99_999.0], [1e5], [1e5], [99_998.0], [-1e5], [1.0], [100_001.0], [2.0]], F)
    exact = reference.attention(q, k, k, scale=1)[2]
    expected = -np.sum(exact * np.log(np.where(exact > 0, exact, 1)))
    for keys in (k, k[::-1].copy(), np.roll(k, 3)):
        computed = library.call(attention_statistics, q, keys, of="entropy", scale=1).entropy
        assert abs(float(library.get(computed)[0]) - expected) < 1e-6


@pytest.mark.leaves_out("jax-debug")
def test_infinite_scores(library: Library) -> None:
    """A score of -inf has weight 0, and its key is no top key; +inf makes a row NaN, as in the weights."""
    q, k = np.ones((1, 1), F), np.asarray([[-np.inf], [1.0], [0.0]], F)
    computed = results_of(library, q, k, scale=1)
    w = np.exp(1) / (np.exp(1) + 1)
    np.testing.assert_allclose(computed["entropy"], -w * np.log(w) - (1 - w) * np.log(1 - w), rtol=1e-6)
    np.testing.assert_allclose(computed["key_sums"], [0, w, 1 - w], rtol=1e-6)
    if not library.lazy:
        np.testing.assert_array_equal(computed["top_indices"], [[1, 2, -1, -1]])
    computed = results_of(library, q, -k, scale=1)
    assert computed["row_max"] == np.inf
    assert np.isnan(computed["entropy"]).all()
    assert np.isnan(computed["key_sums"]).all()


def test_one_name_is_computed_alone() -> None:
    computed = attention_statistics(np.ones((5, 8)), np.ones((7, 8)), of="key_sums")
    assert computed._replace(key_sums=None) == AttentionStatistics()


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("rules", [{"attn_mask": masks.padding(0)}, {"attn_mask": masks.padding(1)}, {}])
def test_no_entropy_is_minus_0(library: Library, rules: dict[str, Any]) -> None:
    """Of a row without keys, and of one with a single key; also inside a jit."""
    keys = np.ones((1, 3, 2), F)[:, : 3 if rules else 0]
    if not rules:
        library.needs_empty_arrays()
    for sinks in ({}, {"sinks": np.asarray([-3.0], F)}, {"sinks": np.asarray([1.0], F)}):
        query = np.ones((1, 1, 2), F)
        computed = library.call(attention_statistics, query, keys, of="entropy", **sinks, **rules)
        assert not np.signbit(library.get(computed.entropy)).any()


def test_empty_axes(library: Library) -> None:
    library.needs_empty_arrays()
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        results = results_of(library, np.ones((2, queries, 4), F), np.ones((2, keys, 4), F))
        blocks = -(-queries // BLOCK[0]), -(-keys // BLOCK[1])
        assert (results["row_max"] == -math.inf).all()
        assert results["row_max"].shape == (2, queries)
        assert (results["entropy"] == 0).all()
        assert results["entropy"].shape == (2, queries)
        np.testing.assert_array_equal(results["key_sums"], np.zeros((2, keys)))
        np.testing.assert_array_equal(results["top_indices"], np.full((2, queries, K), -1))
        np.testing.assert_array_equal(results["top_weights"], np.zeros((2, queries, K)))
        np.testing.assert_array_equal(results["block_sums"], np.zeros((2, *blocks)))


def test_wider_scores(library: Library, rng: np.random.Generator) -> None:
    library.needs("float64")
    arrays = draw_named(rng, {"query": (5, 8), "key": (9, 8)})
    results = results_of(library, **arrays, softmax_dtype="float64")
    assert_right(results, arrays | {"value": arrays["key"]}, "float64")


@pytest.mark.leaves_out("torch-inference")
def test_gradients(library: Library, rng: np.random.Generator) -> None:
    """Of the entropy, which a loss may have, and of the other statistics; a row is empty."""
    arrays = draw_named(rng, {"query": (5, 4), "key": (8, 4)})
    mask = rng.random((5, 8)) < 0.7
    mask[2] = False

    def total(query: Any, key: Any, mask: Any) -> Any:
        computed = attention_statistics(query, key, of=OF, top_k=2, block_size=3, attn_mask=mask)
        parts = computed.entropy, computed.key_sums, computed.top_keys.weights, computed.block_sums
        xp = namespace(query)
        one, two, three, four = (xp.sum(x * x) for x in parts)
        return one + two + three + four

    with library.guard():
        placed = library.put(mask)
    of_library_itself = gradients(library, lambda *x: total(*x, placed), *arrays.values())
    wide = [x.astype(np.float64) for x in arrays.values()]
    for _ in range(6):
        direction = [rng.standard_normal(x.shape) for x in wide]
        _, slope = jvp(lambda *x: total(*x, mask), tuple(wide), tuple(direction))
        along = sum(float((x * y).sum()) for x, y in zip(of_library_itself, direction, strict=True))
        assert along == pytest.approx(float(slope), abs=2e-4)


def test_the_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries of a block may lie in the shares of several threads, which end in any order."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
    x, results = np.random.default_rng(0).standard_normal((1, 300, 8)).astype(F), set[bytes]()
    for seed, count in enumerate("123456"):

        def run(function: Any, tasks: list[Any], _threads: object, seed: int = seed) -> None:
            for number in np.random.default_rng(seed).permutation(len(tasks)):
                function(tasks[number])

        monkeypatch.setenv("SDPA_XP_NUM_THREADS", count)
        if seed:
            monkeypatch.setattr(threads, "run_tasks", run)
        rules: dict[str, Any] = {"block_size": 100, "is_causal": True}
        statistics = attention_statistics(x, x, of=("block_sums", "key_sums"), **rules)
        results.add(np.asarray(statistics.block_sums).tobytes() + np.asarray(statistics.key_sums).tobytes())
    assert len(results) == 1
    expected = reference.attention(x, x, x, is_causal=True)[2].sum(axis=-2)
    np.testing.assert_allclose(statistics.key_sums, expected, atol=1e-5)


def test_a_function_may_keep_the_scores_that_it_gets(rng: np.random.Generator) -> None:
    q, k = (rng.standard_normal((9, 4)).astype(F) for _ in range(2))
    kept: list[Any] = []

    def add(score: Any, *_indices: Any) -> Any:
        kept.append((score, score.copy()))
        return score

    attention_statistics(q, k, of=("entropy", "key_sums"), bias=biases.from_function(add))
    assert len(kept) > 2
    for score, copy in kept:
        np.testing.assert_array_equal(score, copy)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"of": "row_max"}, 1),
        ({"of": ("row_max", "entropy", "top_keys"), "top_k": 2}, 1),
        ({"of": "key_sums"}, 2),
        ({"of": OF, "top_k": 2, "block_size": 3}, 2),
    ],
)
def test_the_scores_are_computed_once_or_twice(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], passes: int
) -> None:
    """Counted on NumPy; tiles outside of the window are not computed."""
    computed, products = [0], Scores.products

    def counted(self: Any, *arguments: Any) -> Any:
        result = products(self, *arguments)
        computed[0] += result.size
        return result

    monkeypatch.setattr(Scores, "products", counted)
    x = np.ones((60, 4), F)
    attention_statistics(x, x, **options)
    assert computed[0] == passes * 60 * 60
    computed[0] = 0
    attention_statistics(x, x, attn_mask=masks.sliding_window(5, 0), **options)
    assert computed[0] < passes * 60 * 20


TRACED: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": True},  # each band of queries has its own keys
    "window": {
        "attn_mask": masks.sliding_window(9, 2, offset=-40),
        "softcap": 3.0,
    },  # which the first queries lack
}


@pytest.mark.needs("jax")
@pytest.mark.parametrize("rules", TRACED.values(), ids=TRACED)
@pytest.mark.parametrize("queries", [144, 151])
def test_loops_inside_a_jit(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, queries: int, rules: dict[str, Any]
) -> None:
    """Their blocks have rows from everywhere, or the last one repeats rows, which no sum may count twice."""
    import jax

    override(monkeypatch, "DEVICE", DEVICE._replace(scores=64))
    arrays = draw_named(rng, {"query": (2, queries, 4), "key": (1, 120, 4)})

    @jax.jit
    def compute(query: Any, key: Any) -> Any:
        computed = attention_statistics(query, key, of=OF, top_k=K, block_size=BLOCK, **rules)
        return computed._replace(top_keys=None), *computed.top_keys

    computed, weights, indices = compute(**arrays)
    results = {name: np.asarray(getattr(computed, name)) for name in (*OF_CHUNKS, "block_sums")}
    results |= {"top_weights": np.asarray(weights), "top_indices": np.asarray(indices)}
    pairs = {
        name: masks.to_array(mask, (2, queries, 120)) for name, mask in rules.items() if name == "attn_mask"
    }
    assert_right(results, arrays | {"value": arrays["key"]} | rules | pairs)


@pytest.mark.needs("jax")
def test_derivatives_of_loops_inside_a_jit(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    import jax

    override(monkeypatch, "DEVICE", DEVICE._replace(scores=64))
    q, k = draw_named(rng, {"query": (2, 151, 4), "key": (2, 20, 4)}).values()

    def loss(query: Any, key: Any) -> Any:
        computed = attention_statistics(query, key, of=OF_CHUNKS, is_causal=True)
        return computed.row_max.sum() + computed.entropy.sum() + (computed.key_sums**2).sum()

    def plain(query: Any, key: Any) -> Any:
        xp = jax.numpy
        scores = xp.where(np.tri(151, 20, dtype=bool), query @ key.mT / 2, -np.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        entropy = -xp.sum(weights * xp.log(xp.where(weights > 0, weights, 1.0)))
        return scores.max(axis=-1).sum() + entropy + (weights.sum(axis=-2) ** 2).sum()

    for computed, expected in zip(*(jax.jit(jax.grad(f, (0, 1)))(q, k) for f in (loss, plain)), strict=True):
        np.testing.assert_allclose(computed, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.needs("jax")
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}], ids=str)
def test_memory_inside_a_jit_is_not_that_of_all_scores(rules: dict[str, Any]) -> None:
    import jax

    def compute(x: Any) -> Any:
        return attention_statistics(x, x, of=("entropy", "key_sums"), **rules)[1:3]

    x = jax.ShapeDtypeStruct((4096, 64), F)
    memory = jax.jit(compute).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert memory < 4096 * 4096 * 4 / 3
