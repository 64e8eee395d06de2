"""How often a call waits for a GPU, copies to it and launches kernels on it, counted without a GPU.

Each number is the most that a call may take: to be lowered when it takes less, not to be raised. The same calls
on the CPU give the same bits, since the tensors that stand in for CUDA are computed there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from internals import on_device

import sdpa_xp
from sdpa_xp import biases, explain, masks, scaled_dot_product_attention, scaled_dot_product_attention_vjp

torch: Any = pytest.importorskip("torch")

from standins.torch_cuda import cuda_tensors, get, put  # noqa: E402

pytestmark = pytest.mark.needs("torch")

Put: TypeAlias = Callable[[Any], Any]
SHORT, LONG, UNEVEN = (2, 2, 64, 8), (2, 2, 1024, 8), (2, 2, 700, 8)


def lengths(put: Put, *numbers: int) -> Any:
    return put(torch.tensor(numbers))


def documents(put: Put, length: int) -> Any:
    return masks.document(put(torch.arange(length) // 100))


def triangle(put: Put, length: int) -> Any:
    return put(torch.ones(length, length, dtype=torch.bool).tril())


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CALLS: dict[str, tuple[tuple[int, ...], Callable[[Put], dict[str, Any]], tuple[int, int]]] = {
    "plain": (SHORT, lambda put: {}, (0, 12)),
    "softcap": (SHORT, lambda put: {"softcap": 5.0}, (0, 15)),
    "sinks": (SHORT, lambda put: {"sinks": put(random(2))}, (0, 22)),
    "causal": (SHORT, lambda put: {"is_causal": True}, (1, 25)),
    "causal, long": (LONG, lambda put: {"is_causal": True}, (1, 90)),
    "causal, very long": ((1, 2, 4096, 4), lambda put: {"is_causal": True}, (1, 726)),
    "window": (LONG, lambda put: {"attn_mask": masks.sliding_window(100, 0)}, (1, 110)),
    "chunks": (LONG, lambda put: {"attn_mask": masks.chunked(300)}, (1, 87)),
    "lower right": (UNEVEN, lambda put: {"attn_mask": masks.causal("lower_right")}, (1, 69)),
    "padding, list": (SHORT, lambda put: {"attn_mask": masks.padding([50, 64])}, (1, 23)),
    "padding": (SHORT, lambda put: {"attn_mask": masks.padding(lengths(put, 50, 64))}, (1, 40)),
    "padding, long": (LONG, lambda put: {"attn_mask": masks.padding(lengths(put, 1000, 400))}, (1, 89)),
    "padding of both": (
        UNEVEN,
        lambda put: {"attn_mask": masks.padding(lengths(put, 600, 9), lengths(put, 5, 700))},
        (1, 91),
    ),
    "padding and causal": (
        LONG,
        lambda put: {"attn_mask": masks.padding(lengths(put, 1000, 400)), "is_causal": True},
        (1, 106),
    ),
    "boolean": (SHORT, lambda put: {"attn_mask": triangle(put, 64)}, (1, 21)),
    "boolean, long": (LONG, lambda put: {"attn_mask": triangle(put, 1024)}, (1, 81)),
    "boolean, uneven": (UNEVEN, lambda put: {"attn_mask": triangle(put, 700)}, (1, 69)),
    "boolean keys": (LONG, lambda put: {"attn_mask": put(torch.arange(1024) < 300)}, (1, 74)),
    "documents": (LONG, lambda put: {"attn_mask": documents(put, 1024)}, (1, 86)),
    "documents, list": (LONG, lambda put: {"attn_mask": masks.document(list(range(1024)))}, (1, 78)),
    "documents and causal": (LONG, lambda put: {"attn_mask": masks.causal() & documents(put, 1024)}, (1, 106)),
    "offsets": (LONG, lambda put: {"attn_mask": masks.causal(lengths(put, 3, 500))}, (1, 97)),
    "prefix": (LONG, lambda put: {"attn_mask": masks.causal() | masks.prefix(lengths(put, 3, 500))}, (1, 109)),
    "not a prefix": (LONG, lambda put: {"attn_mask": ~masks.prefix(lengths(put, 3, 500))}, (1, 93)),
    "three arrays": (
        UNEVEN,
        lambda put: {
            "attn_mask": documents(put, 700)
            & masks.padding(lengths(put, 600, 9))
            & masks.from_array(put(torch.arange(700) % 7 > 0))
        },
        (1, 92),
    ),
    "function": (UNEVEN, lambda put: {"attn_mask": masks.from_function(lambda b, h, i, j: j <= i)}, (1, 72)),
    "alibi": (SHORT, lambda put: {"bias": biases.alibi(2)}, (0, 21)),
    "alibi, array": (LONG, lambda put: {"bias": biases.alibi(put(random(2).abs()))}, (0, 85)),
    "relative": (SHORT, lambda put: {"bias": biases.relative(put(random(32, 2)))}, (1, 43)),
    "floating": (SHORT, lambda put: {"attn_mask": put(random(64, 64))}, (1, 24)),
    "scales": (SHORT, lambda put: {"scale": put(random(2, 1, 1)), "is_causal": True}, (1, 25)),
}
"""Shape of the inputs, options, and the most waits and launches. No call copies anything to the device."""


@pytest.fixture(autouse=True)
def _no_list_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_PLACED", {})


def same(on_device: Any, on_cpu: Any) -> None:
    np.testing.assert_array_equal(get(on_device).numpy(), on_cpu.detach().numpy())


def by_autograd(arrays: list[Any], options: dict[str, Any]) -> Any:
    """The output on the CPU; torch records the operations, so that the tiles are those of a device."""
    return scaled_dot_product_attention_vjp(arrays[0].requires_grad_(), *arrays[1:], **options)[0]


@pytest.mark.parametrize("name", CALLS)
def test_work_of_a_call(name: str) -> None:
    """Lists are copied by the first call, and calls of the same values find them on the device."""
    shape, options, (waits, launches) = CALLS[name]
    arrays = [random(*shape, seed=seed) for seed in range(3)]
    with cuda_tensors():
        on_device = [put(x) for x in arrays]
        scaled_dot_product_attention(*on_device, **options(put))
        with cuda_tensors() as counts:
            output = scaled_dot_product_attention(*on_device, **options(put))
    assert counts.waits.total() <= waits, counts.waits
    assert counts.copies.total() == 0, counts.copies
    assert counts.launches.total() <= launches, counts.launches
    same(output, by_autograd(arrays, options(lambda x: x)))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("name", ["causal, long", "padding and causal", "boolean, uneven", "documents"])
def test_a_call_with_nan_waits_once_too(name: str, place: int) -> None:
    """Whether it is in the range that is computed again, or known before."""
    shape, options, _ = CALLS[name]
    arrays = [random(*shape, seed=seed) for seed in range(3)]
    arrays[place][..., 333, 1] = float("nan")
    arrays[place][..., 650, 0] = float("inf")
    with cuda_tensors() as counts:
        output = scaled_dot_product_attention(*map(put, arrays), **options(put))
    assert counts.waits.total() == 1, counts.waits
    same(output, by_autograd(arrays, options(lambda x: x)))


GRADIENTS = {
    "plain": (0, 36),
    "causal": (1, 83),
    "causal, long": (1, 287),
    "padding": (1, 85),
    "boolean, uneven": (1, 204),
    "documents": (1, 270),
    "alibi, array": (0, 278),
    "relative": (1, 146),
    "scales": (1, 92),
}
"""The most waits and launches of a call and its gradients."""


def gradients(arrays: list[Any], cotangent: Any, options: dict[str, Any]) -> dict[str, Any]:
    _, pullback = scaled_dot_product_attention_vjp(*arrays, **options)
    return dict(pullback(cotangent))


@pytest.mark.parametrize("name", GRADIENTS)
def test_work_of_gradients(name: str) -> None:
    """The inputs are searched for NaN before the call, and nothing is read after it."""
    shape, options, _ = CALLS[name]
    waits, launches = GRADIENTS[name]
    *arrays, cotangent = [random(*shape, seed=seed) for seed in range(4)]
    with cuda_tensors() as counts:
        computed = gradients([put(x) for x in arrays], put(cotangent), options(put))
    assert counts.waits.total() <= waits, counts.waits
    assert counts.launches.total() <= launches, counts.launches
    with torch.enable_grad():
        arrays[0].requires_grad_()
        on_cpu = gradients(arrays, cotangent, options(lambda x: x))
    for name, gradient in computed.items():
        same(gradient, on_cpu[name])


HIDDEN = [(name, place) for name in ("causal", "padding", "boolean, uneven") for place in range(5)]


@pytest.mark.parametrize(("name", "place"), [*((name, None) for name in GRADIENTS), *HIDDEN])
def test_hessian_vector_products_add_no_wait(name: str, place: int | None) -> None:
    """With a NaN in an array, too, they are those of the CPU."""
    shape, options, _ = CALLS[name]
    arrays = [random(*shape, seed=seed) for seed in range(5)]
    if place is not None:
        arrays[place][..., 55, 1] = float("nan")

    def products(put: Put) -> Any:
        query, key, value, cotangent, tangent = map(put, arrays)
        _, pullback = scaled_dot_product_attention_vjp(query, key, value, **options(put))
        return pullback.jvp(cotangent, {"query": tangent, "value": tangent}, tangent)

    with cuda_tensors() as counts:
        computed = products(put)
    assert counts.waits.total() <= GRADIENTS[name][0], counts.waits
    for part, expected in zip(computed, products(lambda x: x), strict=True):
        for name_of, gradient in part.items():
            on_cpu = expected[name_of]
            torch.testing.assert_close(get(gradient), on_cpu, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_function_is_tried_in_all_tiles_with_one_wait() -> None:
    """One wait is for the try before the call, one for the inputs, and one for all tiles after the last."""
    arrays = [random(*LONG, seed=seed) for seed in range(3)]

    def attend(score_mod: Any, derivative: str = "vjp") -> None:
        bias, moved = biases.from_function(score_mod), {"query": put(arrays[1])}
        if derivative == "jvp":
            sdpa_xp.scaled_dot_product_attention_jvp(*map(put, arrays), moved, bias=bias)
            return
        _, pullback = scaled_dot_product_attention_vjp(*map(put, arrays), bias=bias)
        pullback.jvp(put(arrays[0]), moved) if derivative == "hessian" else pullback(put(arrays[0]))

    for derivative in ("vjp", "jvp", "hessian"):
        with cuda_tensors() as counts:
            attend(lambda score, b, h, i, j: score - (i - j) * 0.1, derivative)
            assert counts.waits.total() <= 3, counts.waits
        with cuda_tensors(), pytest.raises(ValueError, match="must only add to the score"):
            attend(lambda score, b, h, i, j: torch.where(j > 900, 2 * score, score), derivative)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("scale", "as_array"), [(1.0, False), (30.0, False), (30.0, True)])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_masked_products_that_overflow_add_nothing_to_gradients(
    place: int, scale: float, as_array: bool, softcap: float | None
) -> None:
    """All inputs are finite, and so is their sum."""
    *arrays, cotangent = [random(1, 2, 8, 4, seed=seed) for seed in range(4)]
    arrays[place][..., 5, 0], arrays[place][..., 5, 1] = 1e38, -1e38
    allowed = torch.ones(8, 8, dtype=torch.bool)
    allowed[5], allowed[:, 5] = False, False

    def options(put: Put) -> dict[str, Any]:
        number = put(torch.tensor(scale)) if as_array else scale
        return {"attn_mask": put(allowed), "scale": number, "softcap": softcap}

    with cuda_tensors() as counts:
        computed = gradients([put(x) for x in arrays], put(cotangent), options(put))
    assert counts.waits.total() == 1, counts.waits
    expected = gradients([x.requires_grad_() for x in arrays], cotangent, options(lambda x: x))
    for name, gradient in computed.items():
        assert get(gradient).isfinite().all(), name
        same(gradient, expected[name])


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 300, 300), (1, 0, 300), (1, 300, 0)])
def test_empty_arrays_of_masks_are_not_asked(batch: int, queries: int, keys: int) -> None:
    arrays = [torch.ones(batch, 2, length, 4) for length in (queries, keys, keys)]
    with cuda_tensors():
        ids = [put(torch.ones(batch, length, dtype=torch.int32)) for length in (queries, keys)]
        allowed = put(torch.ones(batch, 1, queries, keys, dtype=torch.bool))
        for mask in (masks.document(*ids), allowed):
            output = scaled_dot_product_attention(*map(put, arrays), mask)
            assert get(output).equal(torch.zeros(batch, 2, queries, 4))


def test_a_list_that_the_inference_mode_copied_serves_autograd() -> None:
    """With array-api-compat 1.12 autograd saves the copy itself."""
    arrays = [random(*SHORT, seed=seed) for seed in range(3)]

    def attend(table: Any) -> Any:
        bias = biases.relative(table, max_distance=9)
        return scaled_dot_product_attention(*map(put, arrays), bias=bias)

    with cuda_tensors():
        with torch.inference_mode():
            attend(put(random(32, 2)))
        assert [copy.is_inference() for copy in on_device._PLACED.values()] == [False]
        table = put(random(32, 2)).requires_grad_()
        attend(table).sum().backward()
        assert get(table.grad).shape == (32, 2)


@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "queries", "keys", "tiles"),
    [
        (8, 32, 32, 1, 16384, 1),
        (8, 32, 8, 1, 16384, 1),
        (64, 32, 32, 1, 4096, 1),
        (64, 32, 4, 1, 16384, 2),
        (8, 32, 32, 4, 16384, 1),
        (8, 32, 8, 16, 16384, 4),
        (1, 8, 8, 64, 2**17, 4),
        (512, 32, 8, 1, 4096, 4),
    ],
)
def test_few_queries_have_few_tiles(
    batch: int, heads: int, key_heads: int, queries: int, keys: int, tiles: int
) -> None:
    """Whether the queries are one new token, several proposed ones or a short chunk."""
    query = torch.zeros(1, 1, 1, 8).expand(batch, heads, queries, 8)
    key = torch.zeros(1, 1, 1, 8).expand(batch, key_heads, keys, 8)
    on_cpu = explain(query, key, key, implementation="xp")
    with cuda_tensors():
        on_device = explain(put(query), put(key), put(key))
    assert on_device.total_tiles <= tiles
    assert on_device.tile[0] == queries
    assert on_cpu.tile == explain(query, key, key, implementation="xp").tile  # the plan of the CPU is its own


def test_a_query_for_each_of_many_heads_takes_few_launches() -> None:
    """Output, state, weights, and gradients."""
    query, key = torch.zeros(8, 32, 1, 2), torch.zeros(8, 32, 16384, 2)
    with cuda_tensors() as counts:
        q, k = put(query), put(key)
        for call, most in (
            (lambda: scaled_dot_product_attention(q, k, k), 40),
            (lambda: sdpa_xp.attention_state(q, k, k), 40),
            (lambda: sdpa_xp.attention_weights(q, k), 40),
            (lambda: scaled_dot_product_attention_vjp(q, k, k)[1](q), 60),
        ):
            counts.launches.clear()
            call()
            assert 0 < counts.launches.total() <= most, counts.launches
            assert counts.waits.total() == 0, counts.waits
