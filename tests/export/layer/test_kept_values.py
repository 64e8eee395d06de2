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


def by_setattr(layer: Any, y: Any) -> None:
    layer.kept = y


def by_new_attribute(layer: Any, y: Any) -> None:
    layer.new = y


def by_new_key(layer: Any, y: Any) -> None:
    layer.named["new"] = y


def by_old_key(layer: Any, y: Any) -> None:
    layer.named["old"] = y


def by_append(layer: Any, y: Any) -> None:
    layer.listed.append(y)


def by_item(layer: Any, y: Any) -> None:
    layer.listed[0] = y


def by_deque(layer: Any, y: Any) -> None:
    layer.queue.appendleft(y)


def within_a_new_object(layer: Any, y: Any) -> None:
    layer.kept = {"deep": [(Output(y),)]}


def within_a_cache(layer: Any, y: Any) -> None:
    layer.kept = KVCache(y[..., None], y[..., None])


def of_an_inner_layer(layer: Any, y: Any) -> None:
    layer.inner.kept = y


def of_the_class(layer: Any, y: Any) -> None:
    type(layer).shared = y  # type: ignore[attr-defined]


def by_global(layer: Any, y: Any) -> None:
    global KEPT
    KEPT = y * layer.number


def in_two_places(layer: Any, y: Any) -> None:
    layer.kept = layer.new = [y]


def by_context(layer: Any, y: Any) -> None:
    CONTEXT.set(y * layer.number)


def by_new_attribute_of_a_module(layer: Any, y: Any) -> None:
    MODULE.kept = y * layer.number


WAYS: dict[Callable[[Any, Any], None], str] = {
    by_setattr: r"Layer\.kept",
    by_new_attribute: r"Layer\.new",
    by_new_key: r"Layer\.named\['new'\]",
    by_old_key: r"Layer\.named\['old'\]",
    by_append: r"Layer\.listed\[1\]",
    by_item: r"Layer\.listed\[0\]",
    by_deque: r"Layer\.queue\[0\]",
    within_a_new_object: r"Layer\.kept",
    within_a_cache: r"Layer\.kept",
    of_an_inner_layer: r"Inner\.kept",
    of_the_class: r"Layer\.shared",
    by_global: r"KEPT",
    by_context: r"CONTEXT\['value'\]",
    by_new_attribute_of_a_module: r"a_module\.kept",
    in_two_places: r"Layer\.kept, Layer\.new",
}


def state_of(layer: Layer) -> list[Any]:
    attributes = [(name, repr(value)) for name, value in vars(layer).items() if name != "inner"]
    return [attributes, layer.inner and state_of(layer.inner), hasattr(Layer, "shared"), KEPT]


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_keeps_a_value_is_refused_and_is_as_it_was(way: Callable[[Any, Any], None]) -> None:
    layer = Layer()

    def called(x: Any) -> Any:
        y = x * layer.number
        way(layer, y)
        return y + x

    before = state_of(layer)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"kept=({WAYS[way]})\."):
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
