"""Masks, biases, sinks and caches inside jit, torch.compile and vmap: one graph, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import draw_named, sloping, tracer_of, vmap_of
from libraries import Library, generator

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache, attention_scores, attention_state, attention_weights, biases, masks
from sdpa_xp import scaled_dot_product_attention as attend

F = np.float32
Arrays = dict[str, np.ndarray]
LATE = masks.causal() & ~masks.chunked(2)  # torch.compile does not trace `~` of an object; this is made before


@pytest.fixture
def arrays(rng: np.random.Generator) -> Arrays:
    """Inputs, and what masks and biases are made of: an array each, so that a trace sees all of them."""
    shapes = {"q": (2, 4, 8, 8), "k": (2, 2, 12, 8), "v": (2, 2, 12, 5), "table": (8, 4), "slopes": (4,)}
    inputs = draw_named(rng, shapes)
    return inputs | {
        "lengths": np.asarray([5, 12], np.int32),
        "small": np.asarray([3, 11], np.uint8),
        "ids": np.asarray([[0, 0, 1, 1, 1, 2, 2, 2], [0] * 8], np.int32),
        "key_ids": np.asarray([[0] * 6 + [1] * 6, [0] * 11 + [3]], np.int32),
    }


Calls = Callable[..., Any]
CALLS: dict[str, Calls] = {
    "causal, an offset per batch entry": lambda q, k, v, lengths, **_: attend(q, k, v, masks.causal(lengths)),
    "lower right and a window": lambda q, k, v, lengths, **_: attend(
        q, k, v, masks.causal("lower_right") & masks.sliding_window(3, 1, offset=lengths)
    ),
    "padding": lambda q, k, v, lengths, **_: attend(q, k, v, masks.padding(lengths, [3, 8])),
    "unsigned lengths": lambda q, k, v, small, **_: attend(q, k, v, masks.padding(small)),
    "documents or prefix": lambda q, k, v, lengths, ids, key_ids, **_: attend(
        q, k, v, masks.document(ids, key_ids) | masks.prefix(lengths)
    ),
    "function": lambda q, k, v, **_: attend(
        q, k, v, masks.from_function(lambda b, h, i, j: i + h + b >= j) & LATE
    ),
    "alibi": lambda q, k, v, lengths, slopes, **_: attend(
        q, k, v, bias=biases.alibi(slopes, offset=lengths) + biases.alibi(4)
    ),
    "relative": lambda q, k, v, table, **_: attend(q, k, v, bias=biases.relative(table, max_distance=6)),
    "score function": lambda q, k, v, **_: attend(q, k, v, bias=biases.from_function(sloping)),
    "sinks": lambda q, k, v, slopes, **_: (
        attention_state(q, k, v, sinks=slopes, is_causal=True, lse_base=2).lse
    ),
    "weights": lambda q, k, lengths, slopes, **_: attention_weights(
        q, k, attn_mask=masks.causal(lengths), sinks=slopes
    ),
    "scores": lambda q, k, lengths, **_: attention_scores(q, k, attn_mask=masks.padding(lengths)),
    "statistics": lambda q, k, **_: (
        sdpa_xp.attention_statistics(
            q, k, of=("row_max", "entropy", "top_keys", "block_sums"), top_k=2, block_size=3
        ).block_sums
    ),
    "packed": lambda q, k, v, **_: sdpa_xp.varlen_attention(
        q[0, ...], k[0, ...], v[0, ...], (0, 4, 8), (0, 7, 12), is_causal=True, layout="...HLE"
    ),
    "cache": lambda q, k, v, **_: (
        KVCache(k[:, :, :8, :], v[:, :, :8, :])
        .append(k[:, :, 8:, :], v[:, :, 8:, :])
        .attend(q, masks.sliding_window(5, 0))
    ),
    "paged cache": lambda q, k, v, **_: PagedKVCache(
        k[:, :, :4, :], v[:, :, :4, :], ((0, 1), (1,)), (7, 3)
    ).attend(q[:, :, :3, :]),
    "names of JAX": lambda q, k, v, **_: sdpa_xp.dot_product_attention(
        q, k[:, :, :4, :], v[:, :, :4, :], query_seq_lengths=[1, 2], local_window_size=(3, 0)
    ),
}


@pytest.mark.leaves_out("torch-cuda-rules")
@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.slow
def test_one_graph_of_it(library: Library, arrays: Arrays, call: Calls) -> None:
    """Nothing is read of any array, and the numbers are those of NumPy, tile by tile, without a trace."""
    traced = tracer_of(library)(call)
    expected = np.asarray(call(**arrays))
    result = library.get(library.call(traced, **arrays))
    np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_dropout_inside_a_jit(library: Library, arrays: Arrays) -> None:
    """A key of JAX or MLX is an argument like the others; torch.compile takes no generator, which the message
    says."""
    name = library.name.split("-")[0]
    inputs = [arrays[key] for key in "qkv"]

    def call(q: Any, k: Any, v: Any, rng: Any = None) -> Any:
        return attend(q, k, v, dropout_p=0.5, rng=rng)

    if library.jit is not None:
        jitted = library.jit(call)
        for seed in (3, 4):
            key = generator(library, seed)
            result, expected = (
                library.get(library.call(function, *inputs, rng=key)) for function in (jitted, call)
            )
            np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)
        return
    if name != "torch":
        pytest.skip("the library has no traces")
    import torch

    random = torch.Generator().manual_seed(3)
    compiled = torch.compile(lambda *x: call(*x, random), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"`rng` cannot be used inside torch\.compile"):
        library.call(compiled, *inputs)


@pytest.mark.parametrize("what", ["mask", "bias"])
def test_function_of_a_traced_array(library: Library, arrays: Arrays, what: str) -> None:
    """Query, key and value are none: the trace shows in what the function returns."""
    library.needs_jit()
    with library.guard():
        q, k, v = (library.put(arrays[name]) for name in "qkv")

        def call(numbers: Any, q: Any = q, k: Any = k, v: Any = v) -> Any:
            if what == "mask":
                mask = masks.from_function(lambda b, h, i, j: numbers[j] > 2)
                return attend(q, k, v, mask)
            bias = biases.from_function(lambda score, b, h, i, j: score * numbers[j])
            return attend(q, k, v, bias=bias)

        numbers = np.arange(12, dtype=F)
        result = library.get(library.jit(call)(library.put(numbers)))
        expected = call(numbers, *(arrays[name] for name in "qkv"))
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)


@pytest.mark.leaves_out("torch-cuda-rules")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_vmap_over_lengths(library: Library, arrays: Arrays) -> None:
    mapped = vmap_of(library)(lambda q, k, v, length: attend(q, k, v, masks.padding(length)))
    inputs = [arrays[key] for key in ("q", "k", "v", "lengths")]
    expected = attend(*inputs[:3], masks.padding(arrays["lengths"]))
    np.testing.assert_allclose(library.get(library.call(mapped, *inputs)), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("argument", ["left", "size"])
def test_what_must_be_static_is_named(library: Library, argument: str) -> None:
    """A width is part of how a call is cut."""
    library.needs_jit()
    make = {"left": lambda n: masks.sliding_window(n, 0), "size": lambda n: masks.chunked(n)}[argument]
    with pytest.raises(TypeError, match=f"`{argument}` must be an integer.*Inside a jit it has to be static"):
        library.jit(lambda n: masks.to_array(make(n), (3, 3)))(library.put(np.asarray(3)))


def test_a_mask_is_a_static_argument(library: Library, arrays: Arrays) -> None:
    """Those that hold no array can be hashed."""
    if library.name.split("-")[0] != "jax":
        pytest.skip("jit is JAX's")
    import jax

    jitted = jax.jit(attend, static_argnums=3)
    inputs = [arrays[key] for key in "qkv"]
    for mask in (masks.causal(1), masks.sliding_window(2, 2) | masks.padding([3, 12])):
        expected = attend(*inputs, mask)
        result = library.call(lambda q, k, v, mask=mask: jitted(q, k, v, mask), *inputs)
        np.testing.assert_allclose(library.get(result), expected, rtol=0, atol=2e-6)
