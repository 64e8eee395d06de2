"""What `jit` refuses, in one line that names the argument, the place in the caller's code and what to write."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache
from sdpa_xp_export import jit

X = np.ones((2, 5, 8), np.float32)
OLD, WEB, CUDA = "onnxruntime>=1.28;cpu", "onnxruntime>=1.28;web", "onnxruntime>=1.28;cuda"


def layer(x: Any) -> Any:
    return x + 1


CONSTRUCTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, "`layer` must be callable; got layer=int. Pass a function or a layer."),
    (layer, {"runtime": "onnxruntime>=9.9;cpu"}, "`runtime` must not be newer than the onnxruntime that is installed; got runtime=onnxruntime>=9.9;cpu"),
    (layer, {"runtime": WEB}, "`runtime` must be onnxruntime on a provider of this process, cpu or cuda; got runtime=onnxruntime>=1.28;web"),
    (layer, {"runtime": CUDA}, "`runtime` must be for a provider that onnxruntime offers here; got runtime=onnxruntime>=1.28;cuda"),
    (layer, {"runtime": "tensorrt"}, "`runtime` must be 'onnxruntime>=RELEASE;PROVIDER'"),
    (layer, {"form": "tile"}, "`form` must be auto, attention"),
    (layer, {"opset": 99}, "`opset` must be 17 to 25"),
    (layer, {"verify": "yes"}, "`verify` must be True or False"),
    (layer, {"verfy": True}, "there is no argument `verfy`; got verfy=True. Write verify=... instead"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "options", "message"), CONSTRUCTIONS)
def test_what_is_wrong_before_a_call(wrong: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        jit(wrong, **options)
    assert str(caught.value).startswith(f"jit: {message}")
    assert "\n" not in str(caught.value)


def test_what_to_install() -> None:
    with pytest.raises(
        ValueError, match=r"installed=\d\S+\. Update onnxruntime, or name its release in `runtime`\.$"
    ):
        jit(layer, runtime="onnxruntime>=9.9;cpu")
    with pytest.raises(
        ValueError, match=r"offered=.*\. Install onnxruntime-gpu in place of onnxruntime, or leave"
    ):
        jit(layer, runtime=CUDA)


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"^jit: onnxruntime must be installed"):
        jit(layer)


def branches(x: Any) -> Any:
    y = x - 1
    return y if y > 0 else x


CALLS: list[tuple[Any, tuple[Any, ...], str]] = [
    (layer, (), "the arguments must fit `layer`"),
    (layer, ([1.0, 2.0],), "there must be an array among the arguments of `layer`; got x=[1.0, 2.0]. Convert numbers and lists"),
    (lambda x, cache: x, (X, KVCache(X, X)), "`cache` must be an array, a mask, a bias, a number, text, a dtype or None, or a tuple, a list or a dictionary of them; got cache=KVCache(key=<float32 (2, 5, 8)>, value=<float32 (2, 5, 8)>). Pass its `key` and its `value`"),
    (lambda x, rng: x, (X, np.random.default_rng()), "`rng` must be an array, a mask, a bias, a number, text, a dtype or None, or a tuple, a list or a dictionary of them; got rng=numpy.random._generator.Generator. Fix it beforehand: functools.partial(layer, rng=...)"),
    (layer, (X.astype(complex),), "`x` must be of a dtype that a graph holds"),
    (layer, (np.ma.masked_array(X),), "`x` must be a plain array of a library that follows the array API standard"),
    (branches, (X,), "a value of a graph is neither true nor false while the graph is written; got value="),
    (lambda x: np.tanh(x), (X,), "a value of a graph must not go to `numpy.tanh`; got value=x, where=test_jit_refusals.py:"),
    (lambda x: x.sum(), (X,), "a value of a graph has no attribute 'sum'; got value=x, where=test_jit_refusals.py:"),
    (lambda x: x @ np.ones((7, 7), np.float32), (X,), "the last axis of the first operand must be as long as"),
    (lambda x: x + np.ones(8, int), (X,), "the operands of `add` must have dtypes that the array API promotes to one"),
    (lambda x: (x, object()), (X,), "`layer` must return arrays, also in tuples, lists, mappings and dataclasses; got output_1=object"),
    (lambda x: (), (X,), "`layer` must return an array; got returned=()"),
    (lambda x: {"a": None, "b": 3}, (X,), "`layer` must return an array; got returned={'a': None, 'b': 3}"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "arguments", "message"), CALLS)
def test_what_is_wrong_in_a_call(wrong: Any, arguments: tuple[Any, ...], message: str) -> None:
    fast = jit(wrong)
    for _ in range(2):  # the same the second time
        with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
            fast(*arguments)
        assert str(caught.value).startswith(f"jit: {message}")
        assert "\n" not in str(caught.value)
    assert fast.models == ()


def test_the_place_is_the_line_of_the_caller() -> None:
    with pytest.raises(TypeError, match=r"where=test_jit_refusals\.py:\d+, `return y if y > 0 else x`\."):
        jit(branches)(X)


def test_an_error_of_the_layer_itself_stays() -> None:
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        jit(lambda x: x * (1 / 0))(X)


def test_an_error_of_a_run() -> None:
    fast = jit(lambda table, rows: table.__array_namespace__().take(table, rows, axis=0))
    assert fast(X, np.asarray([1])).shape == (1, 5, 8)
    with pytest.raises(
        ValueError, match=r"^jit: onnxruntime must run `model`; got its error=.*out of data bounds"
    ):
        fast(X, np.asarray([7]))
    assert fast(X, np.asarray([0])).shape == (1, 5, 8)


def test_the_model_needs_one_signature() -> None:
    fast = jit(layer)
    with pytest.raises(
        ValueError, match=r"^jit: `model` must be asked for after calls of one signature; got signatures=none"
    ):
        _ = fast.model
    fast(X), fast(X.astype(float))
    with pytest.raises(
        ValueError, match=r"got signatures=float32\[x_0,x_1,x_2\]; float64\[x_0,x_1,x_2\]\. Take one of"
    ):
        fast.save("never.onnx")


@pytest.mark.needs("torch")
def test_tensors_that_onnxruntime_cannot_take() -> None:
    import torch

    fast = jit(lambda x, y=0: x + y)
    tensor = torch.asarray(X)
    with pytest.raises(
        TypeError, match=r"`x` and `y` must be arrays of one library.*Convert one: torch\.asarray\(x\)"
    ):
        fast(X, tensor)
    with pytest.raises(ValueError, match=r"`x` must need no gradient, since onnxruntime computes none"):
        fast(tensor.clone().requires_grad_())
    with torch.no_grad():
        assert fast(tensor.clone().requires_grad_()).shape == X.shape
    with pytest.raises(TypeError, match=r"`x` must have its values when the layer is called"):
        fast(tensor.to("meta"))
    assert torch.equal(fast(tensor), tensor)
    with pytest.raises(TypeError, match=r"`x` must have its values when the layer is called"):
        torch.vmap(fast)(tensor)


@pytest.mark.needs("array_api_strict")
def test_another_device() -> None:
    import array_api_strict

    fast = jit(layer)
    assert type(fast(array_api_strict.asarray(X))) is type(array_api_strict.asarray(X))
    device = array_api_strict.Device("device1")
    with pytest.raises(ValueError, match=r"`x` must be on the CPU, as `runtime` is; got x\.device="):
        fast(array_api_strict.asarray(X, device=device))


@pytest.mark.needs("jax")
def test_traced_arrays() -> None:
    import jax

    fast = jit(layer)
    assert isinstance(fast(jax.numpy.asarray(X)), jax.Array)
    with pytest.raises(TypeError, match=r"`x` must have its values when the layer is called"):
        jax.jit(fast)(jax.numpy.asarray(X))
