"""States over parts of the keys merge to the state over all of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import reference
from libraries import Library

from sdpa_xp import AttentionState, attention_state, merge_states

F = np.float32


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("cuts", [[0, 13], [0, 1, 13], [0, 5, 6, 13], [0, 0, 13, 13]])
def test_any_split_merges_to_the_whole(library: Library, rng: np.random.Generator, cuts: list[int]) -> None:
    if library.lazy and len(set(cuts)) < len(cuts):
        pytest.skip("Dask has no arrays of size 0")
    q, k, v = draw(rng, (2, 4, 3, 8), (2, 2, 13, 8), (2, 2, 13, 5))
    mask = rng.random((4, 3, 13)) < 0.5
    mask[:, 1] = False
    states = [
        library.call(attention_state, q, k[..., a:b, :], v[..., a:b, :], attn_mask=mask[..., a:b])
        for a, b in itertools.pairwise(cuts)
    ]
    with library.guard():
        merged = merge_states(states)
    output, lse, _ = reference.attention(q, k, v, mask)
    np.testing.assert_allclose(library.get(merged.output), output, rtol=0, atol=2e-6)
    np.testing.assert_allclose(library.get(merged.lse), lse, rtol=0, atol=2e-6)
    assert merged.output.dtype == states[0].output.dtype


@pytest.mark.rule("R5")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_base_2_in_and_out(library: Library, rng: np.random.Generator) -> None:
    """As FlashInfer has it: 2^lse is the sum of exp(score); -inf stays, and the outputs are the same."""
    q, k, v = draw(rng, (4, 3, 8), (2, 13, 8), (2, 13, 5))
    mask = np.ones((3, 13), bool)
    mask[1] = False
    output, lse, _ = reference.attention(q, k, v, mask)
    whole = library.call(attention_state, q, k, v, attn_mask=mask, lse_base=2)
    parts = [
        library.call(attention_state, q, k[:, keys, :], v[:, keys, :], attn_mask=mask[:, keys], lse_base=2)
        for keys in (slice(0, 6), slice(6, 13))
    ]
    with library.guard():
        merged = merge_states(parts, lse_base=2)
    for state in (whole, merged):
        np.testing.assert_allclose(library.get(state.output), output, rtol=0, atol=2e-6)
        np.testing.assert_allclose(library.get(state.lse), lse / math.log(2), rtol=0, atol=4e-6)
    same = library.call(attention_state, q, k, v, attn_mask=mask, lse_base=math.e)
    np.testing.assert_allclose(library.get(same.lse), lse, rtol=0, atol=2e-6)


def test_states_of_a_wider_softmax(library: Library, rng: np.random.Generator) -> None:
    library.needs("float64")
    q, k, v = draw(rng, (3, 8), (9, 8), (9, 5))
    parts = [
        library.call(attention_state, q, k[keys], v[keys], softmax_dtype="float64") for keys in np.s_[:4, 4:]
    ]
    with library.guard():
        merged = merge_states(parts)
    assert merged.lse.dtype == parts[0].lse.dtype != merged.output.dtype
    np.testing.assert_allclose(library.get(merged.lse), reference.attention(q, k, v)[1], rtol=0, atol=1e-12)


def test_state_without_a_key_adds_nothing(library: Library) -> None:
    """Even when its output is NaN, as other libraries leave it."""
    full = [np.asarray([[1.0, 2.0]], F), np.asarray([0.5], F)]
    empty = [np.asarray([[math.nan, math.inf]], F), np.asarray([-math.inf], F)]
    with library.guard():
        states = [AttentionState(*(library.put(x) for x in state)) for state in (empty, full, empty)]
        merged, nothing = merge_states(states), merge_states([states[0], states[2]])
    np.testing.assert_array_equal(library.get(merged.output), full[0])
    np.testing.assert_array_equal(library.get(merged.lse), full[1])
    np.testing.assert_array_equal(library.get(nothing.output), [[0, 0]])
    np.testing.assert_array_equal(library.get(nothing.lse), [-math.inf])


def test_weights_far_apart(library: Library) -> None:
    """exp(lse) overflows for both; the larger one wins."""
    with library.guard():
        states = [
            AttentionState(library.put(np.full((1, 1), x, F)), library.put(np.full(1, lse, F)))
            for x, lse in ((1.0, 1e4), (2.0, 2e4))
        ]
        merged = merge_states(iter(states))
    assert library.get(merged.output)[0, 0] == 2
    assert library.get(merged.lse)[0] == 2e4


def state(output: Any = (3, 2), lse: Any = (3,), dtype: Any = F, lse_dtype: Any = F) -> AttentionState:
    return AttentionState(np.zeros(output, dtype), np.zeros(lse, lse_dtype))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_states(library: Library, rng: np.random.Generator, dtype: str) -> None:
    """Merged in float32 and rounded once; a plain pair does as well as an AttentionState."""
    library.needs(dtype)
    q, k, v = draw(rng, (3, 8), (9, 8), (9, 4), dtype=dtype)
    states = [library.call(attention_state, q, k[i : i + 3], v[i : i + 3]) for i in (0, 3, 6)]
    with library.guard():
        merged = merge_states([tuple(state) for state in states])
    assert merged.output.dtype == states[0].output.dtype
    assert merged.lse.dtype == states[0].lse.dtype
    output = reference.attention(q, k, v)[0]
    eps = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    np.testing.assert_allclose(library.get(merged.output).astype(F), output, rtol=0, atol=4 * eps)


@pytest.mark.leaves_out("jax-debug")
def test_an_attended_nan_survives_a_small_weight(library: Library) -> None:
    """Its state weighs exp(-200) beside the other; the whole would be NaN, and so is the merge."""
    q, k, v = np.ones((1, 1), F), np.asarray([[0], [-200]], F), np.asarray([[1], [math.nan]], F)
    states = [library.call(attention_state, q, k[i : i + 1], v[i : i + 1]) for i in (0, 1)]
    with library.guard():
        merged = merge_states(states)
    assert math.isnan(library.get(merged.output)[0, 0])
    assert math.isnan(library.get(library.call(attention_state, q, k, v).output)[0, 0])


PARTS = [state() for _ in range(3)]


@pytest.mark.parametrize(
    ("key_ranges", "keys"),
    [
        ([(0, 4), (4, 9), (9, 10)], 10),
        ([range(4, 9), (9, 10), range(4)], 10),
        ([[(0, 2), (6, 10)], (2, 4), [range(4, 6)]], 10),
        ([(0, 10), (10, 10), []], 10),
        (((np.int64(0), 3), [3, 5], [[5, 10]]), 10),
        ([(0, 10**9), range(10**9, 10**12), (10**12, 10**15)], 10**15),  # more than any machine holds
    ],
)
def test_ranges_that_cover_all_keys(key_ranges: Any, keys: int) -> None:
    merged = merge_states(PARTS, key_ranges=key_ranges, keys=keys)
    np.testing.assert_array_equal(merged.lse, merge_states(PARTS).lse)
