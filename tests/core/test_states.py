"""States over parts of the keys merge to the state over all of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import reference
from libraries import LIBRARIES, Library

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


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_states_in_the_other_layout(library: Library, rng: np.random.Generator) -> None:
    """As many queries as heads: nothing but `layout` tells which axis of the output is which."""
    q, k, v = draw(rng, (2, 4, 4, 8), (2, 9, 4, 8), (2, 9, 4, 6))
    parts = [
        library.call(attention_state, q, k[:, keys], v[:, keys], layout="...LHE")
        for keys in (slice(0, 3), slice(3, 9))
    ]
    with library.guard():
        merged = merge_states(parts, layout="...LHE")
    output, lse, _ = reference.attention(*(np.swapaxes(x, 1, 2) for x in (q, k, v)))
    np.testing.assert_allclose(library.get(merged.output), np.swapaxes(output, 1, 2), rtol=0, atol=2e-6)
    np.testing.assert_allclose(library.get(merged.lse), lse, rtol=0, atol=2e-6)


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


def test_not_even_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"merge_states: `layout` must be '...HLE' or .*; got layout='BSHD'"):
        merge_states([state()], layout="BSHD")
    for nothing in (5, None):
        with pytest.raises(TypeError, match="merge_states: `states` must be the states to merge"):
            merge_states(nothing)


@pytest.mark.parametrize("base", [10, 0, "2", True, 2.5])
def test_other_bases_are_refused(base: Any) -> None:
    x = np.ones((2, 2), F)
    with pytest.raises(ValueError, match=r"attention_state: `lse_base` must be None \(e\) or 2; got lse_base="):
        attention_state(x, x, x, lse_base=base)
    with pytest.raises(ValueError, match=r"merge_states: `lse_base` must be None \(e\) or 2; got lse_base="):
        merge_states([attention_state(x, x, x)], lse_base=base)


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


@pytest.mark.parametrize(
    ("states", "error", "words"),
    [
        ([], ValueError, "`states` must hold at least one state"),
        ([np.zeros((3, 2))], TypeError, r"must be an AttentionState, \(output, lse\); got .*numpy.ndarray"),
        ([state(), state((4, 2), (4,))], ValueError, r"must have one shape.*\(3, 2\).*\(4, 2\)"),
        ([state(), state(dtype=np.float64)], TypeError, "must have one dtype.*float32.*float64"),
        ([state(), state(lse_dtype=np.float64)], TypeError, r"states\[1\].lse.*one dtype"),
        ([state(dtype=np.float16, lse_dtype=np.float16)], TypeError, "`lse` must be float32 if"),
        ([state((), ())], ValueError, "`lse` must have the shape of `output`"),
        ([state(dtype=np.int64)], TypeError, r"`states\[0\].output` must be one of float16"),
        ([AttentionState([[1.0]], [1.0])], TypeError, r"`states\[0\].output` must be a plain array"),
    ],
)
def test_refused(states: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="merge_states: .*" + words):
        merge_states(states)


@pytest.mark.needs("array_api_strict")
def test_states_on_several_devices_are_refused() -> None:
    first, other = (LIBRARIES[f"strict-{device}"][1]() for device in ("CPU_DEVICE", "device1"))
    output, lse = np.zeros((3, 2), F), np.zeros(3, F)
    here, there = ((library.put(output), library.put(lse)) for library in (first, other))
    for states in ([(here[0], there[1])], [here, there]):
        with pytest.raises(ValueError, match=r"merge_states: .*must be on one device"):
            merge_states(states)


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
    "key_ranges",
    [
        [(0, 4), (4, 9), (9, 10)],
        [range(4, 9), (9, 10), range(4)],
        [[(0, 2), (6, 10)], (2, 4), [range(4, 6)]],
        [(0, 10), (10, 10), []],
        ((np.int64(0), 3), [3, 5], [[5, 10]]),
    ],
)
def test_ranges_that_cover_all_keys(key_ranges: Any) -> None:
    merged = merge_states(PARTS, key_ranges=key_ranges, keys=10)
    np.testing.assert_array_equal(merged.lse, merge_states(PARTS).lse)


def test_ranges_may_count_more_keys_than_any_machine_holds() -> None:
    ranges, keys = [(0, 10**9), range(10**9, 10**12), (10**12, 10**15)], 10**15
    merged = merge_states(PARTS, key_ranges=ranges, keys=keys)
    np.testing.assert_array_equal(merged.lse, merge_states(PARTS).lse)
    with pytest.raises(ValueError, match="got no state over keys=1000000000000:1000000000007"):
        merge_states(PARTS, key_ranges=[*ranges[:2], (10**12 + 7, keys)], keys=keys)


@pytest.mark.parametrize(
    ("key_ranges", "keys", "words"),
    [
        ([(0, 4), (4, 9), (4, 9)], 9, r"must be in one state; got keys=4:9 in states\[1\] and states\[2\]"),
        (
            [(0, 4), (4, 9), (12, 20)],
            20,
            "the states must be over all 20 keys; got no state over keys=9:12. A state is missing",
        ),
        ([(0, 4), (4, 9), (9, 10)], 8, r"end beyond `keys`; got key_ranges\[2\]=9:10, keys=8"),
        ([[(0, 2), (1, 3)], (3, 4), (4, 5)], 5, r"keys=1:2 in states\[0\] and states\[0\]"),
        ([(1, 4), (4, 9), (9, 10)], 12, "no state over keys=0:1, 10:12"),
        ([(0, 4), (4, 9)], 9, "`key_ranges` must have one item for each state; got key_ranges=2, states=3"),
        ([(0, 4), (9, 4), (9, 10)], 10, r"`key_ranges\[1\]` must not end before it begins"),
        ([(0, 4), (-1, 4), (9, 10)], 10, r"`key_ranges\[1\]` must be at least 0"),
        (None, 10, "`keys` needs `key_ranges`"),
        ([(0, 4), (4, 9), (9, 10)], -1, "`keys` must be at least 0"),
    ],
)
def test_a_state_that_comes_twice_or_is_lost(key_ranges: Any, keys: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"merge_states: .*{words}"):
        merge_states(PARTS, key_ranges=key_ranges, keys=keys)


@pytest.mark.parametrize("item", [5, "ab", (1, 2, 3), range(0, 9, 2), [(1, 2), 3], [(1,)], (0.0, 4), (True, 4)])
def test_what_is_no_range_is_refused(item: Any) -> None:
    with pytest.raises(TypeError, match=r"merge_states: `key_ranges\[1\]` must be"):
        merge_states(PARTS[:2], key_ranges=[(0, 0), item])


def test_ranges_are_checked_before_anything_is_merged(library: Library) -> None:
    """Also of states that are traced or lazy."""
    with library.guard():
        parts = [AttentionState(*(library.put(x) for x in part)) for part in PARTS[:2]]
        with pytest.raises(ValueError, match="each key must be in one state"):
            merge_states(parts, key_ranges=[(0, 4), (0, 4)])
