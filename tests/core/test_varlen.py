"""Packed sequences attend each within itself, as in a loop over them: the output and the log-sum-exp."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from calls import draw_named, moved
from internals import judge, reference, scores, textbook
from libraries import Library, generator

from sdpa_xp import (
    AttentionState,
    PagedKVCache,
    biases,
    masks,
    scaled_dot_product_attention,
    varlen_attention,
    varlen_attention_state,
)

F = np.float32
HEADS = 4
LENGTHS = QUERIES, KEYS = [5, 0, 3, 1], [7, 3, 0, 4]
"""With a sequence without queries, and one without keys."""
OFFSETS, PREFIXES = np.asarray([1, 0, 2, -1]), np.asarray([2, 9, 0, 3])
SLOPES = np.linspace(0, 2, 4 * HEADS, dtype=F).reshape(4, HEADS)
SINKS = np.linspace(-3, 4, 4 * HEADS, dtype=F).reshape(4, HEADS)
OPEN = (np.arange(4 * HEADS).reshape(4, HEADS, 1, 1) % 3) > 0
Packed = dict[str, np.ndarray]


class Case(NamedTuple):
    """Keywords, and what they mean for sequence b, head h, query i of L and key j of S."""

    rules: dict[str, Any]
    allowed: Callable[..., Any] = lambda b, h, i, j, l, s: True
    bias: Callable[..., Any] = lambda b, h, i, j, l, s: 0.0


CASES = {
    "plain": Case({}),
    "is_causal": Case({"is_causal": True}, lambda b, h, i, j, l, s: j <= i),
    "lower right": Case({"attn_mask": masks.causal("lower_right")}, lambda b, h, i, j, l, s: j <= i + s - l),
    "window": Case({"attn_mask": masks.sliding_window(1, 0)}, lambda b, h, i, j, l, s: (j <= i) & (j >= i - 1)),
    "window, lower right": Case(
        {"attn_mask": masks.sliding_window(2, 0, offset="lower_right")},
        lambda b, h, i, j, l, s: (j <= i + s - l) & (j >= i + s - l - 2),
    ),
    "offsets or prefixes": Case(
        {"attn_mask": masks.causal(OFFSETS.tolist()) | masks.prefix(PREFIXES.tolist())},
        lambda b, h, i, j, l, s: (j <= i + OFFSETS[b]) | (j < PREFIXES[b]),
    ),
    "function": Case(
        {"attn_mask": masks.from_function(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % (b + 2) > 0)},
        lambda b, h, i, j, l, s: (i + j + h) % (b + 2) > 0,
    ),
    "array": Case({"attn_mask": OPEN}, lambda b, h, i, j, l, s: OPEN[b, h, 0, 0]),
    "alibi": Case(
        {"bias": biases.alibi(4), "is_causal": True},
        lambda b, h, i, j, l, s: j <= i,
        lambda b, h, i, j, l, s: -(2.0 ** (-2 * (h + 1))) * abs(i - j),
    ),
    "alibi, lower right": Case(
        {"bias": biases.alibi(4, offset="lower_right")},
        bias=lambda b, h, i, j, l, s: -(2.0 ** (-2 * (h + 1))) * abs(i + s - l - j),
    ),
    "bias array": Case({"bias": SLOPES[:, :, None, None]}, bias=lambda b, h, i, j, l, s: SLOPES[b, h] + 0 * j),
}


def sums(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def packed(queries: list[int], keys: list[int], seed: int = 0) -> Packed:
    """(Hq, T, E), (H, U, E) and (H, U, Ev)."""
    rng = np.random.default_rng(seed)
    shapes = {"query": (HEADS, sum(queries), 8), "key": (2, sum(keys), 8), "value": (2, sum(keys), 5)}
    return draw_named(rng, shapes)


def padded(arrays: Packed, queries: list[int], keys: list[int], case: Case) -> Packed:
    """One call over padded arrays, (N, heads, longest, width); pairs of padding may not attend."""
    N, L, S = len(queries), max(queries), max(keys)
    call = {
        name: np.zeros((N, len(x), L if name == "query" else S, x.shape[-1]), F) for name, x in arrays.items()
    }
    mask, bias = np.zeros((N, HEADS, L, S), bool), np.zeros((N, HEADS, L, S), F)
    starts = {"query": sums(queries), "key": sums(keys), "value": sums(keys)}
    for b, (l, s) in enumerate(zip(queries, keys, strict=True)):
        h, i, j = np.ogrid[:HEADS, :l, :s]
        mask[b, :, :l, :s], bias[b, :, :l, :s] = case.allowed(b, h, i, j, l, s), case.bias(b, h, i, j, l, s)
        for name, x in arrays.items():
            sequence = x[:, starts[name][b] : starts[name][b + 1]]
            call[name][b, :, : sequence.shape[1]] = sequence
    return call | {"attn_mask": mask, "bias": bias}


def rows_of(x: np.ndarray, queries: list[int]) -> np.ndarray:
    """(N, Hq, longest, Ev) -> (Hq, T, Ev)."""
    return np.concatenate([x[b, :, :l] for b, l in enumerate(queries)], axis=-2)


def attend(library: Library, arrays: Packed, queries: Any, keys: Any, **rules: Any) -> np.ndarray:
    rules = {"layout": "...HLE", "cu_seqlens_q": sums(queries), "cu_seqlens_k": sums(keys)} | rules
    return library.get(library.call(varlen_attention, **arrays, **rules))


def state_of(library: Library, arrays: Packed, queries: Any, keys: Any, **rules: Any) -> list[np.ndarray]:
    rules = {"layout": "...HLE", "cu_seqlens_q": sums(queries), "cu_seqlens_k": sums(keys)} | rules
    state = library.call(varlen_attention_state, **arrays, **rules)
    assert isinstance(state, AttentionState)
    return [library.get(x) for x in state]


def assert_right(
    library: Library, arrays: Packed, lengths: Any, case: Case, layout: str = "...HLE", **told: Any
) -> None:
    """Output and state are those of a loop of the reference over the sequences."""
    queries, keys = lengths
    passed = {name: moved(x, layout) for name, x in arrays.items()}
    rules = case.rules | told | {"layout": layout}
    result = moved(attend(library, passed, queries, keys, **rules), layout)
    output, lse = state_of(library, passed, queries, keys, **rules, lse_base=2)
    call = padded(arrays, queries, keys, case)
    with np.errstate(all="ignore"):
        plain = library.get(library.compiled.call(lambda **x: textbook(library.xp, **x), **call, **told))
        parts = []
        for b, l in enumerate(queries):
            sequence = {name: x[b, :, :l] for name, x in call.items() if name not in ("key", "value")}
            sequence |= {name: call[name][b] for name in ("key", "value")}
            of_sequence = {name: x[b] for name, x in told.items() if np.ndim(x) > 1}
            parts.append(reference.attention(**sequence, **(told | of_sequence)))
    expected, of_keys = (np.concatenate([part[n] for part in parts], axis=n - 2) for n in (0, 1))
    for either in (result, moved(output, layout)):
        agreement = judge(either, expected, rows_of(plain, queries), "float32")
        assert agreement.agrees, agreement
    np.testing.assert_allclose(lse * math.log(2), of_keys, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("name", CASES)
def test_a_loop_over_the_sequences(library: Library, name: str) -> None:
    assert_right(library, packed(*LENGTHS), LENGTHS, CASES[name])


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("lengths", [([3] * 4, [4] * 4), ([3, 2, 3, 3], [4, 5, 4, 4])], ids=["all", "some"])
@pytest.mark.parametrize("name", CASES)
def test_equal_lengths_are_computed_together(
    library: Library, name: str, lengths: tuple[list[int], list[int]], layout: str
) -> None:
    """All of them side by side, or with another sequence in between."""
    rules = {"sinks": SINKS, "scale": SLOPES[:, :, None, None]}
    assert_right(library, packed(*lengths), lengths, CASES[name], layout, **rules)


def recorded_scores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all scores that are computed from now on."""
    shapes: list[tuple[int, ...]] = []
    product = scores.matmul_grouped

    def recorded(xp: Any, rows: Any, shared: Any, *buffer: Any) -> Any:
        result = product(xp, rows, shared, *buffer)
        if (
            rows.shape[-1] == shared.shape[-2] == 8 and result.size
        ):  # the other product is that of weights and values
            shapes.append(result.shape)
        return result

    monkeypatch.setattr(scores, "matmul_grouped", recorded)
    return shapes


