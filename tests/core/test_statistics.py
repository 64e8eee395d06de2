"""Statistics of scores and weights: the reductions of the float64 reference, on every library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from calls import draw_masked, draw_named, gradients, sloping
from internals import DEVICE, Scores, cut_small, device, judge, namespace, override, reference, threads
from libraries import Library

from sdpa_xp import (
    AttentionStatistics,
    attention_scores,
    attention_statistics,
    attention_weights,
    biases,
    masks,
)

F = np.float32
OF = ("row_max", "entropy", "key_sums", "top_keys", "block_sums")
OF_CHUNKS = OF[:3]
BLOCK = (3, 4)
K = 4
Results = Mapping[str, np.ndarray]

# query, key, attn_mask, bias: the shapes of a call
SHAPES: dict[str, tuple[tuple[int, ...] | None, ...]] = {
    "2-D": ((7, 8), (11, 8), (7, 11), None),
    "3-D": ((4, 7, 8), (4, 11, 8), (7, 11), (4, 1, 11)),
    "4-D": ((2, 4, 7, 8), (2, 4, 11, 8), (2, 1, 1, 11), (4, 7, 11)),
    "batches broadcast": ((3, 1, 4, 7, 8), (2, 4, 11, 8), (3, 2, 1, 1, 11), (11,)),
    "ranks differ": ((4, 7, 8), (11, 8), (11,), None),
    "grouped heads": ((2, 6, 7, 8), (2, 2, 11, 8), (2, 6, 7, 11), (6, 1, 11)),
    "one query": ((2, 4, 1, 8), (2, 2, 11, 8), (2, 1, 1, 11), None),
    "fewer keys than k": ((4, 7, 8), (4, 2, 8), (7, 1), None),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "scale < 0": {"scale": -0.5, "is_causal": True},
    "all": {"is_causal": True, "scale": 1.5, "softcap": 3},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that blocks of queries and keys begin and end inside of tiles."""
    cut_small(monkeypatch)


def of_library(library: Library, *arrays: np.ndarray, **rules: Any) -> Any:
    """What the library computes of all statistics that it has; Dask lacks two."""
    if library.lazy:
        return library.call(attention_statistics, *arrays, of=OF_CHUNKS, **rules)
    return library.call(attention_statistics, *arrays, of=OF, top_k=K, block_size=BLOCK, **rules)


def read(library: Library, computed: AttentionStatistics[Any]) -> Results:
    """The statistics as NumPy arrays."""
    names = OF_CHUNKS if library.lazy else (*OF_CHUNKS, "block_sums")
    arrays = {name: library.get(getattr(computed, name)) for name in names}
    if computed.top_keys is not None:
        arrays |= {
            "top_indices": library.get(computed.top_keys.indices),
            "top_weights": library.get(computed.top_keys.weights),
        }
    return arrays


def reductions(scores: np.ndarray, weights: np.ndarray) -> Results:
    """The statistics by their definitions, of whole arrays (..., L, S)."""
    with np.errstate(all="ignore"):
        logarithms = np.where(weights > 0, np.log(weights), np.where(np.isnan(weights), np.nan, 0))
    # Stable, so that the lower index of equal weights comes first.
    order = np.argsort(-np.nan_to_num(weights, nan=0), axis=-1, kind="stable")[..., :K]
    chosen = np.take_along_axis(weights, order, axis=-1)
    missing = [(0, 0)] * (weights.ndim - 1) + [(0, K - order.shape[-1])]
    starts = [np.arange(0, n, size) for n, size in zip(weights.shape[-2:], BLOCK, strict=True)]
    blocks = np.add.reduceat(np.add.reduceat(weights, starts[0], axis=-2), starts[1], axis=-1)
    return {
        "weights": weights,
        "row_max": np.max(scores, axis=-1),
        "entropy": -np.sum(weights * logarithms, axis=-1),
        "key_sums": np.sum(weights, axis=-2),
        "block_sums": blocks,
        "top_weights": np.pad(chosen, missing),
        "top_indices": np.pad(np.where(chosen > 0, order, -1), missing, constant_values=-1),
    }


