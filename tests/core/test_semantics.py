"""The rows of docs/reference/contract.md, by name, on every library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import attend, draw
from libraries import Library

import sdpa_xp
from sdpa_xp import KVCache, attention_state, attention_weights, biases, masks, scaled_dot_product_attention

F = np.float32


def weights(library: Library, *args: np.ndarray, **rules: Any) -> np.ndarray:
    return library.get(library.call(attention_weights, *args, **rules))


@pytest.mark.rule("R1")
def test_2d_is_one_head_without_batch(library: Library, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (3, 4), (5, 4), (5, 2))
    flat = attend(library, q, k, v)
    headed = attend(library, q[None], k[None], v[None])
    assert flat.shape == (3, 2)
    assert headed.shape == (1, 3, 2)
    np.testing.assert_array_equal(flat, headed[0])


@pytest.mark.rule("R3")
def test_query_head_h_reads_key_head_h_div_group(library: Library, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (6, 3, 4), (2, 5, 4), (2, 5, 4))
    marked = np.stack([np.full((5, 1), 10, F), np.full((5, 1), 20, F)])
    np.testing.assert_allclose(attend(library, q, k, marked)[:, 0, 0], [10, 10, 10, 20, 20, 20], rtol=1e-6)
    repeated = [np.repeat(x, 3, axis=0) for x in (k, v)]
    np.testing.assert_allclose(attend(library, q, k, v), attend(library, q, *repeated), rtol=0, atol=1e-6)


@pytest.mark.rule("R11")
def test_floating_mask_is_added(library: Library, rng: np.random.Generator) -> None:
    q, k, v, added = draw(rng, (2, 3, 4), (2, 5, 4), (2, 5, 4), (3, 5))
    as_mask = attend(library, q, k, v, attn_mask=added)
    as_bias = attend(library, q, k, v, bias=added)
    np.testing.assert_array_equal(as_mask, as_bias)
    assert not np.allclose(as_mask, attend(library, q, k, v), atol=1e-3)


@pytest.mark.rule("R13")
@pytest.mark.parametrize(
    "shape", [(2, 4, 3, 5), (1, 4, 3, 5), (2, 1, 1, 5), (4, 1, 5), (3, 5), (3, 1), (5,), (1,), ()]
)
def test_mask_of_any_broadcastable_shape(library: Library, rng: np.random.Generator, shape: Any) -> None:
    q, k, v = draw(rng, (2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))
    mask = np.asarray(rng.random(shape) < 0.6)
    whole = np.array(np.broadcast_to(mask, (2, 4, 3, 5)))
    np.testing.assert_array_equal(
        attend(library, q, k, v, attn_mask=mask), attend(library, q, k, v, attn_mask=whole)
    )


LEAST = np.full((1, 4), np.finfo(F).min, F)
HOLES = np.asarray([[True, True, True], [False, True, True], [True, False, True]])
WEIGHTS: dict[str, tuple[dict[str, Any], list[list[float]]]] = {
    "boolean: True means may attend": ({"attn_mask": HOLES[2:]}, [[0.5, 0, 0.5]]),
    "mask and is_causal: both hold": (
        {"attn_mask": HOLES, "is_causal": True},
        [[1, 0, 0], [0, 1, 0], [0.5, 0, 0.5]],
    ),
    "is_causal counts from the upper left": ({"is_causal": True}, [[1, 0, 0, 0], [0.5, 0.5, 0, 0]]),
    "also for more queries than keys": ({"is_causal": True}, [[1, 0], *[[0.5, 0.5]] * 3]),
    "is_causal of NumPy": ({"is_causal": np.True_}, [[1, 0], [0.5, 0.5]]),
    "the smallest finite bias does not mask": ({"bias": LEAST}, [[0.25] * 4]),
    "nor does it twice, whose sum is -inf": ({"attn_mask": LEAST, "bias": LEAST}, [[0.25] * 4]),
}


@pytest.mark.rule("R10", "R14", "R24")
@pytest.mark.parametrize(("rules", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_equal_scores(library: Library, rules: dict[str, Any], expected: list[list[float]]) -> None:
    q, k = np.zeros((len(expected), 2), F), np.ones((len(expected[0]), 2), F)
    np.testing.assert_array_equal(weights(library, q, k, **rules), expected)


@pytest.mark.rule("R17")
def test_order_is_scale_softcap_bias_mask(library: Library) -> None:
    """Scores 2 * (3, 6), capped at 4, plus (1, 0), with the third key masked."""
    q, k = np.asarray([[1.0]], F), np.asarray([[3.0], [6.0], [99.0]], F)
    bias, mask = np.asarray([[1.0, 0.0, 50.0]], F), np.asarray([True, True, False])
    w = weights(library, q, k, attn_mask=mask, bias=bias, scale=2.0, softcap=4.0)
    scores = np.asarray([4 * math.tanh(6 / 4) + 1, 4 * math.tanh(12 / 4)])
    expected = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(w[0], [*expected, 0], rtol=1e-6)


@pytest.mark.rule("R23")
@pytest.mark.parametrize("how", ["boolean", "bias", "floating mask", "causal and mask"])
def test_row_without_a_key(library: Library, rng: np.random.Generator, how: str) -> None:
    """Output 0, weights 0, lse -inf, never NaN; the other rows are as without it."""
    q, k, v = draw(rng, (3, 4), (5, 4), (5, 2))
    allowed = np.ones((3, 5), bool)
    allowed[1] = False
    added = np.where(allowed, 0, -np.inf).astype(F)
    later = np.triu(np.ones((3, 5), bool), 1) | allowed
    rules: dict[str, Any] = {
        "boolean": {"attn_mask": allowed},
        "bias": {"bias": added},
        "floating mask": {"attn_mask": added},
        "causal and mask": {"attn_mask": later, "is_causal": True},
    }[how]
    state = library.call(attention_state, q, k, v, **rules)
    output, lse = library.get(state.output), library.get(state.lse)
    np.testing.assert_array_equal(output[1], 0)
    assert lse[1] == -math.inf
    np.testing.assert_array_equal(weights(library, q, k, **rules)[1], 0)
    whole = attend(library, q, k, v, is_causal=how == "causal and mask")
    np.testing.assert_allclose(output[[0, 2]], whole[[0, 2]], rtol=0, atol=1e-6)
    assert np.all(np.isfinite(lse[[0, 2]]))


NONFINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.rule("R26")
@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_padding_may_hold_anything(library: Library, rng: np.random.Generator, bad: float, where: str) -> None:
    q, k, v = draw(rng, (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    mask = np.ones((2, 1, 1, 5), bool)
    mask[1, ..., 3:] = False
    clean = attend(library, q, k, v, attn_mask=mask)
    for name, x in (("key", k), ("value", v)):
        if where in (name, "both"):
            x[1, :, 3:] = bad
    np.testing.assert_allclose(attend(library, q, k, v, attn_mask=mask), clean, rtol=0, atol=1e-6)


@pytest.mark.rule("R26")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("how", ["causal", "boolean", "bias"])
@pytest.mark.parametrize("where", ["key", "value"])
def test_nonfinite_shows_in_exactly_the_rows_that_attend_it(
    library: Library, rng: np.random.Generator, where: str, how: str, bad: float
) -> None:
    """Key 2 of 4 is bad: under a causal mask rows 2 and 3 attend it, and must not hide it."""
    if library.lazy:
        pytest.skip("a lazy graph promises this only for keys that no query attends")
    q, k, v = draw(rng, (2, 4, 8), (2, 4, 8), (2, 4, 8))
    allowed = np.tril(np.ones((4, 4), bool))
    rules: dict[str, Any] = {
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": allowed},
        "bias": {"bias": np.where(allowed, 0, -np.inf).astype(F)},
    }[how]
    clean = attend(library, q, k, v, **rules)
    if where == "key":
        k[0, 2] = bad
    else:
        v[0, 2, 5] = bad
    state = library.call(attention_state, q, k, v, **rules)
    output = library.get(state.output)
    np.testing.assert_allclose(output[1], clean[1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(output[0, :2], clean[0, :2], rtol=0, atol=1e-6)
    if where == "value":
        np.testing.assert_array_equal(output[0, 2:, 5], bad)
        np.testing.assert_allclose(np.delete(output[0], 5, -1), np.delete(clean[0], 5, -1), rtol=0, atol=1e-6)
        assert np.all(np.isfinite(library.get(state.lse)))
    elif math.isnan(bad):
        assert np.all(np.isnan(output[0, 2:]))
        assert np.all(np.isnan(weights(library, q, k, **rules)[0, 2:, :2]))
        np.testing.assert_array_equal(weights(library, q, k, **rules)[0, 2, 3:], 0)


@pytest.mark.rule("R26")
def test_nonfinite_of_one_head_stays_in_its_group(library: Library, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (4, 3, 8), (2, 5, 8), (2, 5, 8))
    mask = np.ones((4, 3, 5), bool)
    mask[2:, :, 4] = False
    clean = attend(library, q, k, v, attn_mask=mask)
    v[1, 4] = math.nan
    np.testing.assert_allclose(attend(library, q, k, v, attn_mask=mask), clean, rtol=0, atol=1e-6)


@pytest.mark.rule("R23")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("mask", [None, masks.causal(-9), masks.padding([0]), "an array"])
@pytest.mark.needs("torch")
def test_each_result_without_pairs_has_gradients_of_0(mask: Any, dtype: str) -> None:
    """No keys are as many as that. The log-sum-exp is -inf then, to which autograd may add no NaN."""
    import torch

    shapes, options = ((1, 2, 3, 8), (2, 2, 4, 8)), {"dtype": getattr(torch, dtype), "requires_grad": True}
    x, pool = (torch.full(shape, math.nan, **options) for shape in shapes)
    slopes = torch.ones(2, requires_grad=True)
    told: dict[str, Any] = {"bias": biases.alibi(slopes)}
    keys = x[:, :, :0] if mask is None else x
    mask = torch.zeros(3, 3, dtype=torch.bool) if mask == "an array" else mask
    pair_mask = mask if isinstance(mask, masks.Mask) else masks.padding([0])
    q, k = x[0], keys[0]
    ends = [0, k.shape[-2]]
    paged = sdpa_xp.PagedKVCache(pool, pool, [[0]], [3])
    states = [
        attention_state(x, keys, keys, mask, **told),
        attention_state(x, keys, keys, mask, implementation="xp", lse_base=2, **told),
        sdpa_xp.varlen_attention_state(q, k, k, [0, 3], ends, pair_mask, layout="...HLE", **told),
        KVCache(x, x).attend_state(x, masks.padding([0]), **told),
        paged.attend_state(x, pair_mask, is_causal=False, **told),
        paged.attend_state(q, pair_mask, cu_seqlens_q=[0, 3], is_causal=False, **told),
    ]
    output = scaled_dot_product_attention(x, keys, keys, mask, **told)
    weights = attention_weights(x, keys, attn_mask=mask, **told)
    scores = sdpa_xp.attention_scores(x, keys, attn_mask=mask, **told)
    assert all(bool((state.lse == -math.inf).all()) for state in states)
    assert not weights.any()
    assert not output.any()
    assert bool((scores == -math.inf).all())
    for result in (*(part for state in states for part in state), output, weights, scores):
        for gradient in torch.autograd.grad(result.sum(), [x, slopes], retain_graph=True):
            assert not gradient.any()
    with torch.no_grad():
        assert not scaled_dot_product_attention(x, keys, keys, mask).requires_grad


@pytest.mark.rule("R23")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_nan_query_is_not_an_empty_row(library: Library, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (3, 4), (5, 4), (5, 4))
    q[1] = math.nan
    state = library.call(attention_state, q, k, v, is_causal=True)
    assert np.all(np.isnan(library.get(state.output)[1]))
    assert math.isnan(library.get(state.lse)[1])
    assert np.all(np.isfinite(library.get(state.output)[[0, 2]]))


@pytest.mark.rule("R26")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_nan_bias_is_attended(library: Library, rng: np.random.Generator) -> None:
    q, k, v, bias = draw(rng, (2, 4), (3, 4), (3, 4), (2, 3))
    bias[0, 1] = math.nan
    output = attend(library, q, k, v, bias=bias)
    assert np.all(np.isnan(output[0]))
    assert np.all(np.isfinite(output[1]))


@pytest.mark.rule("R19", "R20")
@pytest.mark.parametrize(
    "rules", [{"scale": 0.25}, {"softcap": None}, {"softcap": 0}, {"softcap": 0.0}, {"softcap": 1e30}], ids=str
)
def test_scale_is_one_over_the_root_of_the_width_and_softcap_off(
    library: Library, rng: np.random.Generator, rules: dict[str, Any]
) -> None:
    arrays = draw(rng, (3, 16), (5, 16), (5, 16))
    atol = 1e-6 if rules.get("softcap") else 0
    np.testing.assert_allclose(attend(library, *arrays, **rules), attend(library, *arrays), rtol=0, atol=atol)


@pytest.mark.rule("R5")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_lse_is_the_natural_logarithm(library: Library) -> None:
    state = library.call(attention_state, np.zeros((1, 2), F), np.ones((7, 2), F), np.ones((7, 1), F))
    np.testing.assert_allclose(library.get(state.lse), [math.log(7)], rtol=1e-6)


@pytest.mark.rule("R6")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 3, 4), (2, 0, 4), (2, 0, 5)),
        ((2, 0, 4), (2, 3, 4), (2, 3, 5)),
        ((0, 2, 3, 4), (0, 2, 6, 4), (0, 2, 6, 5)),
        ((2, 3, 4), (2, 6, 4), (2, 6, 0)),
        ((0, 3, 4), (0, 6, 4), (0, 6, 5)),
        ((0, 3, 4), (2, 6, 4), (2, 6, 5)),
        ((3, 4), (0, 4), (0, 5)),
        ((4, 3, 4), (2, 0, 4), (2, 0, 5)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_axes(
    library: Library, rng: np.random.Generator, query: Any, key: Any, value: Any, is_causal: bool
) -> None:
    """No key: zeros and lse -inf; nothing else to compute: an empty result."""
    library.needs_empty_arrays()
    state = library.call(attention_state, *draw(rng, query, key, value), is_causal=is_causal)
    output, lse = library.get(state.output), library.get(state.lse)
    shape = (*query[:-1], value[-1])
    assert output.shape == shape
    assert lse.shape == shape[:-1]
    np.testing.assert_array_equal(output, np.zeros(shape))
    if key[-2] == 0:
        assert np.all(lse == -math.inf)
    w = weights(library, *draw(rng, query, key), is_causal=is_causal)
    assert w.shape == (*query[:-1], key[-2])


@pytest.mark.rule("R8")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_inputs_are_not_written(library: Library, rng: np.random.Generator) -> None:
    before = draw(rng, (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), (3, 5))
    before[1][0, 0, 0] = math.nan
    placed = [library.put(x.copy()) for x in before]
    with library.guard():
        scaled_dot_product_attention(*placed[:3], bias=placed[3], is_causal=True, softcap=2.0)
    for x, kept in zip(before, placed, strict=True):
        np.testing.assert_array_equal(x, library.get(kept))


@pytest.mark.rule("R8")
def test_the_same_result_every_time(library: Library, rng: np.random.Generator) -> None:
    args = draw(rng, (2, 4, 30, 8), (2, 2, 50, 8), (2, 2, 50, 8))
    first = attend(library, *args, is_causal=True)
    for _ in range(3):
        np.testing.assert_array_equal(attend(library, *args, is_causal=True), first)


@pytest.mark.rule("R8")
@pytest.mark.leaves_out("torch-inference", "cupy-rules-device1")
def test_result_may_be_written(library: Library) -> None:
    """It is no view of an input and no broadcast view."""
    if not library.name.startswith(("numpy", "torch", "cupy")):
        pytest.skip("only NumPy, torch and CuPy have arrays that are views of others and can be written")
    v = np.ones((1, 2), F)
    for rules in ({}, {"attn_mask": np.zeros((3, 1), bool)}):
        state = library.call(attention_state, np.ones((3, 2), F), np.ones((1, 2), F), v, **rules)
        state.output[...] = 5
        state.lse[...] = 5
        np.testing.assert_array_equal(v, 1)
        for function in (sdpa_xp.attention_scores, attention_weights):
            pairs = library.call(function, np.ones((3, 2), F), np.ones((1, 2), F), **rules)
            pairs += 1.0  # which torch refuses for elements that share memory


@pytest.mark.rule("R8")
def test_no_two_gradients_share_memory(library: Library) -> None:
    """Of two biases of one shape they are equal numbers."""
    q, zeros = np.ones((5, 4), F), [library.put(np.zeros((5, 5), F)) for _ in range(2)]
    bias = biases.from_array(zeros[0]) + biases.from_array(zeros[1])
    placed = [library.put(q)] * 3
    with library.guard():
        output, pullback = sdpa_xp.scaled_dot_product_attention_vjp(*placed, bias=bias)
        gradients = pullback(output)
        first, second = gradients["bias.array"], gradients["bias.array (2)"]
    assert first is not second
    if library.name.startswith("numpy"):
        assert not np.shares_memory(first, second)


@pytest.mark.rule("R19")
def test_scalars_of_numpy_are_numbers(library: Library, rng: np.random.Generator) -> None:
    """For arrays of any library: no array, whose library would have to be the query's."""
    q, k, v = draw(rng, (3, 4), (5, 4), (5, 2))
    numbers = {"scale": np.float32(0.5), "softcap": np.float64(2), "dropout_p": np.float32(0)}
    expected = attend(library, q, k, v, scale=0.5, softcap=2.0)
    placed = [library.put(x) for x in (q, k, v)]
    with library.guard():
        output = scaled_dot_product_attention(*placed, **numbers)
    assert output.dtype == placed[0].dtype
    np.testing.assert_array_equal(library.get(output), expected)