def test_equal_lengths_are_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = recorded_scores(monkeypatch)
    lengths = [3, 2, 3, 3], [4, 5, 4, 4]
    varlen_attention(
        **packed(*lengths), cu_seqlens_q=sums(lengths[0]), cu_seqlens_k=sums(lengths[1]), layout="...HLE"
    )
    assert shapes == [(3, HEADS, 3, 4), (1, HEADS, 2, 5)]


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles(library: Library) -> None:
    assert_right(library, packed(*LENGTHS), LENGTHS, CASES["lower right"])


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("sinks", [SINKS[0], SINKS], ids=["one per head", "one per sequence and head"])
def test_sinks(library: Library, sinks: np.ndarray) -> None:
    assert_right(library, packed(*LENGTHS), LENGTHS, CASES["plain"], sinks=sinks)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_slopes_of_each_sequence(library: Library) -> None:
    with library.guard():
        bias = biases.alibi(library.put(SLOPES))
    case = Case({"bias": bias}, bias=lambda b, h, i, j, l, s: -SLOPES[b, h] * abs(i - j))
    assert_right(library, packed(*LENGTHS), LENGTHS, case)


def test_scale_and_softcap(library: Library) -> None:
    assert_right(library, packed(*LENGTHS), LENGTHS, CASES["plain"], scale=SINKS[:, :, None, None], softcap=1.5)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_padding_of_each_sequence(library: Library) -> None:
    """Lengths of keys, and of queries, that fit each its own sequence."""
    lengths = [1, 5], [4, 7]
    keys, queries = np.asarray([3, 6]), np.asarray([1, 4])
    mask = masks.padding(keys.tolist(), queries.tolist())
    case = Case({"attn_mask": mask}, lambda b, h, i, j, l, s: (j < keys[b]) & (i < queries[b]))
    assert_right(library, packed(*lengths), lengths, case)


