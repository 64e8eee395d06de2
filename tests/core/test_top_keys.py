"""The keys with the largest index scores, against a sort of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from internals import namespace
from libraries import Library

from sdpa_xp import masks, scaled_dot_product_attention, top_keys

F = np.float32


def positive(x: Any) -> Any:
    return np.maximum(x, 0)


def absolute(x: Any) -> Any:
    return namespace(x).abs(x)


class Case(NamedTuple):
    top_k: int
    key_heads: int = 1
    weights: tuple[int, ...] | None = None
    """The shape of the weights."""
    score: Callable[[Any], Any] | None = None
    rules: Mapping[str, Any] = MappingProxyType({})
    allowed: Any = True


CASES = {
    "plain": Case(3),
    "weights": Case(5, weights=(2, 4, 70, 1)),
    "weights of heads": Case(40, 2, (4, 1, 1)),
    "causal": Case(4, 4, (4, 70, 1), rules={"is_causal": True}, allowed=np.tri(70, 90, dtype=bool)),
    "mask": Case(4, score=absolute, rules={"attn_mask": masks.prefix([0, 3])}),
    "more than all": Case(95, rules={"attn_mask": masks.sliding_window(2, 0)}),
}


def largest(query: Any, key: Any, weights: Any, case: Case) -> Any:
    """Sort all scores; equal ones keep the order of the keys."""
    products = (case.score or positive)(query @ key.repeat(4 // key.shape[1], axis=1).mT)
    total = (products if weights is None else products * weights).sum(axis=1, keepdims=True)
    mask = case.rules.get("attn_mask")
    allowed = case.allowed if mask is None else masks.to_array(mask, (2, 1, 70, 90))
    total = np.where(allowed & ~np.isnan(total), total, -np.inf)
    order = np.argsort(-total, axis=-1, stable=True)[..., : case.top_k]
    chosen = np.where(np.take_along_axis(total, order, axis=-1) > -np.inf, order, -1)
    missing = np.full((2, 1, 70, case.top_k - chosen.shape[-1]), -1)
    return np.concatenate([chosen, missing], axis=-1)


@pytest.mark.leaves_out("jax-debug", "dask")  # one refuses NaN, and arrays in chunks are refused
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", CASES)
def test_the_largest_of_a_sort(rng: np.random.Generator, library: Library, name: str) -> None:
    """Of whole numbers, of which many are equal; one key is NaN."""
    case = CASES[name]
    query, key = (
        rng.integers(-2, 3, (2, heads, n, 4)).astype(F) for heads, n in ((4, 70), (case.key_heads, 90))
    )
    key[0, 0, 1] = np.nan
    weights = None if case.weights is None else rng.integers(-2, 4, case.weights).astype(F)
    more = {} if weights is None else {"weights": weights}
    result = library.call(top_keys, query, key, top_k=case.top_k, score=case.score, **more, **case.rules)
    np.testing.assert_array_equal(library.get(result), largest(query, key, weights, case))


def test_masks_take_what_it_returns(rng: np.random.Generator) -> None:
    """As DeepSeek's sparse attention does; also of 2-D inputs, and with a batch."""
    for shape in ((30, 8), (3, 30, 8), (2, 3, 30, 8)):
        x = rng.standard_normal(shape)
        indices = top_keys(x, x, 30, is_causal=True)
        expected = scaled_dot_product_attention(x, x, x, is_causal=True)
        np.testing.assert_allclose(
            scaled_dot_product_attention(x, x, x, masks.keys(indices)), expected, atol=1e-12
        )
