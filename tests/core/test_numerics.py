"""Rounding, overflow, NaN and inf, dtypes and strides: what attention gets wrong when nobody looks."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from calls import attend, draw
from internals import reference
from libraries import Library

from sdpa_xp import attention_state, attention_weights, merge_states, scaled_dot_product_attention

F = np.float32


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", ["boolean", "bias"])
def test_row_whose_first_tiles_are_masked(library: Library, rng: np.random.Generator, how: str) -> None:
    q, k, v = draw(rng, (3, 4), (14, 4), (14, 4))
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
    library.needs("float16")
    q = np.full((2, 64), 250, np.float16)
    k = np.stack([q[0], -q[0], q[0]])
    v = rng.standard_normal((3, 8)).astype(np.float16)
    expected = reference.attention(q, k, v)[0]
    np.testing.assert_allclose(attend(library, q, k, v), expected.astype(np.float16), rtol=2**-10)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_bfloat16_sums_of_many_keys(library: Library) -> None:
    """4,096 ones add up to 256 in bfloat16."""
    library.needs("bfloat16")
    q, k, v = (np.ones(shape, "bfloat16") for shape in ((1, 2), (4096, 2), (4096, 3)))
    state = library.call(attention_state, q, k, v)
    np.testing.assert_array_equal(library.get(state.output).astype(F), np.ones((1, 3)))
    assert library.get(state.lse)[0] == pytest.approx(math.log(4096) + math.sqrt(2), rel=1e-6)


def test_large_scores_stay_exact(library: Library) -> None:
    """Two keys a quarter apart at a score of 10,000."""
    q, k, v = np.asarray([[1.0]], F), np.asarray([[1e4], [1e4 + 0.25]], F), np.eye(2, dtype=F)
    expected = 1 / (1 + math.exp(0.25))
    np.testing.assert_allclose(attend(library, q, k, v)[0], [expected, 1 - expected], rtol=1e-6)


def test_views_strides_and_order(library: Library, rng: np.random.Generator) -> None:
    """Transposed, strided, reversed and zero-stride inputs give what their copies give."""
    if not library.name.startswith(("numpy", "torch", "cupy")):
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


@pytest.mark.rule("R8")
@pytest.mark.leaves_out("torch-cuda-rules")
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


def test_scale_as_a_number_that_the_library_holds(library: Library) -> None:
    """0-D, whatever its floating dtype: a jit hands a number over so."""
    x = np.ones((3, 4), F)
    for dtype in ("float32", "float64"):
        if library.holds(dtype):
            result = library.call(scaled_dot_product_attention, x, x, x, scale=np.asarray(0.5, dtype))
            assert library.get(result).dtype == F


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_half_biases_are_added_in_float32(library: Library, rng: np.random.Generator) -> None:
    """40,000 twice is beyond float16."""
    library.needs("float16")
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((3, 4), (5, 4), (5, 4)))
    large = np.full((3, 5), 4e4, np.float16)
    output = attend(library, q, k, v, attn_mask=large, bias=large)
    np.testing.assert_allclose(output, attend(library, q, k, v), rtol=0, atol=2**-6)


@pytest.mark.rule("R18")
@pytest.mark.parametrize("other", [math.inf, math.nan, 1.0])
def test_a_bias_that_masks_does_so_whatever_the_other_is(
    library: Library, rng: np.random.Generator, other: float
) -> None:
    q, k, v = draw(rng, (3, 4), (5, 4), (5, 4))
    mask, bias = np.zeros((3, 5), F), np.zeros((3, 5), F)
    mask[:, 0], bias[:, 0] = -math.inf, other
    expected = attend(library, q, k[1:], v[1:])
    np.testing.assert_allclose(attend(library, q, k, v, attn_mask=mask, bias=bias), expected, rtol=0, atol=1e-6)


def test_nan_key_under_a_mask_where_the_value_has_no_width(library: Library) -> None:
    """Only the lse can tell."""
    library.needs_empty_arrays()
    k = np.ones((2, 2), F)
    k[1] = math.nan
    bias = np.asarray([[0, -math.inf]], F)
    state = library.call(attention_state, np.ones((1, 2), F), k, np.ones((2, 0), F), bias=bias)
    assert library.get(state.lse)[0] == pytest.approx(math.sqrt(2))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_no_warning_and_no_error_of_numpy(library: Library, rng: np.random.Generator) -> None:
    """Under errstate raise: exp underflows, inf - inf, and a half result that is subnormal."""
    if library.lazy:
        pytest.skip("Dask computes after the call")
    q, k, v = draw(rng, (3, 4), (5, 4), (5, 4))
    k[4], k[3] = math.inf, 1e3
    bias = np.where(np.eye(3, 5) > 0, -math.inf, -90).astype(F)
    tiny = (np.asarray([[1], [0], [1], [0], [0]]) * np.asarray([[6e-8, 6e-8]])).astype(np.float16)
    with np.errstate(all="raise"):
        for function in (scaled_dot_product_attention, attention_state, attention_weights):
            values = () if function is attention_weights else (v,)
            library.call(function, q, k, *values, bias=bias, softcap=0.1)
            library.call(function, q, k, *values)
        if library.holds("float16"):
            half = [np.ones(s, np.float16) for s in ((3, 4), (5, 4))]
            state = library.call(attention_state, *half, tiny)
            library.call(attention_weights, half[0], half[1] * 20, bias=np.eye(3, 5, dtype=np.float16) * 16)
            with library.guard():
                merge_states([state, state])


NAMES = ("query", "key", "value")
SPECIAL = (math.nan, math.inf, -math.inf)
DTYPES = ("float16", "bfloat16", "float32", "float64")
AROUND_REGISTERS = [1, 2, 4, 7, 8, 9, 15, 16, 17, 33, 64]
"""Keys: a vector register holds 4 to 64 numbers, and kernels treat the last, partly filled one differently."""


def special_inputs(keys: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Query, key and value with a special value in one number or one whole token, the first or the last one."""
    rng = np.random.default_rng(keys)
    for name, value, token, whole in itertools.product(NAMES, SPECIAL, (0, -1), (False, True)):
        arrays = [rng.standard_normal((1, 1, length, 8)).astype(np.float32) for length in (3, keys, keys)]
        arrays[NAMES.index(name)][0, 0, token, slice(None) if whole else 0] = value
        yield f"{value} in {name}[{token}]{'' if whole else '[0]'}", arrays