def expect(arrays: dict[str, np.ndarray], rules: dict[str, Any]) -> tuple[Results, Results]:
    """The float64 reference, and the textbook formula in the dtype in which scores are computed."""
    arrays = {name: x if x.dtype == bool else x.astype(np.float64) for name, x in arrays.items()}
    _, _, weights, scores = reference.attention_and_scores(value=arrays["key"], **arrays, **rules)
    narrow = {name: x if x.dtype == bool else x.astype(F) for name, x in arrays.items()}
    with np.errstate(all="ignore"):
        plain = reference.stages(np, value=narrow["key"], **narrow, **rules)
    return reductions(scores, weights), reductions(plain["scores"], plain["weights"])


def assert_right(computed: Results, exact: Results, plain: Results, dtype: str = "float32") -> None:
    for name, result in computed.items():
        assert result.shape == exact[name].shape, name
        if name == "top_indices":
            np.testing.assert_array_equal(result < 0, exact[name] < 0)
            name, result = "top_weights", weights_at(result, exact)
        empty = np.isneginf(exact[name])
        np.testing.assert_array_equal(np.isneginf(result), empty, err_msg=name)
        finite = [np.where(empty, 0, x) for x in (result, exact[name], plain[name])]
        agreement = judge(finite[0].astype(dtype), finite[1], finite[2].astype(dtype), dtype)
        assert agreement.agrees, (name, agreement)


def weights_at(indices: np.ndarray, exact: Results) -> np.ndarray:
    """The exact weights of some keys of each query; 0 at -1."""
    weights = np.take_along_axis(exact["weights"], np.maximum(indices, 0), axis=-1)
    return np.where(indices < 0, 0, weights)


def assert_like_the_query(library: Library, computed: Any, query: np.ndarray, dtype: str) -> None:
    with library.guard():
        placed = library.put(query)
    arrays = [x for name, x in computed._asdict().items() if name != "top_keys" and x is not None]
    arrays += [] if computed.top_keys is None else [computed.top_keys.weights]
    for array in arrays:
        assert namespace(array) is library.xp
        assert device(array) == device(placed)
        assert str(array.dtype).endswith(dtype)


def draw(rng: np.random.Generator, shapes: Sequence[Any], dtype: Any = F) -> dict[str, np.ndarray]:
    names = ("query", "key", "attn_mask", "bias")
    return draw_masked(rng, dict(zip(names, shapes, strict=True)), dtype)


PAIRS = [
    pytest.param(shapes, rules, id=f"{name}-{rule}")
    for index, (name, shapes) in enumerate(SHAPES.items())
    for turn, (rule, rules) in enumerate(RULES.items())
    if (turn - index) % len(RULES) in (0, 3)
]


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(("shapes", "rules"), PAIRS)
def test_the_reductions_of_weights(library: Library, rng: np.random.Generator, shapes: Any, rules: Any) -> None:
    arrays = draw(rng, shapes)
    computed = of_library(library, **arrays, **rules)
    exact, plain = expect(arrays, rules)
    assert_right(read(library, computed), exact, plain)
    assert_like_the_query(library, computed, arrays["query"], "float32")


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(library: Library, rng: np.random.Generator, dtype: str) -> None:
    """The statistics have the dtype of the scores: halves are computed in float32."""
    library.needs(dtype)
    arrays = draw(rng, SHAPES["grouped heads"], dtype)
    computed = of_library(library, **arrays, is_causal=True)
    exact, plain = expect(arrays, {"is_causal": True})
    of_scores = "float64" if dtype == "float64" else "float32"
    if dtype == "float64":
        plain = exact
    assert_right(read(library, computed), exact, plain, of_scores)
    assert_like_the_query(library, computed, arrays["query"], of_scores)


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


