"""The log-sum-exp of packed sequences: of each as of one call, in float64 by the formula, and merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from calls import draw_named, moved
from internals import reference
from libraries import Library, generator

from sdpa_xp import (
    AttentionState,
    PagedKVCache,
    attention_state,
    biases,
    masks,
    merge_states,
    varlen_attention,
    varlen_attention_state,
)

F = np.float32
HEADS = 4
QUERIES, KEYS = [5, 0, 3, 1, 5], [7, 3, 0, 4, 7]
"""With a sequence without queries, one without keys, and two that are alike and lie apart."""
SINKS = np.linspace(-3, 4, 5 * HEADS, dtype=F).reshape(5, HEADS)
SCALES = np.linspace(0.1, 1, 5 * HEADS, dtype=F).reshape(5, HEADS, 1, 1)
Packed = dict[str, np.ndarray]

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"attn_mask": masks.sliding_window(2, 0, offset="lower_right")},
    "softcap, alibi": {"softcap": 1.5, "bias": biases.alibi(HEADS, offset="lower_right")},
    "function": {"attn_mask": masks.from_function(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % 3 > 0)},
}


def starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def packed(queries: Sequence[int], keys: Sequence[int]) -> Packed:
    shapes = {"query": (HEADS, sum(queries), 8), "key": (2, sum(keys), 8), "value": (2, sum(keys), 5)}
    return draw_named(np.random.default_rng(0), shapes)


def sequence(arrays: Packed, queries: Sequence[int], keys: Sequence[int], n: int) -> Packed:
    """The arrays of one sequence, (1, heads, length, width)."""
    bounds = {name: starts(queries if name == "query" else keys)[n : n + 2] for name in arrays}
    return {name: x[None, :, slice(*bounds[name])] for name, x in arrays.items()}


def state_of(library: Library, arrays: Packed, queries: Any, keys: Any, **rules: Any) -> list[np.ndarray]:
    rules = {"layout": "...HLE", "cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys)} | rules
    state = library.call(varlen_attention_state, **arrays, **rules)
    assert isinstance(state, AttentionState)
    return [library.get(x) for x in state]


def assert_each_is_one_call(
    state: list[np.ndarray], arrays: Packed, queries: Any, keys: Any, **rules: Any
) -> None:
    """Each sequence, against a call of its own in float64."""
    output, lse = state
    assert output.shape == (HEADS, sum(queries), 5)
    assert lse.shape == (HEADS, sum(queries))
    for n, (first, last) in enumerate(itertools.pairwise(starts(queries))):
        alone = sequence(arrays, queries, keys, n)
        expected = attention_state(**{name: x.astype(np.float64) for name, x in alone.items()}, **rules)
        np.testing.assert_allclose(output[:, first:last], expected.output[0], rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse[:, first:last], expected.lse[0], rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("name", RULES)
def test_each_sequence_is_one_call(library: Library, name: str) -> None:
    arrays = packed(QUERIES, KEYS)
    state = state_of(library, arrays, QUERIES, KEYS, **RULES[name])
    assert_each_is_one_call(state, arrays, QUERIES, KEYS, **RULES[name])
    assert np.all(np.isneginf(state[1][:, 5:8]))  # the queries of the sequence without keys


@pytest.mark.sampled(0, on="EAGER_JAX")
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    name=st.sampled_from(list(RULES)),
)
def test_any_lengths(library: Library, lengths: list[tuple[int, int]], name: str) -> None:
    if library.lazy:
        pytest.skip("the graphs of many calls take long; the calls above ask the same")
    queries, keys = ([pair[axis] for pair in lengths] for axis in (0, 1))
    hypothesis.assume(any(queries) and any(keys))
    arrays = packed(queries, keys)
    state = state_of(library, arrays, queries, keys, **RULES[name])
    assert_each_is_one_call(state, arrays, queries, keys, **RULES[name])


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("base", [None, 2])
def test_sinks_scale_and_base_by_the_formula(library: Library, base: int | None) -> None:
    """lse = log(exp(sink) + sum exp(score)), to the base; the output has the share that the sink leaves."""
    arrays = packed(QUERIES, KEYS)
    output, lse = state_of(library, arrays, QUERIES, KEYS, sinks=SINKS, scale=SCALES, lse_base=base)
    for n, (first, last) in enumerate(itertools.pairwise(starts(QUERIES))):
        alone = {name: x[0] for name, x in sequence(arrays, QUERIES, KEYS, n).items()}
        expected, of_keys, _ = reference.attention(**alone, scale=SCALES[n])
        total = np.logaddexp(of_keys, SINKS[n][:, None])
        np.testing.assert_allclose(lse[:, first:last] * math.log(base or math.e), total, rtol=0, atol=4e-6)
        share = np.exp(of_keys - total)[..., None]
        np.testing.assert_allclose(output[:, first:last], expected * share, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_the_output_is_that_of_varlen_attention(library: Library, layout: Any) -> None:
    arrays = {name: moved(x, layout) for name, x in packed(QUERIES, KEYS).items()}
    rules = {"cu_seqlens_q": starts(QUERIES), "cu_seqlens_k": starts(KEYS), "layout": layout, "is_causal": True}
    state = library.call(varlen_attention_state, **arrays, **rules)
    output = library.get(library.call(varlen_attention, **arrays, **rules))
    np.testing.assert_allclose(library.get(state.output), output, rtol=0, atol=2e-6)
    assert tuple(state.lse.shape) == (HEADS, sum(QUERIES))  # in both layouts


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_a_shared_prefix_merges(library: Library, layout: Any) -> None:
    """Cascade attention: one call over the prefix for all queries, one over the keys of each sequence."""
    queries, keys, prefix = [3, 1, 2], [4, 2, 2], 6
    arrays, shared = packed(queries, keys), packed([1], [prefix])
    placed = {name: moved(x, layout) for name, x in arrays.items()}
    apart = library.call(
        varlen_attention_state,
        **placed,
        cu_seqlens_q=starts(queries),
        cu_seqlens_k=starts(keys),
        attn_mask=masks.causal("lower_right"),
        layout=layout,
    )
    prefix_of = {name: moved(shared[name], layout) for name in ("key", "value")}
    common = library.call(attention_state, placed["query"], **prefix_of, layout=layout)
    with library.guard():
        merged = merge_states([common, apart], layout=layout)
    output, lse = moved(library.get(merged.output), layout), library.get(merged.lse)
    for n, (first, last) in enumerate(itertools.pairwise(starts(queries))):
        alone = {name: x[0] for name, x in sequence(arrays, queries, keys, n).items()}
        joined = {name: np.concatenate([shared[name], alone[name]], axis=-2) for name in ("key", "value")}
        i, j = np.ogrid[: queries[n], : prefix + keys[n]]
        allowed = j <= i + prefix + keys[n] - queries[n]
        expected, of_keys, _ = reference.attention(alone["query"], **joined, attn_mask=allowed)
        np.testing.assert_allclose(output[:, first:last], expected, rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse[:, first:last], of_keys, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(library: Library, dtype: str) -> None:
    """The output has the query's dtype, the log-sum-exp the accumulation dtype."""
    if not library.holds(dtype):
        pytest.skip("this library has no such dtype")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    arrays = {name: x.astype(kind) for name, x in packed(QUERIES, KEYS).items()}
    rules = {"cu_seqlens_q": starts(QUERIES), "cu_seqlens_k": starts(KEYS), "layout": "...HLE"}
    state = library.call(varlen_attention_state, **arrays, **rules)
    assert library.get(state.output).dtype.name == dtype
    assert library.get(state.lse).dtype.name == ("float64" if dtype == "float64" else "float32")


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_dropout_does_not_change_the_log_sum_exp(library: Library) -> None:
    arrays = packed(QUERIES, KEYS)
    plain = state_of(library, arrays, QUERIES, KEYS)
    with library.guard():
        dropped = state_of(library, arrays, QUERIES, KEYS, dropout_p=0.5, rng=generator(library))
    np.testing.assert_allclose(dropped[1], plain[1], rtol=0, atol=1e-6)
    assert np.max(np.abs(dropped[0] - plain[0])) > 0.1


