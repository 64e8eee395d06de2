"""The log-sum-exp of a cache: that of its keys and of the positions of its queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import draw, moved
from internals import reference
from libraries import Library, generator

from sdpa_xp import AttentionState, KVCache, attention_state, biases, masks, merge_states
from sdpa_xp.positional import Rotary

F = np.float32
TOKENS, QUERIES, WINDOW = 9, 3, 4
POSITIONS = np.arange(TOKENS - QUERIES, TOKENS)[:, None]
DISTANCES = POSITIONS - np.arange(TOKENS)
SLOPES = np.asarray([0.5, 0.25, 1, 2], F)
SINKS = np.asarray([0.5, -3, 4, 1], F)
CAUSAL = DISTANCES >= 0

RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"attn_mask": CAUSAL}),
    "not causal": ({"is_causal": False}, {}),
    "window": ({"attn_mask": masks.sliding_window(2, 0)}, {"attn_mask": CAUSAL & (DISTANCES <= 2)}),
    "softcap, alibi": (
        {"softcap": 1.5, "bias": biases.alibi(SLOPES.tolist())},
        {"softcap": 1.5, "attn_mask": CAUSAL, "bias": -SLOPES[:, None, None] * np.abs(DISTANCES)},
    ),
    "sinks, scale": ({"sinks": SINKS, "scale": 0.4}, {"sinks": SINKS, "scale": 0.4, "attn_mask": CAUSAL}),
}


def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return draw(rng, (2, 4, QUERIES, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 5))


def state_of(library: Library, layout: Any = "...HLE", told: Any = None, **rules: Any) -> list[np.ndarray]:
    """The state of a cache whose last tokens were appended."""
    query, key, value = drawn()
    with library.guard():
        old, new = (
            [library.put(moved(x[:, :, part], layout)) for x in (key, value)]
            for part in (slice(0, 6), slice(6, TOKENS))
        )
        rules = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
        cache = KVCache(*old, layout=layout, **(told or {})).append(*new)
        state = cache.attend_state(library.put(moved(query, layout)), **rules)
        output = cache.attend(
            library.put(moved(query, layout)), **{k: x for k, x in rules.items() if k != "lse_base"}
        )
    assert isinstance(state, AttentionState)
    np.testing.assert_allclose(library.get(state.output), library.get(output), rtol=0, atol=2e-6)
    return [moved(library.get(state.output), layout), library.get(state.lse)]


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("name", RULES)
def test_a_state_is_that_of_its_tokens(library: Library, name: str, layout: str) -> None:
    options, plain = RULES[name]
    output, lse = state_of(library, layout, **options)
    expected, of_keys, _ = reference.attention(*drawn(), **plain)
    np.testing.assert_allclose(output, expected, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, of_keys, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_base_2_and_a_rotary(library: Library) -> None:
    rotary, (query, key, value) = Rotary(6), drawn()
    _, lse = state_of(library, told={"rotary": rotary}, lse_base=2)
    turned = [rotary.apply(x.astype(np.float64), first) for x, first in ((query, TOKENS - QUERIES), (key, 0))]
    _, expected, _ = reference.attention(*turned, value, attn_mask=CAUSAL)
    np.testing.assert_allclose(lse * math.log(2), expected, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_dropout_does_not_change_the_log_sum_exp(library: Library) -> None:
    query, key, value = drawn()
    with library.guard():
        cache = KVCache(library.put(key), library.put(value))
        states = [
            cache.attend_state(library.put(query), dropout_p=p, rng=generator(library)) for p in (0.0, 0.5)
        ]
    outputs, lses = ([library.get(x) for x in part] for part in zip(*states, strict=True))
    np.testing.assert_allclose(lses[1], lses[0], rtol=0, atol=1e-6)
    assert np.max(np.abs(outputs[1] - outputs[0])) > 0.1


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_a_cache_merges_with_keys_elsewhere(library: Library, layout: Any) -> None:
    """The keys of a shared prompt are in one array, those of each text in its cache."""
    query, key, value = drawn()
    rng = np.random.default_rng(1)
    prompt = draw(rng, (1, 2, 5, 8), (1, 2, 5, 5))
    with library.guard():
        placed, *tokens = (library.put(moved(x, layout)) for x in (query, key, value))
        shared = [library.put(moved(x, layout)) for x in prompt]
        states = [
            attention_state(placed, *shared, layout=layout),
            KVCache(*tokens, layout=layout).attend_state(placed),
        ]
        merged = merge_states(states, layout=layout)
    joined = [
        np.concatenate([np.repeat(x, 2, axis=0), y], axis=-2) for x, y in zip(prompt, (key, value), strict=True)
    ]
    allowed = np.concatenate([np.ones((QUERIES, 5), bool), CAUSAL], axis=-1)
    expected, of_keys, _ = reference.attention(query, *joined, attn_mask=allowed)
    np.testing.assert_allclose(moved(library.get(merged.output), layout), expected, rtol=0, atol=4e-6)
    np.testing.assert_allclose(library.get(merged.lse), of_keys, rtol=0, atol=4e-6)


def test_an_empty_cache(library: Library) -> None:
    if library.lazy:
        pytest.skip("Dask has no arrays of size 0")
    query, key, value = drawn()
    with library.guard():
        cache = KVCache(*(library.put(x[:, :, :0]) for x in (key, value)))
        state = cache.attend_state(library.put(query), is_causal=False)
    assert not library.get(state.output).any()
    assert np.all(np.isneginf(library.get(state.lse)))