@pytest.mark.parametrize("number", [True, 1.0])
@pytest.mark.parametrize("mask", [masks.padding, masks.causal, masks.prefix])
def test_what_equals_an_integer_is_refused(library: Library, mask: Any, number: Any) -> None:
    """In whichever sequence it is, and if they are computed together."""
    arrays = packed([2, 2], [2, 2])
    for numbers in ([number, 1], [1, number]):
        with pytest.raises(TypeError, match="must be an integer"):
            attend(library, arrays, [2, 2], [2, 2], attn_mask=mask(numbers))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_heads_stand_behind_the_length_by_default(library: Library) -> None:
    """As flash-attention packs; all in one sequence is attention itself."""
    arrays = packed([5], [7])
    behind = [moved(x, "...LHE") for x in arrays.values()]
    result = library.call(varlen_attention, *behind, cu_seqlens_q=[0, 5], cu_seqlens_k=(0, 7), is_causal=True)
    assert result.shape == (5, HEADS, 5)
    assert result.dtype == library.put(arrays["query"]).dtype
    expected = reference.attention(*arrays.values(), is_causal=True)[0]
    np.testing.assert_allclose(moved(library.get(result), "...LHE"), expected, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("how", ["of the library", "int32", "int64", "uint8"])
def test_lengths_of_any_kind(library: Library, how: str) -> None:
    """They are numbers, so they may be of another library than the arrays."""
    if how == "of the library" and library.lazy:
        pytest.skip("what is lazy cannot be read")
    arrays = packed(*LENGTHS)
    expected = attend(library, arrays, *LENGTHS)
    starts = [np.asarray(sums(lengths), "int32" if how == "of the library" else how) for lengths in LENGTHS]
    with library.guard():
        q, k = (library.put(x) for x in starts) if how == "of the library" else starts
        placed = {name: library.put(x) for name, x in arrays.items()}
        result = varlen_attention(**placed, cu_seqlens_q=q, cu_seqlens_k=k, layout="...HLE")
    np.testing.assert_array_equal(library.get(result), expected)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nonfinite_stays_in_its_sequence(library: Library, name: str, bad: float) -> None:
    arrays = packed(*LENGTHS)
    clean = attend(library, arrays, *LENGTHS, is_causal=True)
    begin = sums(LENGTHS[0 if name == "query" else 1])
    arrays[name][:, begin[0] : begin[1]] = bad
    output = attend(library, arrays, *LENGTHS, is_causal=True)
    np.testing.assert_array_equal(output[:, QUERIES[0] :], clean[:, QUERIES[0] :])
    assert not np.all(np.isfinite(output[:, : QUERIES[0]]))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_no_query_at_all_and_no_key_at_all(library: Library) -> None:
    library.needs_empty_arrays()
    nothing = attend(library, packed([0, 0], [3, 2]), [0, 0], [3, 2])
    assert nothing.shape == (HEADS, 0, 5)
    empty = attend(library, packed([3, 2], [0, 0]), [3, 2], [0, 0], is_causal=True)
    np.testing.assert_array_equal(empty, np.zeros((HEADS, 5, 5)))


@pytest.mark.sampled(0, on="EAGER_JAX")
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    name=st.sampled_from(["plain", "is_causal", "lower right", "function", "alibi, lower right"]),
)
def test_any_lengths(library: Library, lengths: list[tuple[int, int]], name: str) -> None:
    queries, keys = ([pair[axis] for pair in lengths] for axis in (0, 1))
    hypothesis.assume(any(queries) and any(keys))
    assert_right(library, packed(queries, keys), (queries, keys), CASES[name])


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(library: Library, dtype: str) -> None:
    """The output has the query's dtype, the log-sum-exp the accumulation dtype."""
    library.needs(dtype)
    arrays = {name: x.astype(dtype) for name, x in packed(*LENGTHS).items()}
    output, lse = state_of(library, arrays, *LENGTHS)
    assert (output.dtype.name, lse.dtype.name) == (dtype, "float64" if dtype == "float64" else "float32")


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_dropout_does_not_change_the_log_sum_exp(library: Library) -> None:
    arrays = packed(*LENGTHS)
    plain = state_of(library, arrays, *LENGTHS)
    with library.guard():
        dropped = state_of(library, arrays, *LENGTHS, dropout_p=0.5, rng=generator(library))
    np.testing.assert_allclose(dropped[1], plain[1], rtol=0, atol=1e-6)
    assert np.max(np.abs(dropped[0] - plain[0])) > 0.1


