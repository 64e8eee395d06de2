"""Memory on NumPy, by what it allocates: linear in the length, and no copy of keys for grouped heads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from internals import ONE_CORE, TileSize, memory, override

import sdpa_xp
from sdpa_xp import (
    KVCache,
    PagedKVCache,
    biases,
    masks,
    scaled_dot_product_attention,
    scaled_dot_product_attention_vjp,
)

F = np.float32


def peak(function: Callable[[], object], first: Callable[[], object] | None = None) -> int:
    """Bytes that `function` holds at most at one time, with its buffers; before, `first` imports everything."""
    (first or function)()
    memory._IDLE.clear()
    tracemalloc.start()
    function()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes


def test_keys_and_values_are_not_repeated_for_groups(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 query heads on one key head: repeated keys would be 64 times the keys."""
    override(monkeypatch, "ONE_CORE", ONE_CORE._replace(scores=2**16))
    q, k = rng.standard_normal((64, 1, 32)).astype(F), rng.standard_normal((1, 4096, 32)).astype(F)
    assert peak(lambda: scaled_dot_product_attention(q, k, k)) < 2 * k.nbytes


Made = Callable[[int], dict[str, Any]]
FEATURES: dict[str, Made] = {
    "plain": lambda n: {},
    "array of keys": lambda n: {"attn_mask": np.arange(n) % 2 > 0, "is_causal": True},
    "causal": lambda n: {"attn_mask": masks.causal("lower_right")},
    "sliding window": lambda n: {"attn_mask": masks.sliding_window(n // 2, None)},
    "padding": lambda n: {"attn_mask": masks.padding(n - 5)},
    "documents": lambda n: {"attn_mask": masks.document(np.arange(n) // 1500)},
    "prefix, chunks, dilation": lambda n: {
        "attn_mask": (masks.causal() | masks.prefix(99)) & ~(masks.chunked(7) & masks.dilated(3))
    },
    "keys": lambda n: {"attn_mask": masks.keys(np.arange(n)[:, None] // [1, 2, 3], 1) & masks.causal()},
    "mask function": lambda n: {"attn_mask": masks.from_function(lambda b, h, i, j: (i * j) % 3 != 1)},
    "alibi": lambda n: {"bias": biases.alibi(1)},
    "relative": lambda n: {"bias": biases.relative(np.ones((32, 1), F))},
    "score function": lambda n: {"bias": biases.from_function(lambda score, b, h, i, j: score - (i != j))},
    "sinks": lambda n: {"sinks": np.ones(1, F)},
    "dropout": lambda n: {"dropout_p": 0.5, "rng": np.random.default_rng(0)},
}


def named(x: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    return dict(zip(("query", "key", "value"), x, strict=True))


def assert_linear(make: Made, attend: Callable[..., Any], more: int = 1) -> None:
    """4 times the length takes at most 5 times the memory, and less than half a byte a pair more.

    With small tiles, whose memory would be more than the arrays'.
    """

    def call(length: int) -> object:
        x = np.random.default_rng(0).standard_normal((length, 4)).astype(F)
        return attend(x, x, x, **make(length))

    with pytest.MonkeyPatch.context() as patch:
        override(patch, "ONE_CORE", TileSize(64, 256, 2**14))
        peaks = [peak(partial(call, length), partial(call, 64)) for length in (256, 1024)]
    assert peaks[1] < 5 * peaks[0]
    assert peaks[1] - peaks[0] < 1024 * 1024 / 2 * more


@pytest.mark.parametrize("make", FEATURES.values(), ids=FEATURES)
def test_no_feature_makes_a_score_matrix(make: Made) -> None:
    assert_linear(make, scaled_dot_product_attention)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", FEATURES.values(), ids=FEATURES)
def test_no_gradient_makes_a_score_matrix(make: Made) -> None:
    """Neither the output with what is kept for the pullback, nor the pullback."""
    assert_linear(make, lambda *x, **rules: scaled_dot_product_attention_vjp(*x, **rules)[1](x[0]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", FEATURES.values(), ids=FEATURES)
def test_no_tangent_makes_a_score_matrix(make: Made) -> None:
    assert_linear(make, lambda *x, **rules: sdpa_xp.scaled_dot_product_attention_jvp(*x, named(x), **rules))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", FEATURES.values(), ids=FEATURES)
def test_no_laplacian_makes_a_score_matrix(make: Made) -> None:
    push = sdpa_xp.scaled_dot_product_attention_laplacian
    assert_linear(make, lambda *x, **rules: push(*x, {n: y[None] for n, y in named(x).items()}, **rules))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", FEATURES.values(), ids=FEATURES)
def test_no_second_derivative_makes_a_score_matrix(make: Made) -> None:
    def push(*x: Any, **rules: Any) -> Any:
        _, pullback = scaled_dot_product_attention_vjp(*x, **rules)
        return pullback.jvp(x[0], named(x), x[0])

    assert_linear(make, push, more=2)  # twice as many results


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("is_paged", [False, True])
def test_a_cache_is_not_widened_as_a_whole(rng: np.random.Generator, queries: int, is_paged: bool) -> None:
    """float32 queries of a float16 cache: its keys alone would take 16 MiB in float32."""
    tokens = rng.standard_normal((1, 1, 65536, 64)).astype(np.float16)
    query = rng.standard_normal((1, 1, queries, 64)).astype(F)
    cache: Any = KVCache(tokens, tokens)
    if is_paged:
        pool = tokens.reshape(4096, 1, 16, 64)
        cache = PagedKVCache(pool, pool, [[*range(4096)]], [65536])
    assert peak(lambda: cache.attend(query)) < 8 * 2**20


def test_no_answer_of_a_mask_is_kept_for_other_heads_without_need() -> None:
    """Of one head no other asks again, and gradients ask once: an answer of 1,024 x 65,536 pairs is 64 MiB."""
    x, keys = np.ones((1, 1024, 8), F), np.ones((1, 65536, 8), F)
    mask = masks.blocks(np.indices((22, 1366)).sum(axis=0) % 2 == 0, 48)
    output, pullback = scaled_dot_product_attention_vjp(x, keys, keys, mask)
    for call in (lambda: scaled_dot_product_attention(x, keys, keys, mask), lambda: pullback(output)):
        assert peak(call) < 12 * 2**20


def test_a_pullback_keeps_the_inputs_the_output_and_the_log_sum_exp(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 4096, 16)).astype(F)
    tracemalloc.start()
    output, pullback = scaled_dot_product_attention_vjp(x, x, x, is_causal=True)
    pullback(x)
    memory._IDLE.clear()  # about 1 MB whatever the length is
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 1.1 * output.nbytes + 4 * 4 * 4096


def test_packed_sequences_are_not_padded(rng: np.random.Generator) -> None:
    """One of 4096 and 255 of 16: padded to the longest, they would be 128 times as many."""
    x = rng.standard_normal((8192 - 16, 1, 8)).astype(F)
    starts = [0, *range(4096, len(x), 16), len(x)]
    assert peak(lambda: sdpa_xp.varlen_attention(x, x, x, starts, starts)) < 40 * x.nbytes


def test_a_step_copies_no_cache(rng: np.random.Generator) -> None:
    """In place, and from pages: attention of one token over 65,536 takes a small part of what they take."""
    x = rng.standard_normal((1, 1, 65536, 64)).astype(F)
    token = x[:, :, :1]
    pages = x.reshape(256, 1, 256, 64)

    caches = [KVCache(x[:, :, 2:], x[:, :, 2:], capacity=65536)]
    paged = sdpa_xp.PagedKVCache(pages, pages, [list(range(256))], [65536])

    def step() -> None:
        caches.append(caches[-1].append(token, token, in_place=True))
        caches[-1].attend(token)

    assert peak(step) < x.nbytes / 4
    assert peak(lambda: paged.attend(token)) < x.nbytes / 4


@pytest.mark.parametrize(("dtype", "per"), [("int8", "channel"), ("int4", "token")])
def test_a_step_widens_no_copy_of_a_quantised_cache(
    rng: np.random.Generator, dtype: Any, per: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rng.standard_normal((1, 65536, 64)).astype(F)
    pages = x.reshape(256, 1, 256, 64)
    caches = [KVCache(x, x, capacity=65600).quantised(dtype, per=per)]
    paged = sdpa_xp.PagedKVCache(pages, pages, [list(range(256))], [65536]).quantised(dtype, per=per)

    def step() -> None:
        caches.append(caches[-1].append(x[:, :1], x[:, :1], in_place=True))
        caches[-1].attend(x[:, :1])

    for function in (step, lambda: caches[-1].attend(x[:, :256]), lambda: paged.attend(x[None, :, :1])):
        assert peak(function) < x.nbytes / 4
    # The codes, a copy of them, the magnitudes of the keys, and the few numbers of a part.
    override(monkeypatch, "MOST_AT_ONCE", 2**16)
    limit = 2 * caches[0].nbytes + x.nbytes // 2 + (2 * x.nbytes if per == "channel" else 0)
    assert peak(lambda: KVCache(x, x).quantised(dtype, per=per)) < limit


def test_many_heads_share_one_budget(rng: np.random.Generator) -> None:
    """The tile shrinks with the number of heads: 512 heads of 128 x 128 make no 32 MB of scores."""
    x = rng.standard_normal((64, 8, 128, 16)).astype(F)
    assert peak(lambda: scaled_dot_product_attention(x, x, x)) < 6 * 4 * 2**22


def test_statistics_make_no_score_matrix() -> None:
    """All of them, under a mask and with blocks that are smaller and larger than a tile."""

    def attend(query: Any, key: Any, _value: Any, **options: Any) -> object:
        names = ("row_max", "entropy", "key_sums", "top_keys", "block_sums")
        size = len(query) // 16
        return sdpa_xp.attention_statistics(
            query, key, of=names, top_k=3, block_size=(size, 8 * size), **options
        )

    assert_linear(lambda n: {"attn_mask": masks.sliding_window(n // 2, None)}, attend, more=2)


def test_statistics_of_100_000_keys_take_less_than_64_mb() -> None:
    """Above inputs and outputs. Few queries, since what is held grows with them only by a tile."""
    x = np.random.default_rng(0).standard_normal((100_000, 64)).astype(F)
    for options in ({"of": "key_sums"}, {"of": "block_sums", "block_size": 196}):
        assert peak(lambda options=options: sdpa_xp.attention_statistics(x[:200], x, **options)) < 64 * 2**20
