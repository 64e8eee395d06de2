"""A value belongs to the graph that it was computed for. A layer that keeps one is refused, and as it was."""

from __future__ import annotations

import collections
import contextvars
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache
from sdpa_xp_export import TensorSpec, jit, to_onnx

X = np.ones((2, 4), np.float32)
SPEC = TensorSpec("float32", ("B", 4))
KEPT: Any = None
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("kept", default=None)
MODULE: Any = types.ModuleType("a_module")


class Layer:
    def __init__(self) -> None:
        self.kept: Any = None
        self.number = 2.0
        self.named: dict[str, Any] = {"old": 1.0}
        self.listed, self.queue, self.several = [1.0], collections.deque([1.0]), {1.0}
        self.inner: Any = (type(self) is Layer and Inner()) or None


class Inner(Layer):
    pass


class Slots:
    __slots__ = ("kept",)


@dataclass(eq=False)
class Output:
    value: Any


def by_global(layer: Any, y: Any) -> None:
    global KEPT
    KEPT = y * layer.number


WAYS: list[tuple[str, Callable[[Any, Any], object]]] = [
    (r"Layer\.kept", lambda layer, y: setattr(layer, "kept", y)),
    (r"Layer\.kept", lambda layer, y: setattr(layer, "kept", {"deep": [(Output(y),)]})),
    (r"Layer\.kept", lambda layer, y: setattr(layer, "kept", KVCache(y[..., None], y[..., None]))),
    (r"Layer\.new", lambda layer, y: setattr(layer, "new", y)),
    (r"Layer\.named\['new'\]", lambda layer, y: layer.named.update(new=y)),
    (r"Layer\.named\['old'\]", lambda layer, y: layer.named.update(old=y)),
    (r"Layer\.listed\[1\]", lambda layer, y: layer.listed.append(y)),
    (r"Layer\.listed\[0\]", lambda layer, y: layer.listed.__setitem__(0, y)),
    (r"Layer\.queue\[0\]", lambda layer, y: layer.queue.appendleft(y)),
    (r"Inner\.kept", lambda layer, y: setattr(layer.inner, "kept", y)),
    (r"Layer\.shared", lambda layer, y: setattr(type(layer), "shared", y)),
    (r"KEPT", by_global),
    (r"CONTEXT\['value'\]", lambda layer, y: CONTEXT.set(y * layer.number)),
    (r"a_module\.kept", lambda layer, y: setattr(MODULE, "kept", y * layer.number)),
    (r"Layer\.kept, Layer\.new", lambda layer, y: vars(layer).update(kept=[y], new=[y])),
]
"""Where a layer keeps a value, and how it comes there."""


def state_of(layer: Layer) -> list[Any]:
    attributes = [(name, repr(value)) for name, value in vars(layer).items() if name != "inner"]
    return [attributes, layer.inner and state_of(layer.inner), hasattr(Layer, "shared"), KEPT]


@pytest.mark.parametrize(("kept", "way"), WAYS)
def test_a_layer_that_keeps_a_value_is_refused_and_is_as_it_was(kept: str, way: Callable[..., Any]) -> None:
    layer = Layer()

    def called(x: Any) -> Any:
        y = x * layer.number
        way(layer, y)
        return y + x

    before = state_of(layer)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"kept=({kept})\."):
            to_onnx(called, SPEC)
        assert state_of(layer) == before
    with pytest.raises(ValueError, match="keep no value"):
        jit(called)(X)
    assert state_of(layer) == before
    np.testing.assert_array_equal(called(X), X * 3)
    vars(Layer).get("shared") is None or delattr(Layer, "shared")
    globals().update(KEPT=None)


def test_a_length_is_dropped() -> None:
    layer = Layer()

    def called(x: Any) -> Any:
        layer.kept, layer.named["shape"] = x.shape[0], x.shape
        return x * 2

    to_onnx(called, SPEC)
    assert layer.kept is None
    assert layer.named == {"old": 1.0}
    fast = jit(called)
    for length in (2, 3):
        fast(np.ones((length, 4), np.float32))
    assert len(fast.models) == 1


def test_by_closure_and_slot() -> None:
    kept, slots = None, Slots()

    def called(x: Any) -> Any:
        nonlocal kept
        kept = slots.kept = x + 1
        return x

    with pytest.raises(ValueError, match="keep no value"):
        to_onnx(called, SPEC)
    assert kept is None
    assert not hasattr(slots, "kept")


def test_an_error_of_the_layer_leaves_no_value_either() -> None:
    layer = Layer()

    def called(x: Any) -> Any:
        layer.kept = x
        raise RuntimeError("of the layer")

    with pytest.raises(RuntimeError, match="of the layer"):
        to_onnx(called, SPEC)
    assert layer.kept is None


def test_what_a_layer_keeps_beside_values_stays() -> None:
    layer = Layer()

    def called(x: Any) -> Any:
        layer.number += 1
        layer.named["table"] = np.ones(4, np.float32)
        return x * layer.named["table"]

    to_onnx(called, SPEC)
    assert layer.number == 3
    assert "table" in layer.named
