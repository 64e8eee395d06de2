"""The arrays of a layer are found wherever it holds them, and copies hold others; the caller's objects stay."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from internals import with_changed_arrays

from sdpa_xp.layers import Layer, Linear

WEIGHT = np.full((4, 4), 0.1, np.float32)
X = np.ones((2, 4), np.float16)
holder: Any = types.ModuleType("held_weights")
holder.WEIGHT = WEIGHT.copy()


def narrow(x: Any) -> Any:
    return x.astype(np.float16) if x.dtype == np.float32 else x


def named(x: Any) -> Any:
    return x @ WEIGHT


def named_by_another(x: Any) -> Any:
    return named(x)


def of_a_module(x: Any) -> Any:
    return x @ holder.WEIGHT


def default(x: Any, weight: Any = WEIGHT) -> Any:
    return x @ weight


def keyword_default(x: Any, *, weight: Any = WEIGHT) -> Any:
    return x @ weight


def attribute(x: Any) -> Any:
    return x @ attribute.weight  # type: ignore[attr-defined]


attribute.weight = WEIGHT  # type: ignore[attr-defined]


def closed_over() -> Any:
    weight = WEIGHT.copy()

    def layer(x: Any) -> Any:
        return (lambda y: y @ weight)(x)

    return layer


@functools.lru_cache
def table(times: int) -> Any:
    return WEIGHT * times


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        return function(*arguments)

    return called


class Holder:
    def __init__(self) -> None:
        self.parts = [{"inner": (WEIGHT.copy(),)}]

    def __call__(self, x: Any) -> Any:
        return x @ self.parts[0]["inner"][0]

    def method(self, x: Any) -> Any:
        return self(x)


class Derived(Holder):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) @ WEIGHT


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = WEIGHT

    def __call__(self, x: Any) -> Any:
        return x @ self.weight


@dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any
    inner: Any

    def __call__(self, x: Any) -> Any:
        return self.inner(x @ self.weight)


class OfTheClass:
    weight = WEIGHT.copy()

    @staticmethod
    def static(x: Any) -> Any:
        return x @ WEIGHT

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x @ cls.weight

    @property
    def computed(self) -> Any:
        return WEIGHT

    @functools.cached_property
    def kept(self) -> Any:
        return WEIGHT * 2

    def __call__(self, x: Any) -> Any:
        return x @ self.computed @ self.kept


class Circle:
    def __init__(self) -> None:
        self.all, self.weight = [self], WEIGHT

    def __call__(self, x: Any) -> Any:
        return x @ self.all[0].weight


Pair = collections.namedtuple("Pair", "weight bias")
PAIR = Pair(WEIGHT, WEIGHT[0])
ORDERED, QUEUE = collections.OrderedDict(weight=WEIGHT), collections.deque([WEIGHT])
SPACE = types.SimpleNamespace(weight=WEIGHT)


def of_containers(x: Any) -> Any:
    return (x @ PAIR.weight + PAIR.bias) @ ORDERED["weight"] @ QUEUE[0] @ SPACE.weight


@dataclass(frozen=True, repr=False)
class OwnLayer(Layer):
    inner: Linear

    def __call__(self, x: Any) -> Any:
        return x @ self.inner.weight


LAYERS: dict[str, Callable[..., Any]] = {
    "global": named,
    "global of a function that it calls": named_by_another,
    "attribute of a module": of_a_module,
    "default": default,
    "keyword default": keyword_default,
    "attribute of a function": attribute,
    "closure": closed_over(),
    "lambda": lambda x: Holder()(named(x)),
    "cached function": lambda x: x @ table(2),
    "decorated": decorated(named),
    "partial": functools.partial(default, weight=WEIGHT),
    "partial of a method": functools.partial(Holder().method),
    "attributes": Holder(),
    "method": Holder().method,
    "super": Derived(),
    "slots": Slots(),
    "frozen dataclass": Frozen(WEIGHT, Slots()),
    "class": OfTheClass(),
    "static method": OfTheClass.static,
    "class method": OfTheClass.of_class,
    "circle": Circle(),
    "containers": of_containers,
    "layer of the library": OwnLayer(Linear.init(np.random.default_rng(0), 4, 4, like=WEIGHT)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_arrays_are_found_wherever_they_are(name: str) -> None:
    """A result in float16 has seen no array in float32."""
    layer = LAYERS[name]
    before = layer(X)
    assert before.dtype == np.float32
    copy: Any = with_changed_arrays(layer, narrow)
    assert copy(X).dtype == np.float16
    np.testing.assert_array_equal(layer(X), before)
    for array in (WEIGHT, OfTheClass.weight, holder.WEIGHT, PAIR.weight, QUEUE[0]):
        assert array.dtype == np.float32
    if isinstance(layer, Holder):
        assert layer.parts[0]["inner"][0].dtype == np.float32
        assert copy.parts[0]["inner"][0].dtype == np.float16


@pytest.mark.needs("torch")
def test_a_torch_module() -> None:
    import torch

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

        def forward(self, x: Any) -> Any:
            return x @ self.inner[0].weight.mT + self.inner[0].bias

    module = Module()
    copy = with_changed_arrays(module, lambda x: x.detach().numpy().astype(np.float16))
    assert copy(X).dtype == np.float16
    assert isinstance(module.inner[0].weight, torch.nn.Parameter)


def test_what_leads_to_no_change_is_not_copied() -> None:
    other = types.SimpleNamespace(name="other")

    class Layer:
        def __init__(self) -> None:
            self.weight, self.other = WEIGHT, other

        def __call__(self, x: Any) -> Any:
            return x @ self.weight

    layer = Layer()
    copy: Any = with_changed_arrays(layer, narrow)
    assert copy is not layer
    assert copy.other is other
    assert with_changed_arrays(layer, lambda x: x) is layer
    assert with_changed_arrays(np.tanh, narrow) is np.tanh


def test_a_class_that_tells_of_its_subclasses_is_not_copied() -> None:
    """Another class would come into a registry of the caller. The attributes of its objects are copied."""
    registry = []

    class Registered:
        def __init_subclass__(cls) -> None:
            registry.append(cls)

        def __call__(self, x: Any) -> Any:
            return x @ WEIGHT + self.bias

        bias: Any = None

    layer = Registered()
    layer.bias = WEIGHT[0]
    copy: Any = with_changed_arrays(layer, narrow)
    assert type(copy) is Registered
    assert copy.bias.dtype == np.float16
    assert registry == []


def test_arrays_that_are_one_stay_one_and_are_changed_once() -> None:
    counts: list[int] = []

    def change(x: Any) -> Any:
        counts.append(1)
        return narrow(x)

    shared = WEIGHT.copy()
    copy: Any = with_changed_arrays(functools.partial(lambda x, y: x @ y[0] @ y[1], y=[shared, shared]), change)
    assert copy.keywords["y"][0] is copy.keywords["y"][1]
    assert len(counts) == 1
