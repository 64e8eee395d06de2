"""Graphs that compute `attention_statistics`: as outputs of a call, and traced in a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from graphs import BATCH, RULES, assert_close, check_forms, moved, operands, qkv, run, scores
from internals import reference

from sdpa_xp import AttentionStatistics, attention_statistics, masks
from sdpa_xp_export import TensorSpec, export_attention, jit, to_onnx, verify_layer

F = np.float32
OF = ("row_max", "entropy", "key_sums")
EVERY = (*OF, "top_keys", "block_sums")
SIZES: dict[str, Any] = {"top_k": 3, "block_size": (3, 4)}
X = TensorSpec("float32", (2, "L", 8))
KEYS = TensorSpec("float32", (2, "S", 8))
TRACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"attn_mask": masks.sliding_window(2, 1, offset="lower_right"), "softcap": 2.0},
    "sinks": {"sinks": np.asarray([0.5, 9], F), "is_causal": True},
}
FORMS = ["primitive", "tiled"]


def by_name(statistics: AttentionStatistics[Any]) -> dict[str, np.ndarray]:
    top = statistics.top_keys
    assert top is not None
    others = {name: x for name, x in statistics._asdict().items() if name != "top_keys"}
    return others | {"top_weights": top.weights, "top_indices": top.indices}


def assert_as_expected(results: Mapping[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(results["top_indices"], expected.pop("top_indices"))
    assert_close({name: results[name] for name in expected}, expected)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("name", "dtype"), [*zip(RULES, ["float32", "float64", "float16"] * 2, strict=True)])
def test_outputs_of_a_call(rng: np.random.Generator, name: str, dtype: str) -> None:
    """Beside the output and each other, in each layout; `verify` and the library agree with both forms."""
    rules, layout = RULES[name], ["...HLE", "...LHE"][[*RULES].index(name) % 2]
    outputs = OF if dtype == "float64" else ("output", *OF)
    arrays = moved(qkv(rng, dtype=dtype), layout)
    names = {BATCH: "B", 5: "L", 9: "S"}
    check_forms(arrays, rules, operands(rules, rng, 5, 9, dtype), names=names, outputs=outputs, layout=layout)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rules", TRACED.values(), ids=TRACED)
def test_a_layer_returns_what_the_library_returns(
    rng: np.random.Generator, rules: Mapping[str, Any], form: str
) -> None:
    """Lengths are open: a block of queries may begin within one of a sum, and fewer keys than 3 may exist."""

    def layer(query: Any, key: Any) -> Any:
        return attention_statistics(query, key, of=EVERY, **SIZES, **rules)

    model = to_onnx(layer, X, KEYS, form=form)
    for queries, keys in ((5, 9), (12, 2), (1, 1), (9, 6)):
        query, key = (rng.standard_normal((2, n, 8)) for n in (queries, keys))
        results = run(model, {"query": query.astype(F), "key": key.astype(F)})
        assert_as_expected(results, by_name(layer(query.astype(F), key.astype(F))))


@pytest.mark.parametrize("form", FORMS)
def test_of_equal_weights_the_lower_index_comes_first(form: str) -> None:
    key = np.random.default_rng(0).integers(0, 3, (2, 40, 8)).astype(F) * np.eye(8, dtype=F)[0]
    query = np.ones((2, 150, 8), F)

    def layer(query: Any, key: Any) -> Any:
        return attention_statistics(query, key, of="top_keys", top_k=6, is_causal=True).top_keys.indices

    indices = run(to_onnx(layer, X, KEYS, form=form), {"query": query, "key": key})["output"]
    np.testing.assert_array_equal(indices, layer(query, key))
    assert indices.dtype == np.int64


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_keys_and_rows_with_nan(form: str) -> None:
    """Query 1 has no key, and is NaN. Query 3 is NaN, and shows in the sums of all keys."""

    def layer(query: Any, key: Any, mask: Any) -> Any:
        return attention_statistics(query, key, of=EVERY, **SIZES, attn_mask=mask)

    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 5, 8)).astype(F), rng.standard_normal((2, 6, 8)).astype(F)
    mask = np.ones((5, 6), bool)
    mask[1], mask[:, 4] = False, False
    clean = by_name(layer(query, key, mask))
    query[:, 1], key[:, 4] = np.nan, np.inf
    model = to_onnx(layer, X, KEYS, TensorSpec("bool", ("L", "S")), form=form)
    results = run(model, {"query": query, "key": key, "mask": mask})
    assert_as_expected(results, clean)
    assert np.isneginf(results["row_max"][:, 1]).all()
    assert not results["entropy"][:, 1].any()
    assert (results["top_indices"][:, 1] == -1).all()
    query[:, 3] = np.nan
    results = run(model, {"query": query, "key": key, "mask": mask})
    hit = np.arange(5) == 3
    for name in ("row_max", "entropy", "top_weights"):
        np.testing.assert_array_equal(np.isnan(results[name]).any(axis=(0, *range(2, results[name].ndim))), hit)
    assert (results["top_indices"][:, hit] == -1).all()
    assert np.isnan(results["key_sums"][:, mask[3]]).all()


@pytest.mark.parametrize("form", FORMS)
def test_sums_without_a_row_have_nothing_of_it(form: str) -> None:
    """NaN of a query stays in its block, and rows that are no queries meet an infinite key, too."""

    def layer(query: Any, key: Any) -> Any:
        return attention_statistics(query, key, of=("key_sums", "block_sums"), block_size=(40, 2))

    rng = np.random.default_rng(0)
    query, key = -rng.random((2, 130, 8), F), rng.standard_normal((2, 5, 8)).astype(F)
    key[:, 2] = np.inf  # its scores are -inf
    model = to_onnx(layer, X, KEYS, form=form)
    results, expected = run(model, {"query": query, "key": key}), layer(query, key)
    np.testing.assert_allclose(results["key_sums"], expected.key_sums, rtol=1e-5)
    assert not results["key_sums"][:, 2].any()
    query[:, [0, 90]], blocks = np.nan, expected.block_sums
    results = run(model, {"query": query, "key": key})["block_sums"]
    assert np.isnan(results[:, ::2]).all()
    np.testing.assert_allclose(results[:, 1::2], blocks[:, 1::2], rtol=1e-5)


def test_an_infinite_score_is_the_largest() -> None:
    query, key = np.ones((2, 3, 8), F), np.ones((2, 4, 8), F)
    key[:, 1] = np.inf
    model = to_onnx(lambda query, key: attention_statistics(query, key, of="row_max").row_max, X, KEYS)
    assert np.isposinf(run(model, {"query": query, "key": key})["output"]).all()


@pytest.mark.usefixtures("short_verify")
def test_a_layer_is_verified() -> None:
    def layer(query: Any, key: Any) -> Any:
        return attention_statistics(query * 2, key, of=EVERY, **SIZES, is_causal=True)

    model = to_onnx(layer, X, KEYS)
    assert [out.name for out in model.graph.output] == [*OF, "block_sums", "top_weights", "top_indices"]
    assert verify_layer(model, layer, seed=0).agrees


ENGINES = {
    "reference": ("onnx", EVERY),
    "openvino": ("openvino>=2026.4;cpu", tuple(name for name in EVERY if name != "top_keys")),
}


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("engine", ["reference", pytest.param("openvino", marks=pytest.mark.needs("openvino"))])
@pytest.mark.parametrize("form", FORMS)
def test_other_programs(form: str, engine: Any) -> None:
    """The first queries have no keys: OpenVINO's ReduceMax of -inf alone is finite."""
    runtime, names = ENGINES[engine]

    def layer(query: Any, key: Any) -> Any:
        mask = masks.sliding_window(20, 3, offset=-5)
        sizes = SIZES if "top_keys" in names else {"block_size": (5, 7)}
        return attention_statistics(query, key, of=names, attn_mask=mask, **sizes)

    model = to_onnx(layer, X, KEYS, form=form, runtime=runtime)
    assert verify_layer(model, layer, engine=engine, seed=0).agrees


