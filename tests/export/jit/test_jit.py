"""A layer through `jit`: what it returns, its sessions and models, and weights that change."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from sdpa_xp import AttentionState, KVCache, attention_state, masks, scaled_dot_product_attention
from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp_export import jit, verify_layer

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 8), np.float32)
HEADS = RNG.standard_normal((2, 4, 5, 8), np.float32)
LAYER = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2, like=X)


def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False) -> Any:
    return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal)


def decode(x: Any, past_key: Any, past_value: Any) -> dict[str, Any]:
    cache = KVCache(past_key, past_value)
    cache = cache.append(*LAYER.project_key_value(x))
    return {"output": LAYER.attend(x, cache), "key": cache.key, "value": cache.value}


def shapes(model: onnx.ModelProto) -> list[list[int | str]]:
    return [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    ]


def test_one_session_computes_open_lengths() -> None:
    fast = jit(attend)
    for batch, length in ((2, 5), (3, 7), (3, 1), (1, 1)):
        x = RNG.standard_normal((batch, 4, length, 8), np.float32)
        np.testing.assert_allclose(fast(x, x, x), attend(x, x, x), atol=2e-6)
    assert shapes(fast.model) == [["query_0", 4, "query_2", 8]] * 3
    alone = jit(attend)
    alone(HEADS[:1], HEADS[:1], HEADS[:1])
    assert shapes(alone.model) == [[1, 4, "query_2", 8]] * 3


def test_equal_lengths_of_a_call_may_be_unlike_in_the_next() -> None:
    fast = jit(attend)
    key = RNG.standard_normal((2, 4, 3, 8), np.float32)
    for keys in (HEADS, key, HEADS):
        np.testing.assert_allclose(fast(HEADS, keys, keys), attend(HEADS, keys, keys), atol=2e-6)
    assert [shapes(model)[1][2] for model in fast.models] == ["query_2", "key_2"]


def test_a_length_of_1_broadcasts_in_a_session_of_its_own() -> None:
    fast = jit(lambda a, b: a + b)
    for shape in ((5, 8), (1, 8), (5, 1), (1, 1), (8,), ()):
        b = RNG.standard_normal(shape)
        np.testing.assert_array_equal(fast(X.astype(float), b), X + b)
    assert len(fast.models) == 6


def test_a_length_that_is_used_as_a_number_is_fixed() -> None:
    fast = jit(lambda x: x * (1 if x.shape[1] > 5 else 2))
    for length in (3, 6, 5, 9):
        x = RNG.standard_normal((2, length, 8), np.float32)
        np.testing.assert_array_equal(fast(x), x * (1 if length > 5 else 2))
    assert shapes(fast.models[0]) == [["x_0", 3, "x_2"]]


def test_heads_that_are_as_many_as_the_tokens() -> None:
    """Coincidence must not fix a length for good: 4 heads, 4 tokens, width 4, batch of 4."""
    fast = jit(attend)
    for length in (4, 3, 6, 4):
        x = RNG.standard_normal((4, 4, length, 4), np.float32)
        np.testing.assert_allclose(fast(x, x, x), attend(x, x, x), atol=2e-6)
    assert len(fast.models) <= 2


def test_arguments_that_are_no_arrays_are_part_of_the_signature() -> None:
    def layer(x: Any, by: Any = 1, *, more: Any = None) -> Any:
        if more is not None:
            return x * by + len(more)
        return -x if by is True else x * by

    fast = jit(layer)
    for by in (1, True, 1.0, 2, 0.0, -0.0):
        np.testing.assert_array_equal(fast(X, by), layer(X, by))
        np.testing.assert_array_equal(np.signbit(fast(X, by)), np.signbit(layer(X, by)))
    np.testing.assert_array_equal(fast(x=X, by=2), X * 2)
    np.testing.assert_array_equal(fast(X, more="abc"), X + 3)
    np.testing.assert_array_equal(fast(X, np.float32(3)), X * 3)
    assert jit(lambda x, dtype: x.astype(dtype))(X, np.float64).dtype == np.float64


def test_keywords_in_another_order_are_the_same_arguments() -> None:
    fast = jit(lambda a, b: a - b)
    one, other = X, X + 1
    np.testing.assert_array_equal(fast(b=one, a=one), one - one)
    np.testing.assert_array_equal(fast(b=one, a=other), other - one)
    np.testing.assert_array_equal(fast(a=one, b=other), one - other)
    np.testing.assert_array_equal(fast(one, b=other), one - other)
    assert len(fast.models) == 1


def test_arrays_within_other_arguments_are_inputs() -> None:
    fast = jit(lambda pair, named: {"sum": pair[0] + named["a"], "difference": pair[1] - named["b"]})
    for length in (3, 4):
        a, b = RNG.standard_normal((2, length, 2))
        result = fast([a, b], {"a": b, "b": a})
        np.testing.assert_array_equal(result["sum"], a + b)
        np.testing.assert_array_equal(result["difference"], b - a)
    assert len(fast.models) == 1


def test_the_lengths_of_a_mask_are_inputs() -> None:
    fast = jit(LAYER)
    for lengths in ([2, 5], np.asarray([1, 3]), [5, 5]):
        mask = masks.causal() & masks.padding(lengths)
        np.testing.assert_allclose(fast(X, attn_mask=mask), LAYER(X, attn_mask=mask), atol=2e-6)
    assert len(fast.models) == 1
    other = masks.padding([2, 5]) & masks.sliding_window(1, 0)
    np.testing.assert_allclose(fast(X, attn_mask=other), LAYER(X, attn_mask=other), atol=2e-6)


def test_a_state_comes_back_as_one() -> None:
    def layer(x: Any) -> Any:
        return attention_state(x, x, x)

    result = jit(layer)(X)
    assert type(result) is AttentionState
    for one, other in zip(result, layer(X), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
        assert one.dtype == other.dtype


def test_a_decoder_keeps_its_cache_in_arrays() -> None:
    """The prompt has no past, and one session computes it and all steps."""
    fast = jit(decode)
    x = RNG.standard_normal((1, 9, 8), np.float32)
    empty = np.zeros((1, 2, 0, 4), np.float32)
    state, outputs = {"key": empty, "value": empty}, []
    for start, end in ((0, 4), *((n, n + 1) for n in range(4, 9))):
        state = fast(x[:, start:end], state["key"], state["value"])
        outputs.append(state["output"])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), LAYER(x, is_causal=True), atol=2e-6)
    assert len(fast.models) == 1


def test_arrays_without_elements_are_computed_by_the_layer() -> None:
    fast = jit(attend)
    nothing = HEADS[:0]
    assert fast(nothing, nothing, nothing).shape == (0, 4, 5, 8)
    assert not fast(HEADS, HEADS[:, :, :0], HEADS[:, :, :0]).any()
    assert fast.models == ()


def test_results_are_new_arrays_that_stay() -> None:
    fast = jit(lambda x: (x, x))
    one, other = fast(X)
    assert not any(np.shares_memory(a, b) for a, b in ((one, X), (other, X), (one, other)))
    one += 1
    later = fast(X * 0)
    del fast
    gc.collect()
    np.testing.assert_array_equal(one, X + 1)
    np.testing.assert_array_equal(other, X)
    assert later[0].flags.writeable


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint64, np.bool_, ml_dtypes.bfloat16])
def test_dtypes(dtype: Any) -> None:
    x = np.arange(6).reshape(2, 3).astype(dtype)
    fast = jit(lambda x, y: x.__array_namespace__().where(y, x, x[:, ::-1]))
    result = fast(x, np.asarray([True, False, True]))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.where([True, False, True], x, x[:, ::-1]))


def test_a_layer_of_another_library_computes_on_numpy() -> None:
    """The weights are in the graph, whatever holds them."""
    torch = pytest.importorskip("torch")
    weight = torch.eye(8) * 3
    np.testing.assert_array_equal(jit(lambda x: x @ weight)(X), X * 3)
    assert isinstance(jit(LAYER)(torch.asarray(X)), torch.Tensor)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "bool", "int64"])
def test_tensors(dtype: str) -> None:
    import torch

    x = torch.asarray(HEADS).to(getattr(torch, dtype))
    fast = jit(
        lambda x, y: {"first": x & y, "second": ~y} if dtype == "bool" else {"first": x + y, "second": y > 0}
    )
    for a, b in ((x, x), (x.mT, x.mT), (x[:1].expand(3, 4, 5, 8), x[:1]), (x[0, 0, 0, ::2], x[0, 0, 0, ::2])):
        first, second = fast(a, b).values()
        expected = a & b if dtype == "bool" else a + b
        assert torch.equal(first, expected)
        assert first.dtype == x.dtype
        assert second.dtype == torch.bool


@pytest.mark.needs("torch")
def test_arrays_of_the_caller_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fast = jit(lambda a, b: a + b)
    tensor = torch.asarray(X)
    fast(X, X), fast(tensor, tensor)
    addresses = []

    def noted(self: Any, names: Any, feeds: Any, options: Any = None) -> Any:
        addresses.extend(array.__array_interface__["data"][0] for array in feeds.values())
        return run(self, names, feeds, options)

    run = onnxruntime.InferenceSession.run
    monkeypatch.setattr(onnxruntime.InferenceSession, "run", noted)
    fast(X, X), fast(tensor, tensor)
    assert addresses == [X.__array_interface__["data"][0]] * 2 + [tensor.data_ptr()] * 2


def test_a_layer_may_call_a_layer_of_jit() -> None:
    inner = jit(LAYER)
    fast = jit(lambda x: inner(x) + 1)
    np.testing.assert_allclose(fast(X), LAYER(X) + 1, atol=2e-6)
    assert len(fast.models) == 1
    assert inner.models == ()


@pytest.mark.parametrize("verify", [False, True])
def test_a_layer_that_counts_its_calls_keeps_its_sessions(verify: bool) -> None:
    class Counting:
        traced = 0

        def __call__(self, x: Any) -> Any:
            self.traced += 1
            return x * 2 + 0.5

    layer = Counting()
    fast = jit(layer, verify=verify)
    for dtype in (np.float32, np.float64) * 3:
        fast(X.astype(dtype))
    assert len(fast.models) == 2
    traced = layer.traced
    fast(X)
    assert layer.traced == traced


def test_a_function_in_a_mask_is_noticed_when_it_changes() -> None:
    least = 1

    def mask_mod(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return query - key >= least

    mask = masks.from_function(mask_mod)
    fast = jit(LAYER)
    for least in (1, 0, -2):  # noqa: B007, which mask_mod reads
        np.testing.assert_allclose(fast(X, attn_mask=mask), LAYER(X, attn_mask=mask), atol=2e-6)


def test_weights_are_in_the_graph_and_live_no_longer_than_it() -> None:
    fast = jit(functools.partial(lambda w, x: x @ w, np.eye(8, dtype=np.float32)))
    fast(X)
    assert [tuple(tensor.dims) for tensor in fast.model.graph.initializer] == [(8, 8)]
    reference = weakref.ref(fast)
    del fast
    gc.collect()
    assert reference() is None


def test_the_model_is_what_computes_the_calls(tmp_path: Path) -> None:
    fast = jit(LAYER, runtime="onnxruntime>=1.28;cpu")
    result = fast(X, is_causal=True)
    path = fast.save(tmp_path / "layer.onnx")
    (output,) = onnxruntime.InferenceSession(path).run(None, {"query": X})
    np.testing.assert_array_equal(output, result)
    assert verify_layer(path, LAYER, is_causal=True).agrees
    with pytest.raises(FileExistsError):
        fast.save(path)
    assert fast.save(path, overwrite=True) == path


def test_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []

    def noted(model: Any, layer: Any, **options: Any) -> Any:
        verified.append(options)
        return verify_layer(model, layer, **options)

    monkeypatch.setattr(sys.modules["sdpa_xp_export.jit"], "verify_layer", noted)
    fast = jit(LAYER, verify=True)
    mask = masks.padding([2, 5])
    for _ in range(2):
        result = fast(X, attn_mask=mask, is_causal=True)
        np.testing.assert_allclose(result, LAYER(X, attn_mask=mask, is_causal=True), atol=2e-6)
    assert len(verified) == 1
    assert jit(lambda x, *, seed: x + seed, verify=True)(X, seed=1).shape == X.shape

    def unlike(x: Any) -> Any:
        return x + float(isinstance(x, np.ndarray))

    with pytest.raises(ValueError, match="must agree with it"):
        jit(unlike, verify=True)(X)


def test_threads() -> None:
    fast = jit(lambda x, scale=1.0: attend(x * scale, x, x))

    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            shape = (int(rng.integers(1, 4)), 2, int(rng.integers(1, 6)), 8)
            x = rng.standard_normal(shape).astype(rng.choice(["float32", "float64"]))
            scale = float(rng.choice([0.5, 1.0]))
            np.testing.assert_allclose(fast(x, scale), attend(x * scale, x, x), rtol=0, atol=5e-6)
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    """A thread that traced a layer at the moment of the fork is missing there."""
    entered, leave = threading.Event(), threading.Event()

    def layer(x: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            leave.wait()
        return x + 1

    fast = jit(layer)
    thread = threading.Thread(target=fast, args=(X,))
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(fast(X.astype(float)), X.astype(float) + 1) else 1)
    leave.set()
    thread.join()
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the forked process waits for ever")
        time.sleep(0.05)
    assert ended[1] == 0