def kinds(x: np.ndarray) -> np.ndarray:
    """0 for a finite number, 1 for NaN, 2 for inf, 3 for -inf."""
    return np.isnan(x) * 1 + np.isposinf(x) * 2 + np.isneginf(x) * 3


def assert_as_reference(library: Library, arrays: list[np.ndarray], what: str, **rules: Any) -> None:
    result = library.get(library.call(scaled_dot_product_attention, *arrays, **rules)).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = reference.attention(*(x.astype(np.float64) for x in arrays), **rules)[0]
    np.testing.assert_array_equal(kinds(result), kinds(expected), err_msg=what)
    finite = np.isfinite(expected)
    np.testing.assert_allclose(result[finite], expected[finite], rtol=0, atol=0.05, err_msg=what)


@pytest.mark.rule("R24", "R25")
@pytest.mark.sampled(3)
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all pairs", "causal"])
def test_special_values(library: Library, dtype: str, is_causal: bool) -> None:
    library.needs(dtype)
    compiles_each_shape = library.name.startswith("jax")
    for keys in [1, 17] if compiles_each_shape or library.lazy else AROUND_REGISTERS:
        for what, arrays in special_inputs(keys):
            placed = [x.astype(dtype) for x in arrays]
            assert_as_reference(library, placed, f"{what}, S={keys}", is_causal=is_causal)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("keys", [5, 17, 70])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_row_that_may_attend_only_the_last_key(library: Library, keys: int, name: str) -> None:
    """Its score is NaN and all others are masked: the row is NaN, and no empty row."""
    rng = np.random.default_rng(keys)
    arrays = [rng.standard_normal((1, 1, length, 8)).astype(np.float32) for length in (3, keys, keys)]
    arrays[NAMES.index(name)][0, 0, -1, 3] = math.nan
    mask = np.ones((3, keys), bool)
    mask[2] = np.arange(keys) == keys - 1
    for attn_mask in (mask, np.where(mask, 0, -math.inf).astype(np.float32)):
        assert_as_reference(library, arrays, name, attn_mask=attn_mask)


@pytest.mark.rule("R25")
@pytest.mark.leaves_out("jax-debug")
def test_finite_inputs_whose_scores_overflow(library: Library) -> None:
    """inf - inf within one product is NaN, though no input is: the row is NaN."""
    query, key = np.ones((1, 1, 2, 2), np.float32), np.ones((1, 1, 3, 2), np.float32)
    query[0, 0, 1] = 1e30
    key[...] = [1e30, -1e30]
    result = library.get(library.call(scaled_dot_product_attention, query, key, np.ones_like(key)))
    np.testing.assert_array_equal(np.isnan(result[0, 0]), [[False, False], [True, True]])
