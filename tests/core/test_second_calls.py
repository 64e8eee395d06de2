"""A call that is like one before is not checked again: it gives what the first one gave, whatever its axes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from calls import draw

from sdpa_xp import attention_state, attention_weights, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
QUERIES = {2: (7, 8), 3: (4, 7, 8), 4: (2, 4, 7, 8), 5: (3, 1, 4, 7, 8)}
KEYS = {2: (5, 8), 3: (2, 5, 8), 4: (2, 2, 5, 8), 5: (3, 2, 2, 5, 8)}


def drawn(ranks: tuple[int, int, int], layout: str, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [QUERIES[ranks[0]], KEYS[ranks[1]], (*KEYS[ranks[2]][:-1], 3)]
    arrays = draw(rng, *shapes)
    return [x.swapaxes(-2, -3) if layout == "...LHE" and x.ndim > 2 else x for x in arrays]


def fitting(ranks: tuple[int, int, int]) -> bool:
    """Keys and values have as many heads; a query of 2 axes has one head, and takes keys of one."""
    query, key, value = ranks
    return (key == 2) == (value == 2) and (query > 2 or key == 2)


RANKS = [ranks for ranks in itertools.product(QUERIES, repeat=3) if fitting(ranks)]


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_the_second_call(ranks: tuple[int, int, int], layout: str) -> None:
    one, other = (drawn(ranks, layout, seed) for seed in (0, 1))
    functions: list[Any] = [
        lambda *x: [scaled_dot_product_attention(*x, layout=layout)],
        lambda *x: attention_state(*x, layout=layout, is_causal=True),
        lambda *x: [attention_weights(*x[:2], layout=layout)],
        lambda *x: [*(pair := vjp(*x, layout=layout))[1](pair[0]).values()],
    ]
    for function in functions:
        first = function(*one)
        function(*other)
        for result, expected in zip(function(*one), first, strict=True):
            np.testing.assert_array_equal(result, expected)