def test_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores that are made are those of the sequences; an empty one has none."""
    shapes = recorded_scores(monkeypatch)
    varlen_attention(
        **packed(QUERIES, KEYS), cu_seqlens_q=sums(QUERIES), cu_seqlens_k=sums(KEYS), layout="...HLE"
    )
    assert shapes == [(1, HEADS, l, s) for l, s in zip(QUERIES, KEYS, strict=True) if l and s]


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"attn_mask": masks.sliding_window(2, 1)}], ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_stacked_sequences_are_computed_again_as_they_were(
    library: Library, rules: dict[str, Any], special: float
) -> None:
    """A NaN or inf of one sequence changes no row of another, and no row of its own that does not attend it."""
    lengths = [4, 2, 4, 3, 2, 4]  # sequences of equal lengths lie apart, so that they are stacked
    arrays, starts = packed(lengths, lengths), sums(lengths)
    arrays["value"][:, starts[2] + 3] = special  # the last token of the third sequence
    output = attend(library, arrays, lengths, lengths, **rules)
    for first, last in itertools.pairwise(starts):
        alone = {name: x[None, :, first:last] for name, x in arrays.items()}
        expected = scaled_dot_product_attention(*(alone[name] for name in ("query", "key", "value")), **rules)
        np.testing.assert_allclose(output[:, first:last], expected[0], rtol=0, atol=1e-6)


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

    arrays = {name: x.astype(np.float64) for name, x in packed(*LENGTHS).items()}
    tensors = {name: torch.asarray(x).requires_grad_() for name, x in arrays.items()}
    starts = {"cu_seqlens_q": sums(QUERIES), "cu_seqlens_k": sums(KEYS)}
    state = varlen_attention_state(**tensors, **starts, layout="...HLE")
    finite = torch.isfinite(state.lse)
    (gradient,) = torch.autograd.grad(state.lse[finite].sum(), [tensors["query"]])
    bounds = zip(itertools.pairwise(sums(QUERIES)), itertools.pairwise(sums(KEYS)), strict=True)
    for rows, columns in ([slice(*bound) for bound in pair] for pair in bounds):
        query, key, value = arrays["query"][:, rows], arrays["key"][:, columns], arrays["value"][:, columns]
        *_, weights = reference.attention(query, key, value)
        expected = weights @ np.repeat(key, 2, axis=0) / math.sqrt(8)
        np.testing.assert_allclose(gradient[:, rows].numpy(), expected, rtol=0, atol=1e-12)
