"""What `jit` refuses: the same in each call, before and after one that it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp_export import jit

X = np.ones((2, 5, 8), np.float32)


def layer(x: Any) -> Any:
    return x + 1


def test_what_to_install() -> None:
    with pytest.raises(ValueError, match="Update onnxruntime"):
        jit(layer, runtime="onnxruntime>=9.9;cpu")
    with pytest.raises(ValueError, match="must be for a provider"):
        jit(layer, runtime="onnxruntime>=1.28;cuda")


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match="must be installed"):
        jit(layer)


@pytest.mark.parametrize(
    ("wrong", "argument"),
    [
        (layer, [1.0, 2.0]),
        (layer, X.astype(complex)),
        (lambda x: x if x[0, 0, 0] > 0 else -x, X),
        (np.tanh, X),
        (lambda x: x + np.ones(8, int), X),
        (lambda x: None, X),
    ],
)
def test_the_second_call_is_refused_too(wrong: Callable[[Any], Any], argument: Any) -> None:
    fast = jit(wrong)
    texts = []
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)) as caught:
            fast(argument)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert fast.models == ()


def test_an_error_of_the_layer_itself_stays() -> None:
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        jit(lambda x: x * (1 / 0))(X)


def test_an_error_of_a_run() -> None:
    fast = jit(lambda table, rows: table.__array_namespace__().take(table, rows, axis=0))
    assert fast(X, np.asarray([1])).shape == (1, 5, 8)
    with pytest.raises(ValueError, match=r"must run `model`.*out of data bounds"):
        fast(X, np.asarray([7]))
    assert fast(X, np.asarray([0])).shape == (1, 5, 8)


@pytest.mark.needs("torch")
def test_a_tensor_that_needs_a_gradient() -> None:
    import torch

    with torch.no_grad():
        assert jit(layer)(torch.asarray(X).requires_grad_()).shape == X.shape


@pytest.mark.needs("array_api_strict")
def test_another_device() -> None:
    import array_api_strict

    fast = jit(layer)
    assert type(fast(array_api_strict.asarray(X))) is type(array_api_strict.asarray(X))
    device = array_api_strict.Device("device1")
    with pytest.raises(ValueError, match="must be on the CPU, as `runtime` is"):
        fast(array_api_strict.asarray(X, device=device))


@pytest.mark.needs("jax")
def test_traced_arrays() -> None:
    import jax

    fast = jit(layer)
    assert isinstance(fast(jax.numpy.asarray(X)), jax.Array)
    with pytest.raises(TypeError, match="must have its values"):
        jax.jit(fast)(jax.numpy.asarray(X))
