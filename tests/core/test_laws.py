"""What holds for any attention and for its gradients, as properties of random calls."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from calls import attend
from hypothesis import given
from libraries import Library

from sdpa_xp import attention_state, attention_weights, merge_states
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
# Scores stay below about 10, where their rounding is 2^-20; the laws are exact but for that.
TOLERANCE = 2**-17
# Gradients are sums of at most some hundred terms of size 10, whose roundings are 2^-20 each.
TOLERANCE_OF_GRADIENTS = 2**-13


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
    width, value_width = draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([1, 3]))
    q = rng.standard_normal((*batch, heads * group, queries, width))
    k = rng.standard_normal((*batch, heads, keys, width))
    v = rng.standard_normal((*batch, heads, keys, value_width))
    rules: dict[str, Any] = {"is_causal": draw(st.booleans()), "softcap": draw(st.sampled_from([None, 4.0]))}
    if draw(st.booleans()):
        rules["attn_mask"] = rng.random((*batch, heads * group, queries, keys)) < draw(
            st.sampled_from([0.1, 0.8])
        )
    return [x.astype(F) for x in (q, k, v)], rules, rng


def close(one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


pytestmark = [pytest.mark.sampled(0, on="THIN"), pytest.mark.usefixtures("small_tiles")]


@given(call=calls())
def test_order_of_keys_does_not_matter(library: Library, call: Any) -> None:
    (q, k, v), rules, rng = call
    rules["is_causal"] = False
    order = rng.permutation(k.shape[-2])
    moved = rules | ({"attn_mask": rules["attn_mask"][..., order]} if "attn_mask" in rules else {})
    close(attend(library, q, k[..., order, :], v[..., order, :], **moved), attend(library, q, k, v, **rules))


@given(call=calls())
def test_shifting_the_scores_of_a_row_does_not_matter(library: Library, call: Any) -> None:
    (q, k, v), rules, rng = call
    shift = rng.integers(-4, 5, (*q.shape[:-1], 1)).astype(F)
    close(attend(library, q, k, v, bias=shift, **rules), attend(library, q, k, v, **rules))


@given(call=calls())
def test_each_batch_entry_and_head_is_its_own(library: Library, call: Any) -> None:
    (q, k, v), rules, _ = call
    whole = attend(library, q, k, v, **rules)
    group = q.shape[-3] // k.shape[-3]
    for *entry, head in np.ndindex(*q.shape[:-2]):
        index, shared = (*entry, head), (*entry, head // group)
        own_rules = rules | ({"attn_mask": rules["attn_mask"][index]} if "attn_mask" in rules else {})
        close(attend(library, q[index], k[shared], v[shared], **own_rules), whole[index])


@given(call=calls())
def test_causal_rows_do_not_see_what_comes_later(library: Library, call: Any) -> None:
    (q, k, v), rules, rng = call
    rules["is_causal"] = True
    n = int(rng.integers(1, k.shape[-2] + 1))
    later_k, later_v = k.copy(), v.copy()
    later_k[..., n:, :], later_v[..., n:, :] = 3, -3
    before, after = attend(library, q, k, v, **rules), attend(library, q, later_k, later_v, **rules)
    close(before[..., :n, :], after[..., :n, :])


@given(call=calls())
def test_parts_merge_to_the_whole(library: Library, call: Any) -> None:
    (q, k, v), rules, rng = call
    if k.shape[-2] == 1:
        return
    rules["is_causal"] = False
    n = int(rng.integers(1, k.shape[-2]))
    whole = library.call(attention_state, q, k, v, **rules)
    parts = []
    for part in (slice(None, n), slice(n, None)):
        part_rules = rules | ({"attn_mask": rules["attn_mask"][..., part]} if "attn_mask" in rules else {})
        parts.append(library.call(attention_state, q, k[..., part, :], v[..., part, :], **part_rules))
    with library.guard():
        merged = merge_states(parts)
    close(library.get(merged.output), library.get(whole.output))
    finite = np.isfinite(library.get(whole.lse))
    np.testing.assert_array_equal(np.isfinite(library.get(merged.lse)), finite)
    close(library.get(merged.lse)[finite], library.get(whole.lse)[finite])


@given(call=calls())
def test_weights_sum_to_one_and_give_the_output(library: Library, call: Any) -> None:
    (q, k, v), rules, _ = call
    w = library.get(library.call(attention_weights, q, k, **rules))
    sums = w.sum(axis=-1)
    assert np.all(w >= 0)
    assert np.all((np.abs(sums - 1) <= TOLERANCE) | (sums == 0))
    repeated = np.repeat(v, q.shape[-3] // v.shape[-3], axis=-3)
    close(w @ repeated, attend(library, q, k, v, **rules))


@given(call=calls())
def test_outputs_lie_between_the_values(library: Library, call: Any) -> None:
    """In every column; a row without a key is 0."""
    (q, k, v), rules, _ = call
    output = attend(library, q, k, v, **rules)
    repeated = np.repeat(v, q.shape[-3] // v.shape[-3], axis=-3)
    low, high = (f(repeated, axis=-2, keepdims=True) for f in (np.min, np.max))
    empty = np.all(output == 0, axis=-1, keepdims=True)
    assert np.all(empty | ((output >= low - TOLERANCE) & (output <= high + TOLERANCE)))


@given(call=calls(), score=st.sampled_from([0.0, 3e4, -1e9, float(np.finfo(F).min)]))
def test_gradients_of_values_add_up(library: Library, call: Any, score: float) -> None:
    """Adding a vector to all values adds it to each row that attends a key, also if the scores are large."""
    (q, k, v), rules, rng = call
    cotangent = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(F)
    _, pullback = library.call(vjp, q, k, v, bias=np.full((1, 1), score, F), **rules)
    with library.guard():
        gradient = library.get(pullback(library.put(cotangent))["value"])
    attends = np.ones((q.shape[-2], k.shape[-2]), bool)
    attends = np.tril(attends) if rules["is_causal"] else attends
    has_keys = (attends & rules.get("attn_mask", True)).any(axis=-1, keepdims=True)
    by_group = (cotangent * has_keys).reshape(*k.shape[:-2], -1, v.shape[-1]).sum(axis=-2)
    np.testing.assert_allclose(gradient.sum(axis=-2), by_group, rtol=0, atol=TOLERANCE_OF_GRADIENTS)
