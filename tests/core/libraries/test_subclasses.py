"""Subclasses of arrays: a plain one counts as an array, one that changes what operations mean is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdpa_xp
from sdpa_xp import KVCache, attention_scores, biases, layers, masks, positional, scaled_dot_product_attention

F = np.float32


class Plain(np.ndarray):
    """Adds nothing to an array."""


class ByUfunc(np.ndarray):
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **rules: Any) -> Any:
        plain = [np.asarray(x) for x in inputs]
        return getattr(ufunc, method)(*plain, **rules).view(ByUfunc) + 1


class ByFunction(np.ndarray):
    def __array_function__(self, function: Any, types: Any, arguments: Any, rules: Any) -> Any:
        raise NotImplementedError


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(F)


def weights(**rules: Any) -> list[Any]:
    return [sdpa_xp.attention_weights(random(2, 1, 4, 4), random(2, 1, 4, 4), **rules)]


def scores(**rules: Any) -> list[Any]:
    return [attention_scores(random(2, 4, 4), random(2, 4, 4), **rules)]


Wrap = Callable[[np.ndarray], Any]
CALLS: dict[str, Callable[[Wrap, int], list[Any]]] = {
    "attention": lambda w, n: [scaled_dot_product_attention(*[w(random(2, n, 4))] * 3, is_causal=True)],
    "query": lambda w, n: [scaled_dot_product_attention(w(random(2, n, 4)), random(2, n, 4), random(2, n, 4))],
    "key": lambda w, n: [scaled_dot_product_attention(random(2, n, 4), w(random(2, n, 4)), random(2, n, 4))],
    "value": lambda w, n: [scaled_dot_product_attention(random(2, n, 4), random(2, n, 4), w(random(2, n, 4)))],
    "state": lambda w, n: [*sdpa_xp.attention_state(*[w(random(n, 4))] * 3)],
    "merged": lambda w, n: [
        *sdpa_xp.merge_states([sdpa_xp.AttentionState(w(random(2, n, 4)), w(random(2, n)))] * 2)
    ],
    "weights": lambda w, n: [sdpa_xp.attention_weights(*[w(random(2, 4, 4))] * 2)],
    "scores": lambda w, n: [attention_scores(*[w(random(2, 4, 4))] * 2)],
    "varlen state": lambda w, n: [
        *sdpa_xp.varlen_attention_state(*[w(random(n, 2, 4))] * 3, w(np.asarray([0, 1, n])), [0, 2, n])
    ],
    "varlen": lambda w, n: [
        sdpa_xp.varlen_attention(*[w(random(n, 2, 4))] * 3, w(np.asarray([0, 1, n])), [0, 2, n])
    ],
    "mask": lambda w, n: weights(attn_mask=w(random(4, 4) > 0)),
    "mask as a value": lambda w, n: weights(attn_mask=masks.causal() & masks.from_array(w(random(4, 4) > 0))),
    "lengths": lambda w, n: weights(attn_mask=masks.padding(w(np.asarray([1, 3])))),
    "ids": lambda w, n: weights(attn_mask=masks.document(w(np.arange(4) // 2))),
    "bias": lambda w, n: scores(bias=w(random(4, 4))),
    "slopes": lambda w, n: scores(bias=biases.alibi(w(random(2)))),
    "table": lambda w, n: scores(bias=biases.relative(w(random(8, 2)))),
    "scale": lambda w, n: scores(scale=w(random(2, 1, 1))),
    "sinks": lambda w, n: weights(sinks=w(random(1))),
    "cache": lambda w, n: [
        KVCache(w(random(2, n, 4)), w(random(2, n, 4)))
        .append(*[w(random(2, 1, 4))] * 2)
        .attend(w(random(2, 1, 4))),
        KVCache(w(random(2, n, 4)), w(random(2, n, 4))).key,
    ],
    "paged": lambda w, n: [
        sdpa_xp.PagedKVCache(w(random(2, 1, 8, 4)), w(random(2, 1, 8, 4)), [[1]], [5]).attend(
            w(random(1, 1, 2, 4))
        )
    ],
    "rotary": lambda w, n: [positional.Rotary(4).apply(w(random(2, n, 4)), 0)],
    "layer's input": lambda w, n: [layers.Linear(random(3, 4), random(3))(w(random(n, 4)))],
    "layer's weights": lambda w, n: [layers.Linear(w(random(3, 4)), w(random(3)))(random(n, 4))],
    "gradients": lambda w, n: _gradients(w, n),
}


def _gradients(wrap: Wrap, n: int) -> list[Any]:
    output, pullback = sdpa_xp.scaled_dot_product_attention_vjp(
        *[wrap(random(2, n, 4))] * 3, bias=wrap(random(n))
    )
    return [output, *pullback(wrap(random(2, n, 4))).values()]


@pytest.mark.rule("R2")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("length", [4, 3000])
def test_a_plain_subclass_is_an_array(call: Any, length: int, tmp_path: Path) -> None:
    """A result is of ndarray itself, however long the call, and has the numbers of the plain call."""
    numbers = itertools.count()

    def mapped(x: np.ndarray) -> np.ndarray:
        path = tmp_path / f"{next(numbers)}.npy"
        np.save(path, x)
        return np.load(path, mmap_mode="r")

    expected = call(lambda x: x, length)
    for wrap in (lambda x: x.view(Plain), mapped):
        for result, plain in zip(call(wrap, length), expected, strict=True):
            assert type(result) is np.ndarray
            np.testing.assert_array_equal(result, plain)


@pytest.mark.rule("R2")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", [ByUfunc, ByFunction])
def test_a_subclass_that_changes_operations_is_refused(call: Any, kind: type[np.ndarray]) -> None:
    if call is CALLS["varlen"]:
        call = lambda w, n: sdpa_xp.varlen_attention(*[w(random(n, 2, 4))] * 3, [0, n], [0, n])  # noqa: E731
    rule = r"must be a (mask or a |bias or a )?plain array .* Its class changes what operations mean"
    with pytest.raises(TypeError, match=rule):
        call(lambda x: x.view(kind), 4)


@pytest.mark.parametrize("length", [4, 3000])
@pytest.mark.needs("torch")
@pytest.mark.slow
def test_a_plain_subclass_of_a_tensor_is_a_tensor(length: int) -> None:
    import torch

    class Named(torch.Tensor):
        """Adds nothing to a tensor."""

    x = torch.from_numpy(random(2, length, 4)).as_subclass(Named).requires_grad_()
    for rules in ({}, {"implementation": "xp"}, {"attn_mask": masks.sliding_window(3, 0)}):
        output = scaled_dot_product_attention(x, x, x, **rules)
        assert type(output) is torch.Tensor
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert bool(gradient.isfinite().all())
