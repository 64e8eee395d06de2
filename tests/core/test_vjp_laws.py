"""What holds for the gradients of any attention, as properties of random calls."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from libraries import Library

from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
# Gradients below are sums of at most some hundred terms of size 10, whose roundings are 2^-20 each.
TOLERANCE = 2**-13


@st.composite
def calls(draw: Any) -> tuple[list[np.ndarray], dict[str, Any], Any]:
    """query, key, value; rules; and a source of more random numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, heads, group = (
        draw(st.sampled_from([(), (1,), (3,)])),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    )
    queries, keys = draw(st.sampled_from([1, 5, 9])), draw(st.sampled_from([1, 7, 13]))
    q = rng.standard_normal((*batch, heads * group, queries, 4))
    k = rng.standard_normal((*batch, heads, keys, 4))
    v = rng.standard_normal((*batch, heads, keys, 3))
    rules: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        rules["attn_mask"] = rng.random((*batch, heads * group, queries, keys)) < 0.6
    return [x.astype(F) for x in (q, k, v)], rules, rng


def gradients(
    library: Library, arrays: list[np.ndarray], cotangent: Any, **rules: Any
) -> dict[str, np.ndarray]:
    """`cotangent` is one array, or several that are pulled back one after the other."""
    _, pullback = library.call(vjp, *arrays, **rules)
    with library.guard():
        return {name: library.get(x) for name, x in pullback(library.put(cotangent)).items()}


def drawn(rng: Any, arrays: list[np.ndarray]) -> np.ndarray:
    q, _, v = arrays
    return rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(F)


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


pytestmark = [pytest.mark.mathematics, pytest.mark.usefixtures("small_tiles")]


@given(call=calls(), softcap=st.sampled_from([None, 2.0]))
def test_linear_in_the_cotangent(library: Library, call: Any, softcap: float | None) -> None:
    arrays, rules, rng = call
    one, other = drawn(rng, arrays), drawn(rng, arrays)
    _, pullback = library.call(vjp, *arrays, **rules, softcap=softcap)
    with library.guard():
        first, second, both = (pullback(library.put(x)) for x in (one, other, 2 * one - other))
    for name in both:
        close(library.get(both[name]), 2 * library.get(first[name]) - library.get(second[name]))


@given(call=calls())
def test_moving_all_keys_does_not_matter(library: Library, call: Any) -> None:
    """q (k + c) is q k and a number of the row's own, which the softmax does not see: gradients of keys add up
    to 0. So do those of what is added to the scores, in each row."""
    arrays, rules, rng = call
    per_row = np.zeros((*arrays[0].shape[:-1], 1), F)
    result = gradients(library, arrays, drawn(rng, arrays), bias=per_row, **rules)
    close(result["key"].sum(axis=-2), 0)
    close(result["bias"], 0)


@given(call=calls())
def test_a_factor_may_stand_anywhere(library: Library, call: Any) -> None:
    """Of the query, of the key or of the scale: the same function of each, so that x * gradient is the same."""
    arrays, rules, rng = call
    result = gradients(library, arrays, drawn(rng, arrays), scale=np.asarray(0.7, F), **rules)
    by_query, by_key = ((x * result[name]).sum() for x, name in zip(arrays, ("query", "key"), strict=False))
    close(by_query, by_key)
    close(by_query, F(0.7) * result["scale"])


@given(call=calls(), score=st.sampled_from([0.0, 3e4, -1e9, float(np.finfo(F).min)]))
def test_weights_sum_to_one(library: Library, call: Any, score: float) -> None:
    """Adding a vector to all values adds it to each row that attends a key, also if the scores are large."""
    arrays, rules, rng = call
    cotangent = drawn(rng, arrays)
    result = gradients(library, arrays, cotangent, bias=np.full((1, 1), score, F), **rules)
    attends = np.ones((arrays[0].shape[-2], arrays[1].shape[-2]), bool)
    attends = np.tril(attends) if rules["is_causal"] else attends
    has_keys = (attends & rules.get("attn_mask", True)).any(axis=-1, keepdims=True)
    batch, heads = arrays[1].shape[:-3], arrays[1].shape[-3]
    by_group = (cotangent * has_keys).reshape(*batch, heads, -1, arrays[2].shape[-1])
    close(result["value"].sum(axis=-2), by_group.sum(axis=-2))
