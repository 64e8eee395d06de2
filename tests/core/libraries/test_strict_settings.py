"""Calls where JAX is set to refuse what it computes by default; at night all other tests run so too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from libraries import jax_x64

import sdpa_xp
from sdpa_xp import KVCache, attention_state, biases, explain, masks, positional, scaled_dot_product_attention
from sdpa_xp.layers import MultiHeadAttention

pytestmark = pytest.mark.needs("jax")
F = np.float32
X = np.linspace(-1, 1, 2 * 4 * 6 * 8, dtype=F).reshape(2, 4, 6, 8)
IDS = np.asarray([0, 0, 1, 1, 2, 2], np.int8)
RULES: dict[str, dict[str, Any]] = {
    "2 lengths": {"attn_mask": masks.padding([3, 6], [6, 2])},
    "one length": {"attn_mask": masks.padding(3)},
    "an offset for each entry": {"attn_mask": masks.causal([0, 1])},
    "a window": {"attn_mask": masks.sliding_window(2, 1, offset="lower_right")},
    "documents of two dtypes": {"attn_mask": lambda put: masks.document(put(IDS), list(IDS.tolist()))},
    "or, not": {"attn_mask": masks.causal() | ~masks.prefix([1, 2])},
    "chunks": {"attn_mask": masks.chunked(2) | masks.dilated(2)},
    "a mask of keys": {"attn_mask": lambda put: put(IDS > 0)},
    "a mask of pairs": {"attn_mask": lambda put: put(np.tri(6) > 0)},
    "a function": {"attn_mask": masks.from_function(lambda b, h, i, j: j + h <= i + b)},
    "a score function": {"bias": biases.from_function(lambda s, b, h, i, j: s * (1 + h.astype(s.dtype)))},
    "a bias of heads": {"bias": lambda put: put(X[0, :, :1, :6])},
    "a half bias": {"bias": lambda put: put(X[0, 0, 0, :6].astype(np.float16))},
    "alibi": {"bias": biases.alibi(4, offset=[1, 2])},
    "relative": {"bias": lambda put: biases.relative(put(X[0, :, :2].reshape(-1, 4)))},
    "sinks": {"sinks": lambda put: put(X[0, 0, 0, :4])},
    "a scale of heads": {"scale": lambda put: put(X[0, :, :1, :1])},
}


@contextlib.contextmanager
def promotes_nothing() -> Iterator[None]:
    import jax

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@contextlib.contextmanager
def debugs() -> Iterator[None]:
    """With 64 bits, as -inf of another width is an operation then."""
    import jax

    with jax_x64(True), jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow"):
        yield


def placed(rules: dict[str, Any], put: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: rule(put) if callable(rule) else rule for name, rule in rules.items()}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_no_promotion_is_needed(rules: dict[str, Any]) -> None:
    """Traced, in which unlike ranks and dtypes are refused as they are in a call, and nothing is compiled."""
    import jax

    def attend(query: Any, key: Any) -> Any:
        options = placed(rules, jax.numpy.asarray)
        weights = sdpa_xp.attention_weights(query, key, **options)
        return attention_state(query, key, key, **options).output.sum() + weights.sum()

    x = jax.ShapeDtypeStruct(X.shape, F)
    with promotes_nothing():
        jax.eval_shape(jax.grad(attend, argnums=(0, 1)), x, x)
        jax.eval_shape(jax.grad(attend, argnums=(0, 1)), x, jax.ShapeDtypeStruct(X.shape[1:], F))


def test_no_promotion_in_layers_caches_and_positions() -> None:
    import jax

    layer = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2).to(jax.numpy)
    rotary = positional.Rotary(4)

    def run(x: Any, tokens: Any) -> Any:
        cache = KVCache(tokens, tokens, rotary=rotary).append(tokens, tokens)
        encoded = x + positional.sinusoidal(6, 8, like=x)[None]
        return layer(encoded, is_causal=True).sum() + cache.attend(tokens, masks.sliding_window(3, 0)).sum()

    with promotes_nothing():
        specs = [jax.ShapeDtypeStruct(shape, F) for shape in ((2, 6, 8), (2, 2, 3, 4))]
        jax.eval_shape(jax.grad(run, argnums=(0, 1)), *specs)


def test_no_promotion_in_the_names_of_jax() -> None:
    import jax

    def run(x: Any, bias: Any, mask: Any, lengths: Any) -> Any:
        output = sdpa_xp.dot_product_attention(x, x, x, bias, mask, key_value_seq_lengths=lengths)
        return sdpa_xp.dot_product_attention(x, output, x, bias, implementation="native", is_causal=True).sum()

    shapes = ((2, 6, 4, 8), F), ((4, 6, 6), F), ((6,), bool), ((2,), np.int32)
    with promotes_nothing():
        jax.eval_shape(jax.grad(run, argnums=(0, 1)), *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["2 lengths", "a mask of keys", "alibi", "a half bias"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_masked_scores_are_no_fault(name: str, dtype: str) -> None:
    """They are -inf in a call, whose output is that of NumPy."""
    import jax

    x = X.astype(dtype)
    with debugs():
        query = jax.device_put(x)
        rules = placed(RULES[name], jax.device_put)
        output = scaled_dot_product_attention(query, query, query, **rules, implementation="xp")
    expected = scaled_dot_product_attention(x, x, x, **placed(RULES[name], lambda array: array))
    assert output.dtype == dtype
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6 if dtype == "float32" else 1e-14)


def test_a_cache_moves_its_own_numbers_to_the_device() -> None:
    import jax

    with debugs():
        tokens = jax.device_put(X)
        cache = KVCache(tokens, tokens, rotary=positional.Rotary(8), first_position=[1, 2])
        output = cache.append(tokens, tokens).drop_first(2).attend(tokens, masks.sliding_window(3, 0))
    expected = KVCache(X, X, rotary=positional.Rotary(8), first_position=[1, 2]).append(X, X).drop_first(2)
    np.testing.assert_allclose(output, expected.attend(X, masks.sliding_window(3, 0)), rtol=0, atol=4e-6)


def rotations(put: Callable[[Any], Any]) -> dict[str, positional.Rotation]:
    tables = X.reshape(2, -1, 4)[:, :16]
    return {
        "rotary": positional.Rotary(8),
        "one table": positional.RotaryTables(put(tables[0]), put(tables[1])),
        "a table for each sequence": positional.RotaryTables(put(tables), put(tables)),
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["rotary", "one table", "a table for each sequence"])
@pytest.mark.parametrize("positions", [None, [[0, 2, 4], [1, 3, 5, 7, 9]]])
def test_a_paged_cache_moves_its_own_numbers_to_the_device(
    name: str, positions: list[list[int]] | None
) -> None:
    import jax

    def run(put: Callable[[Any], Any]) -> list[Any]:
        pool, packed, query = put(X.reshape(12, 2, 2, 8)), put(X[0, :2, :3]), put(X[:, :2, :1])
        table = [[0, 3, 9], [5, 1, 4]]
        cache = sdpa_xp.PagedKVCache(
            pool, pool, table, [3, 5], rotary=rotations(put)[name], positions=positions
        )
        longer = cache.append(packed, packed, cu_seqlens_k=[0, 2, 3])
        rules: dict[str, Any] = {"attn_mask": masks.sliding_window(2, 0), "bias": biases.alibi(2)}
        return [
            cache.attend(packed, cu_seqlens_q=[0, 1, 3]),
            *cache.attend_state(packed, cu_seqlens_q=[0, 1, 3], **rules),
            longer.attend(packed, cu_seqlens_q=[0, 1, 3], positions=[3, 1, 2], is_causal=False),
            longer.drop_last(1).take_entries([1, 0]).attend(query, **rules),
        ]

    with debugs():
        results = run(jax.device_put)
    for result, expected in zip(results, run(np.asarray), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", ["one length", "an offset for each entry", "a window", "or, not", "chunks"])
def test_explain_moves_its_own_numbers_to_the_device(name: str) -> None:
    import jax

    query = jax.device_put(X)
    with debugs():
        guarded = [explain(query, query, query, **rules) for rules in (RULES[name], {"is_causal": True})]
    assert guarded == [explain(query, query, query, **rules) for rules in (RULES[name], {"is_causal": True})]


def test_nan_of_padding_is_no_fault() -> None:
    import jax

    x = X.copy()
    x[:, :, 4:] = np.nan
    with debugs():
        keys = jax.device_put(x)
        output = scaled_dot_product_attention(jax.device_put(X), keys, keys, masks.padding(4))
    np.testing.assert_allclose(output, scaled_dot_product_attention(X, x, x, masks.padding(4)), atol=2e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", [None, "xp"])
def test_a_result_that_jax_looks_for_is_refused(number: float, implementation: str | None) -> None:
    import jax

    x = X.copy()
    x[0, 0, 0, 0] = number
    kind = "nan" if np.isnan(number) else "inf"
    words = f"attention: `output` must have no {kind}, since jax_debug_{kind}s is set"
    with debugs():
        query, value = jax.device_put(X), jax.device_put(x)
        with pytest.raises(FloatingPointError, match=words):
            scaled_dot_product_attention(query, query, value, implementation=implementation)


def on_one_device(query: Any, key: Any) -> Any:
    import jax

    return sdpa_xp.ring_attention(query, key, key, mesh=jax.make_mesh((1,), ("keys",)), axis_name="keys")


def part(array: Any, index: Any) -> Any:
    """A part of an array, in which JAX itself does not look for NaN."""
    import jax

    return jax.device_put(np.asarray(array)[index])


def first(query: Any, key: Any) -> tuple[Any, ...]:
    """The first batch entry, as four packed tokens of six heads, and where its two sequences begin."""
    query, key = part(query, 0), part(key, 0)
    return query, key, key, [0, 1, 4], [0, 1, 4]


def paged(key: Any) -> sdpa_xp.PagedKVCache[Any]:
    return sdpa_xp.PagedKVCache(key, key, [[0], [1]], [6, 6])


STATISTICS: dict[str, dict[str, Any]] = {
    "row_max": {},
    "entropy": {},
    "key_sums": {},
    "top_keys": {"top_k": 1},
    "block_sums": {"block_size": 2},
}
RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "scaled_dot_product_attention": lambda q, k: scaled_dot_product_attention(q, k, k),
    "scaled_dot_product_attention, reproducible": lambda q, k: scaled_dot_product_attention(
        q, k, k, reproducible=True
    ),
    "scaled_dot_product_attention_vjp": lambda q, k: sdpa_xp.scaled_dot_product_attention_vjp(q, k, k),
    "Pullback": lambda q, k: sdpa_xp.scaled_dot_product_attention_vjp(k, k, k)[1](q),
    "Pullback.jvp": lambda q, k: sdpa_xp.scaled_dot_product_attention_vjp(k, k, k)[1].jvp(k, {"key": q}),
    "scaled_dot_product_attention_jvp": lambda q, k: sdpa_xp.scaled_dot_product_attention_jvp(
        k, k, k, {"key": q}
    ),
    "scaled_dot_product_attention_laplacian": lambda q, k: sdpa_xp.scaled_dot_product_attention_laplacian(
        q, k, k, {"key": part(k, None)}
    ),
    "scaled_dot_product_attention_laplacian, tangent": lambda q, k: (
        sdpa_xp.scaled_dot_product_attention_laplacian(k, k, k, {"key": part(q, None)})
    ),
    "scaled_dot_product_attention_laplacian, laplacian": lambda q, k: (
        sdpa_xp.scaled_dot_product_attention_laplacian(k, k, k, {"key": part(k, None)}, laplacians={"key": q})
    ),
    "jvp": lambda q, k: sdpa_xp.jvp(lambda x: sdpa_xp.attention_weights(x, k), (k,), (q,)),
    "dot_product_attention": lambda q, k: sdpa_xp.dot_product_attention(q, k, k),
    "attention_state": lambda q, k: attention_state(q, k, k),
    "attention_state, reproducible": lambda q, k: attention_state(q, k, k, reproducible=True),
    "attention_state, lse": lambda q, k: attention_state(q, k, part(k, np.s_[..., :0])),
    "attention_weights": sdpa_xp.attention_weights,
    "attention_scores": sdpa_xp.attention_scores,
    **{
        f"attention_statistics, {name}": lambda q, k, name=name, more=more: sdpa_xp.attention_statistics(
            q, k, of=name, **more
        )
        for name, more in STATISTICS.items()
    },
    "merge_states": lambda q, k: sdpa_xp.merge_states([sdpa_xp.AttentionState(k, part(q, np.s_[..., 0]))] * 2),
    "varlen_attention": lambda q, k: sdpa_xp.varlen_attention(*first(q, k)),
    "varlen_attention_state": lambda q, k: sdpa_xp.varlen_attention_state(*first(q, k)),
    "varlen_attention_statistics": lambda q, k: sdpa_xp.varlen_attention_statistics(
        *first(q, k)[:2], *first(q, k)[3:], of="key_sums"
    ),
    "ring_attention": on_one_device,
    "linear_attention": lambda q, k: sdpa_xp.linear_attention(q, k, k),
    "linear_attention, delta": lambda q, k: sdpa_xp.linear_attention(q, k, k, beta=part(k, np.s_[..., :1])),
    "linear_attention_vjp": lambda q, k: sdpa_xp.linear_attention_vjp(q, k, k),
    "causal_conv_with_state": lambda q, k: sdpa_xp.causal_conv_with_state(
        part(q, np.s_[:, 0]), part(k, np.s_[0, 0, :6, None, :3])
    ),
    "KVCache.attend": lambda q, k: KVCache(k, k).attend(q),
    "KVCache.attend_state": lambda q, k: KVCache(k, k).attend_state(q),
    "KVCache.statistics": lambda q, k: KVCache(k, k).statistics(q, of="key_sums"),
    "PagedKVCache.attend": lambda q, k: paged(k).attend(q),
    "PagedKVCache.attend_state": lambda q, k: paged(k).attend_state(q),
    "PagedKVCache.statistics": lambda q, k: paged(k).statistics(q, of="key_sums"),
}
NO_ARRAYS = {
    *("AttentionState", "AttentionStatistics", "CausalConvState", "Explanation", "KVCache"),
    *("LinearAttentionState", "PagedKVCache", "explain", "top_keys"),
}
"""Public names that return no array or one of integers, or hold arrays that another function has returned."""


@pytest.mark.parametrize("name", RESULTS)
def test_a_nan_in_any_result_is_refused(name: str) -> None:
    """JAX itself finds it in what a caller computes of a result."""
    import jax

    x = X.copy()
    x[0, 0, 0, 0] = np.nan
    query, key = jax.device_put(x), jax.device_put(X)
    function = name.partition(",")[0]
    refused = {
        "Pullback": "scaled_dot_product_attention_vjp",
        "Pullback.jvp": "scaled_dot_product_attention_vjp",
    }
    with debugs(), pytest.raises(FloatingPointError) as caught:
        RESULTS[name](query, key)
    assert str(caught.value).startswith(f"{refused.get(function, function)}: `"), caught.value


def test_all_functions_are_in_the_table() -> None:
    public = {name for name in sdpa_xp.__all__ if callable(getattr(sdpa_xp, name))}
    assert public - NO_ARRAYS == {name.partition(",")[0] for name in RESULTS} & public


def test_results_that_are_infinite_without_keys_are_no_fault() -> None:
    import jax

    x = jax.device_put(X)
    with debugs():
        state = attention_state(x, x, x, masks.prefix(0))
        merged = sdpa_xp.merge_states([state, state])
        scores = sdpa_xp.attention_scores(x, x, is_causal=True)
        largest = sdpa_xp.attention_statistics(x, x, of="row_max", attn_mask=masks.prefix(0)).row_max
    for array in (state.lse, merged.lse, np.asarray(scores)[..., :1, 1:], largest):
        assert np.isneginf(array).all()
