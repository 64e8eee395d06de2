"""examples/one_file.py keeps the contract: the library's own tests of outputs run on it, in tiles of 3."""

from __future__ import annotations

import runpy
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import calls
import numpy as np
import one_file
import pytest
from calls import assert_agrees, attend, draw_masked
from libraries import LIBRARIES, Library

CORE = Path(__file__).parents[1] / "core"
OF_LIBRARY = {
    "test_laws.py": [
        "test_order_of_keys_does_not_matter",
        "test_shifting_the_scores_of_a_row_does_not_matter",
        "test_each_batch_entry_and_head_is_its_own",
        "test_causal_rows_do_not_see_what_comes_later",
        "test_outputs_lie_between_the_values",
    ],
    "test_semantics.py": [
        "test_2d_is_one_head_without_batch",
        "test_query_head_h_reads_key_head_h_div_group",
        "test_mask_of_any_broadcastable_shape",
        "test_padding_may_hold_anything",
        "test_nonfinite_of_one_head_stays_in_its_group",
        "test_nan_bias_is_attended",
        "test_scale_is_one_over_the_root_of_the_width_and_softcap_off",
        "test_the_same_result_every_time",
    ],
}
for file, names in OF_LIBRARY.items():
    tests = runpy.run_path(str(CORE / file))
    globals().update({name: tests[name] for name in names})
pytestmark = [
    pytest.mark.sampled(0, on="EAGER_JAX"),
    pytest.mark.leaves_out(*LIBRARIES.keys() - {"numpy", "torch", "jax", "strict-CPU_DEVICE"}),
    pytest.mark.filterwarnings("ignore:invalid value"),
]


@pytest.fixture(autouse=True)
def _in_place_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "scaled_dot_product_attention", partial(one_file.attention, tile=3))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"softcap": 2.0, "scale": -0.3}], ids=str)
@pytest.mark.parametrize("lengths", [(7, 9), (1, 4), (8, 2)], ids=str)
def test_agrees(
    library: Library, rng: np.random.Generator, dtype: str, rules: dict[str, Any], lengths: tuple[int, int]
) -> None:
    """Also rows without a key, of a mask and of a bias of -inf."""
    library.needs(dtype)
    queries, keys = lengths
    shapes = {
        "query": (2, 4, queries, 8),
        "key": (2, 2, keys, 8),
        "value": (2, 2, keys, 5),
        "attn_mask": (2, 1, queries, keys),
        "bias": (4, queries, keys),
    }
    arrays = draw_masked(rng, shapes, dtype)
    assert_agrees(library, attend(library, **arrays, **rules), arrays, **rules)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_shows_in_exactly_the_rows_that_attend_it(
    library: Library, rng: np.random.Generator, bad: float
) -> None:
    q, k, v = (rng.standard_normal((2, 9, 4)).astype(np.float32) for _ in range(3))
    clean = attend(library, q, k, v, is_causal=True)
    v[0, 4, 2] = bad
    clean[0, 4:, 2] = bad
    np.testing.assert_allclose(attend(library, q, k, v, is_causal=True), clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masks", ["bias", "both"])
def test_a_bias_of_minus_infinity_hides_nan(library: Library, rng: np.random.Generator, masks: str) -> None:
    """Also if a mask allows the pair."""
    q, k, v = (rng.standard_normal((2, 9, 4)).astype(np.float32) for _ in range(3))
    rules: dict[str, Any] = {"bias": np.where(np.arange(9) == 5, -np.inf, 0).astype(np.float32)}
    rules |= {"attn_mask": np.arange(9) != 2} if masks == "both" else {}
    clean = attend(library, q, k, v, **rules)
    k[:, 5], v[:, 5] = np.nan, np.inf
    np.testing.assert_allclose(attend(library, q, k, v, **rules), clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (5, 0)])
def test_without_queries_or_keys(library: Library, queries: int, keys: int) -> None:
    query, key = (np.ones((2, length, 4), np.float32) for length in (queries, keys))
    np.testing.assert_array_equal(attend(library, query, key, key), np.zeros(query.shape))


def test_memory_is_that_of_tiles() -> None:
    """All scores of 2,000 tokens are 16 MB, in float32."""
    x = np.ones((2_000, 8), np.float32)
    tracemalloc.start()
    one_file.attention(x, x, x, is_causal=True, tile=100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6
