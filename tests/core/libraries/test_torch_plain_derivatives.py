"""Calls that torch differentiates by their operations: a masked NaN adds nothing there either."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sdpa_xp import attention_scores, attention_weights, biases, scaled_dot_product_attention, varlen_attention
from sdpa_xp import scaled_dot_product_attention_jvp as tangent
from sdpa_xp import scaled_dot_product_attention_laplacian as laplacian
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

torch: Any = pytest.importorskip("torch")
func = torch.func
pytestmark = [pytest.mark.needs("torch"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PADDED = torch.arange(5) < 4


def draw(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


QUERY, KEY, VALUE = draw(1, 2, 4, 3), draw(1, 1, 5, 3), draw(1, 1, 5, 2)


def with_function(function: Callable[..., Any], **rules: Any) -> Callable[..., Any]:
    return partial(scaled_dot_product_attention, bias=biases.from_function(function), **rules)


def packed(query: Any, key: Any, value: Any) -> Any:
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    allowed = (PADDED).expand(1, 1, 4, 5)
    return varlen_attention(*rows, [0, 4], [0, 5], allowed)


def pulled(query: Any, key: Any, value: Any) -> Any:
    _, pullback = vjp(query, key, value, attn_mask=PADDED, softcap=2.0)
    return sum(x.square().sum() for x in pullback(torch.ones(1, 2, 4, 2, dtype=torch.float64)).values())


PLAIN: dict[str, Callable[..., Any]] = {
    "weights": lambda q, k, v: attention_weights(q, k, attn_mask=PADDED),
    "scores": lambda q, k, v: attention_scores(q, k, attn_mask=PADDED, softcap=2.0)[..., :4],
    "function": with_function(lambda s, b, h, i, j: s * 1.5 + i, attn_mask=PADDED),
    "slope of a function": with_function(lambda s, b, h, i, j: s * s, attn_mask=PADDED, softcap=2.0),
    "function that masks": with_function(lambda s, b, h, i, j: torch.where(j < 4, s * 1.5, -math.inf)),
    "array of a function": lambda q, k, v: with_function(lambda s, b, h, i, j: s * q.sum(), attn_mask=PADDED)(
        q, k, v
    ),
    "array of a function that masks": lambda q, k, v: with_function(
        lambda s, b, h, i, j: torch.where(j < 4, s * q.sum(), -math.inf)
    )(q, k, v),
    "packed": packed,
    "third derivatives": partial(scaled_dot_product_attention, attn_mask=PADDED),
    "pullback": pulled,
    "jvp": lambda q, k, v: tangent(q, k, v, {"query": q, "key": k, "value": v}, PADDED, softcap=2.0)[1],
    "laplacian": lambda q, k, v: laplacian(q, k, v, {"query": q[None], "key": k[None]}, PADDED)[2],
}
"""What torch differentiates itself, by the operations that compute it."""


LONG: dict[str, Callable[..., Any]] = {
    "function": with_function(lambda s, b, h, i, j: s * 1.5 + i, is_causal=True),
    "packed": lambda q, k, v: varlen_attention(q[0], k[0], v[0], [0, 600], [0, 600], layout="...HLE"),
}


@pytest.mark.parametrize("name", LONG)
def test_long_calls_are_computed_again(name: str) -> None:
    """No tensor that is kept for the backward pass has more elements than an input."""
    x, i = torch.randn(1, 1, 600, 4, dtype=torch.float64), torch.arange(600)[:, None]
    kept: list[int] = []

    def textbook(query: Any, key: Any, value: Any) -> Any:
        scores = query @ key.mT / 2
        if name == "function":
            scores = (scores * 1.5 + i).masked_fill(i < torch.arange(600), -math.inf)
        return scores.softmax(-1) @ value

    def gradients(call: Callable[..., Any]) -> Any:
        query, key = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            output = call(query, key, x)
        return torch.autograd.grad(output.reshape(x.shape).square().sum(), (query, key))

    expected = gradients(textbook)
    kept.clear()
    torch.testing.assert_close(gradients(LONG[name]), expected, rtol=0, atol=1e-10)
    assert max(kept, default=0) <= x.numel()


@pytest.mark.parametrize("call", PLAIN.values(), ids=PLAIN)
def test_masked_nan_adds_nothing_to_plain_operations(call: Callable[..., Any]) -> None:
    """To three orders of reverse mode, and in forward mode."""

    def derivatives(bad: float) -> Any:
        inputs = [x.clone() for x in (QUERY, KEY, VALUE)]
        inputs[1][..., 4, :] = inputs[2][..., 4, :] = bad
        moved = tuple(torch.nan_to_num(x) for x in inputs)
        directional = func.jvp(call, tuple(inputs), moved)[1]
        inputs = [x.requires_grad_() for x in inputs]
        total, orders = call(*inputs).square().sum(), []
        for _ in range(3):
            gradients = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
            orders += gradients
            total = sum(x.square().sum() for x in gradients)
        return directional, *orders

    for bad in (math.nan, math.inf):
        torch.testing.assert_close(derivatives(bad), derivatives(0.0), rtol=1e-9, atol=1e-9)
