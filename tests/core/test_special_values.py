"""NaN and inf in query, key and value show in exactly the rows that attend them, whichever kernel computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import reference
from libraries import Library

from sdpa_xp import scaled_dot_product_attention

NAMES = ("query", "key", "value")
SPECIAL = (math.nan, math.inf, -math.inf)
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
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


@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all pairs", "causal"])
def test_special_values(library: Library, dtype: str, is_causal: bool) -> None:
    if not library.holds(dtype):
        pytest.skip(f"{library.name} has no {dtype}")
    compiles_each_shape = library.name.startswith("jax")
    for keys in [1, 17] if compiles_each_shape or library.lazy else AROUND_REGISTERS:
        for what, arrays in special_inputs(keys):
            placed = [x.astype(DTYPES[dtype]) for x in arrays]
            assert_as_reference(library, placed, f"{what}, S={keys}", is_causal=is_causal)


@pytest.mark.long_on_jax
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


@pytest.mark.leaves_out("jax-debug")
def test_finite_inputs_whose_scores_overflow(library: Library) -> None:
    """inf - inf within one product is NaN, though no input is: the row is NaN."""
    query, key = np.ones((1, 1, 2, 2), np.float32), np.ones((1, 1, 3, 2), np.float32)
    query[0, 0, 1] = 1e30
    key[...] = [1e30, -1e30]
    result = library.get(library.call(scaled_dot_product_attention, query, key, np.ones_like(key)))
    np.testing.assert_array_equal(np.isnan(result[0, 0]), [[False, False], [True, True]])
