"""What attention gets wrong when nobody looks: each of these was wrong once, here or in a peer."""

from __future__ import annotations

import math
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from libraries import Library

from sdpa_xp import attention_state, attention_weights, scaled_dot_product_attention
from sdpa_xp_export import reference

F = np.float32


def attend(library: Library, *args: np.ndarray, **rules: Any) -> np.ndarray:
    return library.get(library.call(scaled_dot_product_attention, *args, **rules))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", ["boolean", "bias"])
def test_row_whose_first_tiles_are_masked(library: Library, rng: np.random.Generator, how: str) -> None:
    q, k, v = (rng.standard_normal(shape).astype(F) for shape in ((3, 4), (14, 4), (14, 4)))
    allowed = np.zeros((3, 14), bool)
    allowed[:, 13] = True
    rules = {"attn_mask": allowed} if how == "boolean" else {"bias": np.where(allowed, 0, -np.inf).astype(F)}
    np.testing.assert_allclose(attend(library, q, k, v, **rules), v[[13] * 3], rtol=1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_largest_score_comes_last(library: Library) -> None:
    """Each tile raises the maximum by far more than exp can hold."""
    k = np.arange(14, dtype=F)[:, None] * 1000
    v = np.arange(14, dtype=F)[:, None]
    np.testing.assert_array_equal(attend(library, np.ones((1, 1), F), k, v), [[13]])
    np.testing.assert_array_equal(attend(library, -np.ones((1, 1), F), k, v), [[0]])


def test_float16_scores_beyond_its_range(library: Library, rng: np.random.Generator) -> None:
    """|q| = |k| = 250 an entry and E = 64: a score is 4 million, float16 ends at 65,504."""
    if not library.holds("float16"):
        pytest.skip(f"{library.name} has no float16")
    q = np.full((2, 64), 250, np.float16)
    k = np.stack([q[0], -q[0], q[0]])
    v = rng.standard_normal((3, 8)).astype(np.float16)
    expected = reference.attention(q, k, v)[0]
    np.testing.assert_allclose(attend(library, q, k, v), expected.astype(np.float16), rtol=2**-10)


def test_bfloat16_sums_of_many_keys(library: Library) -> None:
    """4,096 ones add up to 256 in bfloat16."""
    if not library.holds("bfloat16"):
        pytest.skip(f"{library.name} has no bfloat16")
    q, k, v = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((1, 2), (4096, 2), (4096, 3)))
    state = library.call(attention_state, q, k, v)
    np.testing.assert_array_equal(library.get(state.output).astype(F), np.ones((1, 3)))
    assert library.get(state.lse)[0] == pytest.approx(math.log(4096) + math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("number", [2, 2.0, np.float64(2.0), np.float32(2.0), np.int64(2)])
def test_numbers_do_not_promote(library: Library, number: Any) -> None:
    x = np.ones((3, 4), F)
    for rules in ({"scale": number}, {"softcap": number}):
        result = library.call(scaled_dot_product_attention, x, x, x, **rules)
        assert library.get(result).dtype == np.float32


@pytest.mark.parametrize("name", ["attn_mask", "bias", "scale"])
def test_float32_beside_half_inputs(library: Library, rng: np.random.Generator, name: str) -> None:
    """What joins the scores may have their dtype; the result still has the query's."""
    if not library.holds("float16"):
        pytest.skip(f"{library.name} has no float16")
    q = rng.standard_normal((3, 4)).astype(np.float16)
    added = rng.standard_normal((3, 1)).astype(F)
    result = library.get(library.call(scaled_dot_product_attention, q, q, q, **{name: added}))
    assert result.dtype == np.float16
    expected = reference.attention(q, q, q, **{name: added})[0]
    np.testing.assert_allclose(result.astype(F), expected, rtol=0, atol=2**-9)


def test_large_scores_stay_exact(library: Library) -> None:
    """Two keys a quarter apart at a score of 10,000."""
    q, k, v = np.asarray([[1.0]], F), np.asarray([[1e4], [1e4 + 0.25]], F), np.eye(2, dtype=F)
    expected = 1 / (1 + math.exp(0.25))
    np.testing.assert_allclose(attend(library, q, k, v)[0], [expected, 1 - expected], rtol=1e-6)


def test_large_bias_cancels(library: Library, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal(shape).astype(F) for shape in ((3, 4), (5, 4), (5, 4)))
    shifted = attend(library, q, k, v, bias=np.full((3, 5), 2.0**10, F))
    np.testing.assert_allclose(shifted, attend(library, q, k, v), rtol=0, atol=2**-11)


def test_infinite_key_that_is_attended_is_nan(library: Library) -> None:
    k = np.asarray([[1.0], [math.inf]], F)
    output = attend(library, np.ones((2, 1), F), k, np.ones((2, 1), F), is_causal=True)
    assert output[0, 0] == 1
    assert math.isnan(output[1, 0])


def test_views_strides_and_order(library: Library, rng: np.random.Generator) -> None:
    """Transposed, strided, reversed and zero-stride inputs give what their copies give."""
    if library.name not in ("numpy", "torch", "torch-cuda", "cupy"):
        pytest.skip("the library has no strides")
    q, k, v = (rng.standard_normal((2, 6, 3, 8)).astype(F) for _ in range(3))
    expected = attend(library, q, k, v)

    def by_length(x: np.ndarray) -> Any:
        return library.xp.permute_dims(library.put(np.ascontiguousarray(np.swapaxes(x, 1, 2))), (0, 2, 1, 3))

    def strided(x: np.ndarray) -> Any:
        return library.put(np.repeat(x, 2, axis=2))[:, :, ::2, :]

    for view in (by_length, strided):
        result = scaled_dot_product_attention(*(view(x) for x in (q, k, v)))
        np.testing.assert_allclose(library.get(result), expected, rtol=0, atol=1e-6)
    one = library.xp.broadcast_to(library.put(np.ones((1, 1, 1, 8), F)), (2, 6, 3, 8))
    np.testing.assert_allclose(library.get(scaled_dot_product_attention(one, one, one)), 1, rtol=1e-6)


def test_many_threads_at_once(library: Library, rng: np.random.Generator) -> None:
    if library.lazy or library.name.startswith("strict"):
        pytest.skip("the flags of array-api-strict and the scheduler of Dask are process-wide")
    cases = [[rng.standard_normal((4, 40, 8)).astype(F) for _ in range(3)] for _ in range(8)]
    expected = [attend(library, *case, is_causal=True) for case in cases]
    results: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        results[index] = attend(library, *cases[index], is_causal=True)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, one in enumerate(expected):
        np.testing.assert_array_equal(results[index], one)


def test_weights_of_masked_pairs_are_zero_beside_nan(library: Library, rng: np.random.Generator) -> None:
    q, k = (rng.standard_normal((3, 4)).astype(F) for _ in range(2))
    k[0] = math.nan
    w = library.get(library.call(attention_weights, q, k, is_causal=True))
    np.testing.assert_array_equal(w[0, 1:], 0)
    np.testing.assert_array_equal(w[1, 2:], 0)