@pytest.mark.needs("torch")
def test_without_any_key_all_gradients_are_zero() -> None:
    """A constant output is connected to all that may be learned, also in masks, biases and caches."""
    import torch

    def leaf(*shape: int) -> Any:
        return torch.ones(shape, requires_grad=True)

    query, keys, slopes, sinks = leaf(3, HEADS, 4), leaf(0, 2, 4), leaf(HEADS), leaf(HEADS)
    rules = {"bias": biases.alibi(slopes), "sinks": sinks}
    pool = leaf(2, 4, 2, 4)
    cache = PagedKVCache(pool, pool.detach().clone(), [[0]], [0], layout="...LHE")
    outputs = {
        "varlen": (varlen_attention(query, keys, keys, [0, 3], [0, 0], **rules), [keys]),
        "packed": (cache.attend(query, cu_seqlens_q=[0, 3], is_causal=False, **rules), [pool]),
        "batch": (cache.attend(query[None], is_causal=False, **rules), [pool]),
    }
    for output, others in outputs.values():
        leaves = [query, slopes, sinks, *others]
        for gradient in torch.autograd.grad(output.sum(), leaves, materialize_grads=True):
            assert not gradient.any()


@pytest.mark.needs("torch")
def test_gradients_of_the_log_sum_exp() -> None:
    """d lse / d query is scale * (weights @ key), for each sequence; of a sequence without keys it is 0."""
    import torch

    arrays = {name: x.astype(np.float64) for name, x in packed(QUERIES, KEYS).items()}
    tensors = {name: torch.asarray(x).requires_grad_() for name, x in arrays.items()}
    state = varlen_attention_state(
        **tensors, cu_seqlens_q=starts(QUERIES), cu_seqlens_k=starts(KEYS), layout="...HLE"
    )
    finite = torch.isfinite(state.lse)
    (gradient,) = torch.autograd.grad(state.lse[finite].sum(), [tensors["query"]])
    for n, (first, last) in enumerate(itertools.pairwise(starts(QUERIES))):
        alone = {name: x[0] for name, x in sequence(arrays, QUERIES, KEYS, n).items()}
        *_, weights = reference.attention(**alone)
        expected = weights @ np.repeat(alone["key"], 2, axis=0) / math.sqrt(8)
        np.testing.assert_allclose(gradient[:, first:last].numpy(), expected, rtol=0, atol=1e-12)
