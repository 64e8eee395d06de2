"""A call of arrays in chunks has the result of the call of whole arrays, however they are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import F, draw
from hypothesis import given
from hypothesis import strategies as st

import sdpa_xp
from chunks.calls_in_chunks import OPTIONS, cut, inputs, options
from sdpa_xp import KVCache, attention_state, biases, masks, scaled_dot_product_attention, varlen_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

pytestmark = pytest.mark.needs("dask")


@pytest.fixture(autouse=True)
def _synchronous() -> Any:
    import dask

    with dask.config.set(scheduler="synchronous"):
        yield


ALONE = ("slopes", "score function", "softcap")
"""Each of these runs a branch of the gradients that no other option runs."""
CASES = pytest.mark.parametrize(
    ("name", "lazy"),
    [
        pytest.param(name, lazy, marks=[pytest.mark.sampled(1)] if name in ALONE else [])
        for name, rules in OPTIONS.items()
        for lazy in (False, True)
        if not lazy or any(isinstance(option, np.ndarray) for option in rules.values())
    ],
)
"""Each option, and once more with its arrays as Dask's, if it has arrays."""


def assert_near(lazy: Any, expected: Any, atol: float = 3e-6) -> None:
    assert lazy.dtype == expected.dtype
    assert lazy.shape == expected.shape
    computed = lazy.compute()
    assert computed.dtype == expected.dtype  # the meta does not promise what the chunks do not hold
    np.testing.assert_allclose(computed, expected, rtol=2e-6, atol=atol)


