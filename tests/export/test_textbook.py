"""The textbook formula, which sets how far results may be off, against the reference, with any axes."""

from __future__ import annotations

import itertools

import array_api_compat.numpy as xp
import numpy as np
import pytest
from internals import reference, stages

KEYS = {2: (5, 8), 3: (1, 5, 8), 4: (2, 1, 5, 8)}
QUERIES = {3: (4, 7, 8), 4: (2, 4, 7, 8)}


@pytest.mark.parametrize("ranks", [*itertools.product(QUERIES, KEYS, KEYS)], ids=str)
def test_axes(ranks: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal(QUERIES[ranks[0]]), rng.standard_normal(KEYS[ranks[1]])
    value = rng.standard_normal((*KEYS[ranks[2]][:-1], 3))
    output, lse, weights = reference.attention(query, key, value, is_causal=True)
    result = stages(xp, query, key, value, is_causal=True)
    np.testing.assert_allclose(result["output"], output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.broadcast_to(result["lse"], lse.shape), lse, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.broadcast_to(result["weights"], weights.shape), weights, rtol=0, atol=1e-14)