def test_masked_nan_never_shows_and_attended_nan_shows_in_its_rows(library: Library) -> None:
    """Key 3 is NaN, and queries 4 and 5 attend to it; query 1 and key 8, which no pair has, are NaN too."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((7, 4)).astype(F), rng.standard_normal((9, 4)).astype(F)
    mask = rng.random((7, 9)) < 0.8
    mask[1], mask[:, 8], mask[:, 3] = False, False, False
    mask[4:6, 3] = True
    clean_q, clean_k = q.copy(), k.copy()
    q[1], k[8], k[3] = np.nan, np.inf, np.nan
    computed = read(library, of_library(library, q, k, attn_mask=mask))
    hit = np.isin(np.arange(7), (4, 5))
    without = read(library, of_library(library, clean_q, clean_k, attn_mask=mask))
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


def test_infinite_scores(library: Library) -> None:
    """A score of -inf has weight 0, and its key is no top key; +inf makes a row NaN, as in the weights."""
    q, k = np.ones((1, 1), F), np.asarray([[-np.inf], [1.0], [0.0]], F)
    computed = read(library, of_library(library, q, k, scale=1))
    w = np.exp(1) / (np.exp(1) + 1)
    np.testing.assert_allclose(computed["entropy"], -w * np.log(w) - (1 - w) * np.log(1 - w), rtol=1e-6)
    np.testing.assert_allclose(computed["key_sums"], [0, w, 1 - w], rtol=1e-6)
    if not library.lazy:
        np.testing.assert_array_equal(computed["top_indices"], [[1, 2, -1, -1]])
    computed = read(library, of_library(library, q, -k, scale=1))
    assert computed["row_max"] == np.inf
    assert np.isnan(computed["entropy"]).all()
    assert np.isnan(computed["key_sums"]).all()


@pytest.mark.parametrize(
    "name", ["padding", "window", "document", "alibi", "function", "sinks", "scale", "2 masks"]
)
def test_masks_biases_and_sinks(library: Library, rng: np.random.Generator, name: str) -> None:
    q, k = (rng.standard_normal((2, 4, n, 8)).astype(F) for n in (9, 14))
    options: dict[str, Any] = {
        "padding": {"attn_mask": masks.padding([14, 3], [0, 9])},
        "window": {"attn_mask": masks.sliding_window(2, 0, offset="lower_right")},
        "document": {"attn_mask": masks.document([0] * 4 + [1] * 5, [0] * 6 + [2] * 2 + [1] * 6)},
        "alibi": {"bias": biases.alibi(4), "softcap": 2.0},
        "function": {"bias": biases.from_function(sloping)},
        "sinks": {"sinks": np.asarray([-np.inf, 0.0, 30.0, -30.0], F), "is_causal": True},
        "scale": {"scale": rng.standard_normal((4, 9, 1)).astype(F)},
        "2 masks": {"attn_mask": masks.chunked(4) | masks.prefix(3), "is_causal": True},
    }[name]
    with library.guard():
        options = {key: library.put(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        placed = library.put(q), library.put(k)
        keywords = {} if library.lazy else {"top_k": K, "block_size": BLOCK}
        computed = attention_statistics(*placed, of=OF_CHUNKS if library.lazy else OF, **keywords, **options)
    wide = {key: library.get(x).astype(np.float64) if namespace_or_none(x) else x for key, x in options.items()}
    rest = {key: x for key, x in wide.items() if key != "sinks"}
    weights = attention_weights(q.astype(np.float64), k.astype(np.float64), **wide)
    exact = reductions(attention_scores(q.astype(np.float64), k.astype(np.float64), **rest), weights)
    narrow = {key: library.get(x) if namespace_or_none(x) else x for key, x in options.items()}
    plain_scores = attention_scores(q, k, **{key: x for key, x in narrow.items() if key != "sinks"})
    plain = reductions(plain_scores, attention_weights(q, k, **narrow))
    assert_right(read(library, computed), exact, plain)


def namespace_or_none(value: Any) -> Any:
    return namespace(value) if hasattr(value, "dtype") else None


def test_layout_and_one_name(library: Library, rng: np.random.Generator) -> None:
    arrays = draw_named(rng, {"query": (2, 5, 5, 8), "key": (2, 7, 5, 8)})
    computed = library.call(attention_statistics, **arrays, of="key_sums", layout="...LHE")
    moved = {name: np.ascontiguousarray(np.swapaxes(x, 1, 2)) for name, x in arrays.items()}
    weights = reference.attention(value=moved["key"], **moved)[2]
    np.testing.assert_allclose(library.get(computed.key_sums), weights.sum(axis=-2), rtol=0, atol=2e-6)
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
        computed = of_library(library, np.ones((2, queries, 4), F), np.ones((2, keys, 4), F))
        results = read(library, computed)
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
    computed = of_library(library, **arrays, softmax_dtype="float64")
    exact, _ = expect(arrays, {})
    assert_right(read(library, computed), exact, exact, "float64")


@pytest.mark.leaves_out("torch-inference")
def test_gradients(library: Library, rng: np.random.Generator) -> None:
    """Of the entropy, which a loss may have, and of the other statistics; a row is empty."""
    arrays = draw_named(rng, {"query": (5, 4), "key": (8, 4)})
    mask = rng.random((5, 8)) < 0.7
    mask[2] = False
    with library.guard():
        placed = library.put(mask)

    def total(query: Any, key: Any) -> Any:
        computed = attention_statistics(query, key, of=OF, top_k=2, block_size=3, attn_mask=placed)
        xp = namespace(query)
        finite = [
            xp.sum(x * x)
            for x in (computed.entropy, computed.key_sums, computed.top_keys.weights, computed.block_sums)
        ]
        return finite[0] + finite[1] + finite[2] + finite[3]

    def exact(query: np.ndarray, key: np.ndarray) -> float:
        weights = reference.attention(query, key, key, mask)[2]
        computed = reductions(weights, weights)
        blocks = np.add.reduceat(np.add.reduceat(weights, [0, 3], axis=0), [0, 3, 6], axis=1)
        parts = computed["entropy"], computed["key_sums"], computed["top_weights"][:, :2], blocks
        return sum(float(np.sum(x * x)) for x in parts)

    of_library_itself = gradients(library, total, *arrays.values())
    values = [x.astype(np.float64) for x in arrays.values()]
    for n, gradient in enumerate(of_library_itself):
        for index in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in values]
                moved[n][index] += step
                ends.append(exact(*moved))
            assert abs((ends[0] - ends[1]) / 2e-5 - gradient[index]) < 2e-4


def test_repr_names_what_was_asked_for(rng: np.random.Generator) -> None:
    x = rng.standard_normal((9, 4)).astype(F)
    assert repr(attention_statistics(x, x, of=("entropy", "top_keys"), top_k=2)) == (
        "AttentionStatistics(entropy=<float32 (9,)>, "
        "top_keys=TopKeys(weights=<float32 (9, 2)>, indices=<int64 (9, 2)>))"
    )


@pytest.mark.parametrize("count", ["1", "2", "7"])
def test_the_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((3, n, 8)).astype(F) for n in (90, 70))
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", count)
    computed = attention_statistics(q, k, of=("key_sums", "block_sums"), block_size=7, is_causal=True)
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "3")
    again = attention_statistics(q, k, of=("key_sums", "block_sums"), block_size=7, is_causal=True)
    np.testing.assert_array_equal(computed.key_sums, again.key_sums)
    np.testing.assert_array_equal(computed.block_sums, again.block_sums)
    np.testing.assert_allclose(
        computed.key_sums, reference.attention(q, k, k, is_causal=True)[2].sum(axis=-2), atol=1e-5
    )


def test_no_two_threads_add_to_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries may lie in the shares of several threads, which end in any order."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
    x, results = np.random.default_rng(0).standard_normal((1, 900, 8)).astype(F), set[bytes]()
    for seed in range(6):

        def run(function: Any, tasks: list[Any], _threads: object, seed: int = seed) -> None:
            for number in np.random.default_rng(seed).permutation(len(tasks)):
                function(tasks[number])

        monkeypatch.setattr(threads, "run_tasks", run)
        statistics = attention_statistics(x, x, of="block_sums", block_size=300)
        results.add(np.asarray(statistics.block_sums).tobytes())
    assert len(results) == 1


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
    assert_right(results, *expect(arrays, rules | pairs))


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