@pytest.mark.sampled(3)
@CASES
def test_output_and_state(name: str, lazy: bool) -> None:
    arrays = inputs()
    expected = attention_state(*arrays, **options(name))
    state = attention_state(*cut(arrays), **options(name, lazy=lazy))
    assert_near(state.output, expected.output)
    assert_near(state.lse, expected.lse)
    output = scaled_dot_product_attention(*cut(arrays), **options(name, lazy=lazy))
    assert_near(output, expected.output)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bias_of_the_smallest_finite_number_weighs_all_keys_alike(dtype: str) -> None:
    """A log-sum-exp of that size has lost the number of its keys, and chunks have different numbers of them."""
    query, key, value = draw(np.random.default_rng(0), (2, 3, 8), (2, 12, 8), (2, 12, 5), dtype=dtype)
    bias = np.full((3, 12), np.finfo(dtype).min, dtype)
    bias[:, :2], bias[0] = -np.inf, 0
    lazy = cut([query, key, value], ((2, 2, 8), (1, 8, 8), (1, 8, 5)))
    expected = scaled_dot_product_attention(query, key, value, bias=bias)
    np.testing.assert_allclose(expected[:, 1], np.mean(value[:, 2:], axis=1), rtol=0, atol=1e-6)
    assert_near(scaled_dot_product_attention(*lazy, bias=bias), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_scores(name: str) -> None:
    query, key, _ = inputs()
    lazy = cut([query, key], ((1, 3, 5, 4), (2, 1, 4, 8)))
    lazily, expected = (sdpa_xp.attention_weights(*x, **options(name)) for x in (lazy, (query, key)))
    assert_near(lazily, expected)
    chosen = {n: x for n, x in options(name).items() if n not in ("sinks", "dropout_p", "rng")}
    assert_near(sdpa_xp.attention_scores(*lazy, **chosen), sdpa_xp.attention_scores(query, key, **chosen))


@pytest.mark.sampled(3)
@CASES
def test_gradients(name: str, lazy: bool) -> None:
    import dask

    arrays = inputs()
    expected_output, pullback = vjp(*arrays, **options(name))
    (cotangent,) = draw(np.random.default_rng(3), expected_output.shape)
    expected = pullback(cotangent)
    output, lazy_pullback = vjp(*cut(arrays), **options(name, lazy=lazy))
    gradients = lazy_pullback(cut([cotangent], ((1, 4, 7, 2),))[0])
    assert_near(output, expected_output)
    assert gradients.keys() == expected.keys()
    for (argument, gradient), computed in zip(
        gradients.items(), *dask.compute([*gradients.values()]), strict=True
    ):
        assert gradient.shape == computed.shape == expected[argument].shape
        assert gradient.dtype == computed.dtype == expected[argument].dtype
        np.testing.assert_allclose(computed, expected[argument], rtol=2e-5, atol=2e-5)


@given(st.data())
def test_any_chunks(data: st.DataObject) -> None:
    """Chunks of any lengths, along any axis, also of one element and of none."""
    arrays = inputs()

    def chunks(length: int) -> tuple[int, ...]:
        borders = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
        ends = [*borders, length]
        return tuple(end - start for start, end in zip([0, *borders], ends, strict=True))

    of_arrays = tuple(tuple(chunks(n) for n in x.shape) for x in arrays)
    expected = scaled_dot_product_attention(*arrays, masks.sliding_window(6, 1))
    assert_near(scaled_dot_product_attention(*cut(arrays, of_arrays), masks.sliding_window(6, 1)), expected)


EMPTY: dict[str, tuple[tuple[int, ...], Any]] = {
    "sinks": ((1,), lambda x: {"sinks": x}),
    "sinks of entries": ((1, 1), lambda x: {"sinks": x}),
    "slopes": ((1,), lambda x: {"bias": biases.alibi(x)}),
    "table": ((4, 1), lambda x: {"bias": biases.relative(x, max_distance=8)}),
    "bias": ((1, 3, 1), lambda x: {"bias": x}),
    "scale": ((1, 3, 1), lambda x: {"scale": x}),
    "ids": ((1, 3), lambda x: {"attn_mask": masks.document(x.astype(int))}),
    "lengths": ((1,), lambda x: {"attn_mask": masks.padding(x.astype(int))}),
    "prefixes": ((1,), lambda x: {"attn_mask": masks.prefix(x.astype(int))}),
    "array": ((3, 3), lambda x: {"attn_mask": x > 0}),
}


@pytest.mark.parametrize("first", [0, 1], ids=["at the end", "at the begin"])
@pytest.mark.parametrize("name", EMPTY)
def test_options_with_chunks_of_no_elements(name: str, first: int) -> None:
    import dask

    def empty_chunks(array: np.ndarray) -> Any:
        return cut([array], (tuple((0, n) if first else (n, 0) for n in array.shape),))[0]

    shape, option = EMPTY[name]
    arrays = draw(np.random.default_rng(6), (1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 2))
    array = np.ones(shape, F)
    expected, pullback = vjp(*arrays, **option(array))
    output, lazy_pullback = vjp(*map(empty_chunks, arrays), **option(empty_chunks(array)))
    assert_near(output, expected)
    (gradients,) = dask.compute(lazy_pullback(empty_chunks(expected)))
    for argument, gradient in pullback(expected).items():
        np.testing.assert_allclose(gradients[argument], gradient, atol=2e-6)
    states = [attention_state(*arrays), attention_state(*map(empty_chunks, arrays))]
    merged = sdpa_xp.merge_states([states[1], sdpa_xp.AttentionState(*map(empty_chunks, states[0]))])
    assert_near(merged.output, states[0].output)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_groups_and_dtypes(dtype: str, key_heads: int) -> None:
    arrays = draw(
        np.random.default_rng(1), (3, 8, 5, 4), (1, key_heads, 9, 4), (3, key_heads, 9, 4), dtype=dtype
    )
    lazy = cut(arrays, ((2, 3, 2, -1), (1, 1, 4, -1), (1, 2, 5, -1)))
    expected = attention_state(*arrays, is_causal=True)
    state = attention_state(*lazy, is_causal=True)
    assert state.output.dtype == dtype
    assert state.lse.dtype == expected.lse.dtype
    tolerance = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(state.output.compute(), expected.output, rtol=0, atol=tolerance)


def test_options_may_be_written_to_after_the_call() -> None:
    """The call has its own copies, as `dask.array.from_array` has them."""
    arrays, rows = inputs(), np.ones((13, 1), bool)
    rows[4] = False
    options: dict[str, Any] = {
        "attn_mask": (np.arange(17) % 5 < np.arange(2, 15)[:, None]) & rows,
        "bias": np.linspace(0, 1, 4 * 17, dtype=F).reshape(4, 1, 17),
        "scale": np.linspace(0.5, 1, 13, dtype=F)[:, None],
        "sinks": np.arange(4, dtype=F),
    }
    expected = scaled_dot_product_attention(*arrays, **options)
    output = scaled_dot_product_attention(*cut(arrays), **options)
    lengths, ids = np.asarray([3, 11]), np.arange(17) // 4
    by_value = {
        "attn_mask": masks.padding(lengths) & masks.document(ids[:13], ids),
        "bias": biases.alibi(options["sinks"]),
    }
    expected_by_value = scaled_dot_product_attention(*arrays, **by_value)
    output_by_value = scaled_dot_product_attention(*cut(arrays), **by_value)
    for array in (*options.values(), lengths, ids):
        array[...] = 0
    assert_near(output, expected)
    assert_near(output_by_value, expected_by_value)


def test_layout_and_2d() -> None:
    arrays = [np.ascontiguousarray(np.swapaxes(x, 1, 2)) for x in inputs()]
    lazy = cut(arrays, ((1, 5, 3, 4), (2, 4, 1, 8), (2, 6, 2, 3)))
    rules: dict[str, Any] = {"layout": "...LHE", "is_causal": True}
    assert_near(scaled_dot_product_attention(*lazy, **rules), scaled_dot_product_attention(*arrays, **rules))
    flat = draw(np.random.default_rng(1), (7, 4), (9, 4), (9, 3))
    assert_near(scaled_dot_product_attention(*cut(flat, ((3, 2),) * 3)), scaled_dot_product_attention(*flat))


def test_what_a_mask_hides_may_be_nan() -> None:
    """In a chunk of its own, and beside keys that are attended."""
    query, key, value = inputs()
    expected = scaled_dot_product_attention(query, key[..., :9, :], value[..., :9, :])
    for array in (key, value):
        array[..., 9:, :] = np.nan
    output = scaled_dot_product_attention(*cut([query, key, value]), masks.padding(9))
    np.testing.assert_allclose(output.compute(), expected, atol=2e-6)


def test_a_nan_shows_in_the_rows_that_attend_it() -> None:
    """And in no other, as for whole arrays: a task looks at each pair."""
    query, key, value = inputs()
    value[0, :, 6] = np.nan
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)
    output = scaled_dot_product_attention(*cut([query, key, value]), is_causal=True).compute()
    np.testing.assert_array_equal(np.isnan(output), np.isnan(expected))
    assert 0 < np.isnan(output).sum() < output.size