def test_jit_returns_statistics(rng: np.random.Generator) -> None:
    """As the library does, with None for what was not asked for."""
    x = rng.standard_normal((2, 7, 8)).astype(F)
    for names in (EVERY, ("entropy", "row_max"), "key_sums"):
        sizes = SIZES if names is EVERY else {}

        def layer(x: Any, names: Any = names, sizes: Any = sizes) -> Any:
            return attention_statistics(x, x, of=names, **sizes)

        for result, expected in zip(jit(layer)(x), layer(x), strict=True):
            assert (result is None) == (expected is None)
            if isinstance(expected, tuple):
                np.testing.assert_array_equal(result.indices, expected.indices)
            elif expected is not None:
                np.testing.assert_allclose(result, expected, atol=2e-6)


def test_a_cache_has_statistics_too(rng: np.random.Generator) -> None:
    """Of the tokens in it and the new ones, whose queries are the last."""
    query, new, past = (TensorSpec("float32", (1, 2, n, 8)) for n in ("L", "L", "P"))
    cached: dict[str, Any] = {"past_key": past, "past_value": past, "is_causal": True}
    model = export_attention(query, new, new, **cached, outputs=OF, form="tiled")
    q, k, old = (rng.standard_normal((1, 2, n, 8)).astype(F) for n in (3, 3, 200))
    results = run(model, {"query": q, "key": k, "value": k, "past_key": old, "past_value": old})
    arrays = {"query": q, "key": np.concatenate([old, k], axis=-2)}
    rules = {"attn_mask": masks.causal("lower_right")}
    allowed = np.tri(3, 203, 200, dtype=bool)
    exact = reference.attention(arrays["query"], arrays["key"], arrays["key"], allowed)[2]
    np.testing.assert_allclose(results["key_sums"], exact.sum(axis=-2), atol=2e-6)
    np.testing.assert_allclose(results["row_max"], scores(arrays, **rules).max(axis=-1), rtol=2e-6)
