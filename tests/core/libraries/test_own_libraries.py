"""What sdpa_xp asks of a library that it does not know: no more than docs/how-to/add-a-backend.md says.

What it says if something is missing stands in tests/refusals/own_libraries.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from internals import cut_small
from minimal_library import Array, minimal

import sdpa_xp
from sdpa_xp import PagedKVCache, attention_state, biases, masks, positional, scaled_dot_product_attention

LENGTHS, IDS = np.asarray([5, 7]), np.asarray([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]])


LAST_IS_INF = np.where(np.arange(7)[:, None] < 6, 0, np.inf)


def beside(array: Any, values: np.ndarray) -> Any:
    return Array(values) if type(array) is Array else values


def relative(value: Any) -> biases.Bias:
    return biases.relative(value[0, 0, :, :4], bidirectional=False, max_distance=16)


def attended(q: Any, k: Any, v: Any, **rules: Any) -> Any:
    return scaled_dot_product_attention(q, k, v, **rules)


def merged(q: Any, k: Any, v: Any) -> Any:
    halves = (slice(0, 3), slice(3, 7))
    states = [attention_state(q, k[..., half, :], v[..., half, :], lse_base=2) for half in halves]
    return sdpa_xp.merge_states(states, lse_base=2).output


def derived(q: Any, k: Any, v: Any, **rules: Any) -> Any:
    output, pullback = sdpa_xp.scaled_dot_product_attention_vjp(q, k, v, **rules)
    return pullback(output)["key"]


def pushed(q: Any, k: Any, v: Any, **rules: Any) -> Any:
    return sdpa_xp.scaled_dot_product_attention_jvp(q, k, v, {"query": k, "key": v, "value": q}, **rules)[1]


def bent(q: Any, k: Any, v: Any) -> Any:
    pairs = {"query": [k, q], "key": [v, k], "value": [q, v]}
    tangents = {name: q.__array_namespace__().stack(pair, axis=0) for name, pair in pairs.items()}
    return sdpa_xp.scaled_dot_product_attention_laplacian(
        q, k, v, tangents, laplacians={"key": v}, is_causal=True
    )[2]


def cached(q: Any, k: Any, v: Any, **options: Any) -> Any:
    cache = sdpa_xp.KVCache(k, v, rotary=positional.Rotary(8), **options)
    return cache.append(k, v, in_place=bool(options)).attend(q, is_causal=True)


def paged(q: Any, k: Any, v: Any) -> Any:
    cache = PagedKVCache(k, v, [[0], [1]], [2, 4]).append(k[..., :1, :], v[..., :1, :])
    return cache.attend(q[..., :1, :])


def packed(q: Any, k: Any, v: Any) -> Any:
    return sdpa_xp.varlen_attention(q[0, ...], k[0, ...], v[0, ...], [0, 3, 7], [0, 5, 7], layout="...HLE")


def packed_state(q: Any, k: Any, v: Any) -> Any:
    starts = [0, 3, 7], [0, 5, 7]
    return sdpa_xp.varlen_attention_state(q[0, ...], k[0, ...], v[0, ...], *starts, layout="...HLE").lse


def ragged(q: Any, k: Any, v: Any) -> Any:
    cache = PagedKVCache(k, v, [[0], [1]], [2, 4])
    cache = cache.append(k[0, :, :3, :], v[0, :, :3, :], cu_seqlens_k=[0, 1, 3])
    return cache.attend_state(q[0, :, :3, :], cu_seqlens_q=[0, 1, 3]).lse


FEATURES: dict[str, Callable[..., Any]] = {
    "plain": attended,
    "scale, softcap": lambda q, k, v: attended(q, k, v, scale=0.3, softcap=5.0),
    "sinks": lambda q, k, v: attended(q, k, v, sinks=v[0, :, 0, 0]),
    "no keys": lambda q, k, v: attended(q, k[..., :0, :], v[..., :0, :]),
    "softmax_dtype": lambda q, k, v: attended(q, k, v, softmax_dtype=np.dtype("float64")),
    "causal": lambda q, k, v: attended(q, k, v, is_causal=True),
    "window": lambda q, k, v: attended(q, k, v, attn_mask=masks.sliding_window(2, 1)),
    "chunked, dilated": lambda q, k, v: attended(q, k, v, attn_mask=masks.chunked(3) | masks.dilated(2)),
    "padding": lambda q, k, v: attended(q, k, v, attn_mask=masks.causal() & masks.padding([0, 5])),
    "prefix": lambda q, k, v: attended(q, k, v, attn_mask=masks.causal() | masks.prefix([2, 3])),
    "documents": lambda q, k, v: attended(q, k, v, attn_mask=masks.document(IDS[0].tolist())),
    "documents in an array": lambda q, k, v: attended(q, k, v, attn_mask=masks.document(beside(q, IDS))),
    "lengths in an array": lambda q, k, v: attended(q, k, v, attn_mask=masks.padding(beside(q, LENGTHS))),
    "function as a mask": lambda q, k, v: attended(
        q, k, v, attn_mask=masks.from_function(lambda b, h, i, j: (i + j + b * h) % 3 != 0)
    ),
    "array as a mask": lambda q, k, v: attended(
        q, k, v, attn_mask=q @ k.__array_namespace__().matrix_transpose(k) > 0
    ),
    "array as a bias": lambda q, k, v: attended(q, k, v, bias=q[..., :7]),
    "alibi": lambda q, k, v: attended(q, k, v, bias=biases.alibi(4)),
    "relative": lambda q, k, v: attended(q, k, v, bias=relative(v)),
    "function as a bias": lambda q, k, v: attended(
        q, k, v, bias=biases.from_function(lambda s, b, h, i, j: s * 0.5)
    ),
    "dropout": lambda q, k, v: attended(q, k, v, dropout_p=0.3, rng=np.random.default_rng(0)),
    "state": lambda q, k, v: attention_state(q, k, v, is_causal=True).lse,
    "merged states": merged,
    "weights": lambda q, k, v: sdpa_xp.attention_weights(q, k, is_causal=True),
    "scores": lambda q, k, v: sdpa_xp.attention_scores(q, k, is_causal=True),
    "gradients": lambda q, k, v: derived(q, k, v, attn_mask=masks.causal() & masks.padding([0, 5])),
    "gradients of a bias": lambda q, k, v: derived(q, k, v, bias=relative(v)),
    "gradients, dropout": lambda q, k, v: derived(q, k, v, dropout_p=0.3, rng=np.random.default_rng(0)),
    "tangents": lambda q, k, v: pushed(q, k, v, attn_mask=masks.causal() & masks.padding([0, 5])),
    "tangents, dropout": lambda q, k, v: pushed(q, k, v, dropout_p=0.3, rng=np.random.default_rng(0)),
    "laplacian": bent,
    "dot_product_attention": lambda q, k, v: sdpa_xp.dot_product_attention(q, k, v, query_seq_lengths=[2, 3]),
    "varlen_attention": packed,
    "varlen_attention_state": packed_state,
    "KVCache": cached,
    "KVCache with room": lambda q, k, v: cached(q, k, v, capacity=16),
    "PagedKVCache": paged,
    "PagedKVCache, packed": ragged,
    "sinusoidal": lambda q, k, v: positional.sinusoidal(7, 8, like=q),
    "learned": lambda q, k, v: positional.learned(q[0, 0, ...], [0, 2, 1]),
    "mask as an array": lambda q, k, v: masks.to_array(masks.causal(), (7, 7), like=q),
    "bias as an array": lambda q, k, v: biases.to_array(biases.alibi(4), (4, 7, 7), like=q),
    "inf in masked keys": lambda q, k, v: attended(
        q, k, v + beside(v, LAST_IS_INF.astype(v.dtype)), attn_mask=masks.causal()
    ),
}


@pytest.fixture
def inputs() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((3, 2, 4, 7, 8))


@pytest.mark.rule("R2")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("feature", FEATURES)
def test_no_more_is_needed(feature: str, dtype: str, inputs: np.ndarray, monkeypatch: Any) -> None:
    cut_small(monkeypatch)
    arrays = inputs.astype(dtype)
    expected = FEATURES[feature](*arrays)
    result = FEATURES[feature](*map(Array, arrays))
    assert type(result) is Array
    assert result.dtype == expected.dtype
    as_float64 = [np.asarray(x).astype(np.float64) for x in (result.data, expected)]
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-5)
    np.testing.assert_allclose(*as_float64, rtol=tolerance, atol=tolerance)


def test_an_error_of_a_missing_name_is_that_of_its_namespace(inputs: np.ndarray, monkeypatch: Any) -> None:
    monkeypatch.delattr(minimal, "exp")
    with pytest.raises(AttributeError) as error:
        scaled_dot_product_attention(*map(Array, inputs))
    assert (error.value.name, error.value.obj) == ("exp", minimal)
    assert str(error.value.__cause__) == "module 'minimal' has no attribute 'exp'"


def test_an_attribute_error_of_a_caller_stays(inputs: np.ndarray) -> None:
    mask = masks.from_function(lambda b, h, i, j: i.no_such_method())
    with pytest.raises(AttributeError, match=r"^'Array' object has no .* 'no_such_method'") as error:
        scaled_dot_product_attention(*map(Array, inputs), mask)
    assert error.value.__cause__ is None


def test_a_namespace_that_does_not_tell_its_dtypes_names_the_function(
    inputs: np.ndarray, monkeypatch: Any
) -> None:
    query, key, value = map(Array, inputs)
    monkeypatch.delattr(minimal, "__array_namespace_info__")
    calls: dict[str, Callable[[], object]] = {
        "scaled_dot_product_attention": lambda: attended(query, key, value, softmax_dtype=minimal.float64),
        "to_array": lambda: masks.to_array(masks.causal(), (3, 3), like=query),
        "sinusoidal": lambda: positional.sinusoidal(3, 4, like=query),
    }
    for function, call in calls.items():
        rule = rf"^{function}: the namespace minimal must have __array_namespace_info__\(\), which"
        with pytest.raises(TypeError, match=rule):
            call()