def test_packed_sequences() -> None:
    arrays = draw(np.random.default_rng(2), (11, 4, 8), (12, 2, 8), (12, 2, 6))
    lazy = cut(arrays, ((3, 4, 8), (5, 1, 8), (4, 2, 3)))
    lengths = [0, 4, 4, 11], [0, 5, 6, 12]
    for rules in (
        {"is_causal": True},
        {"attn_mask": masks.from_function(lambda b, h, i, j: (b + i + j) % 2 == 0)},
        {"sinks": np.ones((3, 4), F)},
    ):
        assert_near(varlen_attention(*lazy, *lengths, **rules), varlen_attention(*arrays, *lengths, **rules))
        states = (sdpa_xp.varlen_attention_state(*x, *lengths, **rules) for x in (lazy, arrays))
        for part in zip(*states, strict=True):
            assert_near(*part)
    dropped = [
        varlen_attention(*arrays_of_one, *lengths, dropout_p=0.5, rng=np.random.default_rng(1))
        for arrays_of_one in (lazy, arrays)
    ]
    assert_near(*dropped)


def test_a_cache_in_chunks() -> None:
    query, key, value = inputs()
    expected = KVCache(key, value).attend(query[..., -3:, :], is_causal=True)
    lazy = cut([query, key, value])
    assert_near(KVCache(*lazy[1:]).attend(lazy[0][..., -3:, :], is_causal=True), expected)
    states = (KVCache(k, v).attend_state(q[..., -3:, :]) for q, k, v in (lazy, (query, key, value)))
    for part in zip(*states, strict=True):
        assert_near(*part)
