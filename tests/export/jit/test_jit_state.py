"""`jit` never computes with what a layer held before: each kind of change is seen, or `refresh` is for it."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import functools
import itertools
import math
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from internals import state

from sdpa_xp_export import jit

X = np.ones((2, 3, 4), np.float32)
ONE, THREE = np.eye(4, dtype=np.float32), 3 * np.eye(4, dtype=np.float32)
Case = tuple[Callable[[Any], Any], Callable[[], object]]
"""A layer, and what changes its numbers."""


class Model:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __call__(self, x: Any) -> Any:
        bias = getattr(self, "bias", None)
        return x if bias is None else x + bias


class Slots:
    __slots__ = ("__scale", "bias")

    def set_scale(self, scale: float) -> None:
        self.__scale = scale

    def __call__(self, x: Any) -> Any:
        return x * getattr(self, "_Slots__scale", 2.0) + getattr(self, "bias", 0.0)


@dataclass
class Sequential:
    layers: list[Any] = field(default_factory=lambda: [ONE])

    def __call__(self, x: Any) -> Any:
        return functools.reduce(lambda y, w: y @ w, self.layers, x)


def of_globals(x: Any) -> Any:
    try:
        return x * LATER  # type: ignore[name-defined]
    except NameError:
        return x


def model(change: Callable[[Any], object], kind: Callable[..., Any] = Model, **attributes: Any) -> Case:
    """A layer that is an object."""
    layer = kind(**attributes)
    return layer, lambda: change(layer)


def calling(inner: Any, change: Callable[[Any], object]) -> Case:
    """A layer that calls a function."""
    return lambda x: inner(x) + 1, lambda: change(inner)


def scaled(
    target: Any,
    read: Callable[[Any], Any],
    change: Callable[[Any], object],
    shown_as: Callable[[Any], Any] = lambda target: target,
) -> Case:
    """A layer that reads a number of a value, or of how it is shown."""
    value = shown_as(target)
    return lambda x: x * read(value), lambda: change(target)


def with_scale(value: Any) -> Any:
    value.scale = 2.0
    return value


def derived(bias: float, *bases: type) -> Any:
    return type("Derived", bases or (Model,), {} if bases else {"bias": bias})


def item(key: Any, value: Any) -> Callable[[Any], object]:
    return lambda target: target.__setitem__(key, value)


def put(name: str, value: Any) -> Callable[[Any], object]:
    return lambda target: setattr(target, name, value)


def function() -> Any:
    def inner(x: Any, scale: Any = 2.0, *, more: Any = (2.0,)) -> Any:
        return x * scale * more[0] * inner.scale

    return with_scale(inner)


def an_attribute_of_a_decorated_function() -> Case:
    @jit
    def inner(x: Any) -> Any:
        return x * inner.scale

    return calling(with_scale(inner), put("scale", 5.0))


def a_new_global() -> Case:
    globals().pop("LATER", None)
    return of_globals, lambda: globals().update(LATER=4.0)


def an_environment_variable() -> Case:
    os.environ["SDPA_XP_TEST"] = "2"
    return lambda x: x * float(os.environ["SDPA_XP_TEST"]), lambda: os.environ.update(SDPA_XP_TEST="5")


def a_key_of_a_dictionary() -> Case:
    key = Model(bias=1.0)
    factors = {key: 2.0}
    return lambda x: sum(x * f + key.bias for key, f in factors.items()), lambda: setattr(key, "bias", 5.0)


def a_module_that_a_function_imports() -> Case:
    module = sys.modules["sdpa_settings"] = with_scale(types.ModuleType("sdpa_settings"))

    def layer(x: Any) -> Any:
        from sdpa_settings import scale  # type: ignore[import-not-found]

        return x * scale

    return layer, lambda: setattr(module, "scale", 5.0)


def a_text_that_names_a_global() -> Case:
    globals()["BY_TEXT"] = 2.0
    return lambda x: x * globals()["BY_TEXT"], lambda: globals().update(BY_TEXT=5.0)


def a_function_that_looks_like_one_of_numpy() -> Case:
    scale = [2.0]

    @functools.wraps(np.linalg.norm)
    def layer(x: Any) -> Any:
        return x * scale[0]

    return calling(layer, lambda _: scale.insert(0, 5.0))


def a_variable(is_set: bool) -> Case:
    def layer(x: Any) -> Any:
        try:
            return x * scale
        except NameError:
            return x

    def change() -> None:
        nonlocal scale
        scale = 5.0

    if is_set:
        scale = 2.0
    return layer, change


def to_the_end(dictionary: dict[str, Any]) -> None:
    dictionary["a"] = dictionary.pop("a")


BASE = derived(2.0)
META = {"__call__": lambda self, x: x * type(type(self)).scale}
CASES: dict[str, Callable[[], Case]] = {
    "an attribute of a decorated function": an_attribute_of_a_decorated_function,
    "a new global": a_new_global,
    "an environment variable": an_environment_variable,
    "a key of a dictionary": a_key_of_a_dictionary,
    "a module that a function imports": a_module_that_a_function_imports,
    "a text that names a global": a_text_that_names_a_global,
    "a function that looks like one of NumPy": a_function_that_looks_like_one_of_numpy,
    "a variable": lambda: a_variable(is_set=True),
    "a variable that is set later": lambda: a_variable(is_set=False),
    "a list grows": lambda: model(lambda m: m.layers.append(THREE), Sequential),
    "a list shrinks": lambda: model(lambda m: m.layers.pop(0), Sequential, layers=[THREE, ONE]),
    "a dictionary in a list": lambda: scaled([{"a": 1.0}], lambda v: len(v[0]), lambda v: v[0].update(b=3)),
    "a key is renamed": lambda: scaled({"a": 2.0}, lambda v: v.get("b", 1.0), lambda v: v.update(b=v.pop("a"))),
    "another order": lambda: scaled({"a": 2, "b": 5}, lambda v: next(iter(v.values())), to_the_end),
    "a set": lambda: scaled({2.0, 5.0}, sum, lambda v: (v.remove(5.0), v.add(7.0))),
    "a new attribute": lambda: model(put("bias", 2.0)),
    "an attribute goes": lambda: model(lambda m: delattr(m, "bias"), bias=2.0),
    "another dictionary of attributes": lambda: model(put("__dict__", {"bias": 5.0}), bias=2.0),
    "a new attribute of the class": lambda: model(lambda m: setattr(type(m), "bias", 2.0), derived(0, Model)),
    "another method": lambda: model(lambda m: setattr(type(m), "__call__", lambda _, x: x * 5), derived(2.0)),
    "another class": lambda: model(put("__class__", derived(5.0)), derived(2.0)),
    "another base": lambda: model(lambda m: setattr(type(m), "__bases__", (derived(5.0),)), derived(0, BASE)),
    "a metaclass": lambda: model(
        lambda m: setattr(type(type(m)), "scale", 5.0), type("Meta", (type,), {"scale": 2.0})("Kind", (), META)
    ),
    "a slot without a value": lambda: model(put("bias", 2.0), Slots),
    "a private slot": lambda: model(lambda m: m.set_scale(5.0), Slots),
    "an attribute of an array": lambda: scaled(
        with_scale(ONE.view(type("Array", (np.ndarray,), {}))), lambda v: v.scale, put("scale", 5.0)
    ),
    "an attribute of a function": lambda: model(put("scale", 7.0), function),
    "the defaults of a function": lambda: calling(function(), put("__defaults__", (5.0,))),
    "the defaults of keywords": lambda: calling(function(), put("__kwdefaults__", {"more": (5.0,)})),
    "a number of another type": lambda: scaled([2], lambda v: len(str(v[0])), item(0, 2.0)),
    "the sign of zero": lambda: scaled([0.0], lambda v: math.copysign(1.0, v[0]), item(0, -0.0)),
    "a layer within another of jit": lambda: scaled(
        Model(bias=1.0), lambda v: v(X), put("bias", 5.0), lambda inner: jit(inner)
    ),
    "a module in an attribute": lambda: scaled(
        with_scale(types.ModuleType("settings")), lambda v: v.c.scale, put("scale", 5.0), lambda v: Model(c=v)
    ),
    "another module": lambda: scaled(
        Model(cfg=with_scale(types.ModuleType("settings"))), lambda v: v.cfg.scale, put("cfg", Model(scale=3.0))
    ),
    "a context variable": lambda: scaled(
        contextvars.ContextVar("scale", default=2.0), lambda v: v.get(), lambda v: v.set(5.0)
    ),
    "an object of a weak reference": lambda: scaled(
        Model(scale=2.0), lambda v: getattr(v(), "scale", 1.0), put("scale", 5.0), weakref.ref
    ),
    "a read-only dictionary": lambda: scaled(
        {"a": 2.0}, lambda v: v["a"], item("a", 5.0), types.MappingProxyType
    ),
    "a bound method": lambda: scaled({"a": 2.0}, lambda v: v("a"), item("a", 5.0), lambda v: v.get),
    "a view": lambda: scaled({"a": 2.0}, sum, item("b", 5.0), lambda v: v.values()),
    "a default of a dictionary": lambda: scaled(
        collections.defaultdict(float, a=2.0), lambda v: v["a"], item("a", 5.0)
    ),
    "a chain of mappings": lambda: scaled(
        collections.ChainMap({}, {"a": 2.0}), lambda v: v["a"], lambda v: v.maps[0].update(a=5)
    ),
    "a deque": lambda: scaled(collections.deque([2.0]), sum, lambda v: v.appendleft(5.0)),
    "a list of a class": lambda: scaled(collections.UserList([2.0]), sum, lambda v: v.append(5.0)),
    "bytes": lambda: scaled(bytearray([2]), lambda v: v[0], item(0, 5)),
    "an array of Python": lambda: scaled(array.array("d", [2]), lambda v: v[0], item(0, 5)),
    "keywords of a partial": lambda: scaled(
        functools.partial(max, a=2.0), lambda v: v.keywords["a"], lambda v: v.keywords.update(a=5.0)
    ),
}  # fmt: skip
for _kind in (types.SimpleNamespace, argparse.Namespace, Model):
    CASES |= {
        f"{_kind.__name__} changes": lambda kind=_kind: scaled(
            kind(scale=2.0), lambda v: v.scale, put("scale", 5.0)
        ),
        f"{_kind.__name__} grows": lambda kind=_kind: scaled(
            kind(), lambda v: getattr(v, "scale", 2.0), put("scale", 5.0)
        ),
        f"{_kind.__name__} within another": lambda kind=_kind: scaled(
            kind(a=kind(b=[2.0])), lambda v: sum(v.a.b), lambda v: v.a.b.append(5.0)
        ),
    }
for _mapping in (collections.OrderedDict, collections.UserDict, collections.Counter):
    CASES[_mapping.__name__] = lambda kind=_mapping: scaled(kind(a=2), lambda v: sum(v.values()), item("b", 5))


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    layer, change = CASES[name]()
    fast = jit(layer)
    before = fast(X)
    np.testing.assert_array_equal(before, layer(X))
    (model,) = fast.models
    fast(X)
    assert fast.model is model
    change()
    after = fast(X)
    np.testing.assert_array_equal(after, layer(X))
    assert not np.array_equal(before, after)


def test_values_of_a_thread() -> None:
    local = threading.local()
    local.scale = 2.0
    fast = jit(lambda x: x * local.scale)
    results = [fast(X)]

    def work() -> None:
        local.scale = 5.0
        results.append(fast(X))

    thread = threading.Thread(target=work)
    thread.start(), thread.join()
    results.append(fast(X))
    assert [result[0, 0, 0] for result in results] == [2, 5, 2]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("way", ["data", "transposed", "shorter", "add_", "step"])
def test_a_write_that_torch_shows_is_seen(way: str) -> None:
    import torch

    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    x = torch.ones(2, 2)
    fast = jit(lambda x: x @ weight.detach())
    before = fast(x)
    weight.grad = torch.ones_like(weight)
    {
        "data": lambda: setattr(weight, "data", weight.data * 4),
        "transposed": lambda: setattr(weight, "data", weight.data.T),
        "shorter": lambda: setattr(weight, "data", weight.data[:, :1]),
        "add_": lambda: weight.detach().add_(1),
        "step": torch.optim.SGD([weight], lr=0.5).step,
    }[way]()
    torch.testing.assert_close(fast(x), x @ weight.detach())
    assert before.shape != fast(x).shape or not torch.equal(before, fast(x))


@pytest.mark.needs("torch")
def test_refresh_is_for_writes_that_nothing_shows() -> None:
    import torch

    array, tensor = np.ones(4, np.float32), torch.ones(4)
    with torch.inference_mode():
        frozen = torch.ones(4)
    fast = jit(lambda x, y: (x * array, y * tensor, y * frozen))
    for factor in (3, 5):
        fast(torch.ones(4), torch.ones(4))
        array *= factor
        tensor.data.mul_(factor)
        with torch.inference_mode():
            frozen.mul_(factor)
        fast.refresh()
        assert fast.models == ()
        assert all(result.equal(torch.full((4,), array[0])) for result in fast(torch.ones(4), torch.ones(4)))


def test_a_change_while_the_graph_is_written() -> None:
    """Another thread sets the weight after the layer has read it."""
    weights = {"w": 1.0}
    read, go = threading.Event(), threading.Event()

    def layer(x: Any) -> Any:
        weight = weights["w"]
        if threading.current_thread() is not threading.main_thread():
            read.set(), go.wait(10)
        return x * weight

    fast = jit(layer)
    thread = threading.Thread(target=fast, args=(X,))
    thread.start()
    read.wait(10)
    weights["w"] = 5.0
    go.set(), thread.join()
    np.testing.assert_array_equal(fast(X), X * 5)


def test_a_change_while_a_graph_is_tried_is_not_put_back() -> None:
    """A trial with an open length is refused after another thread has set the weight."""
    weights = {"w": 1.0}
    is_set, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (weights.update(w=5.0), is_set.set(), ended.wait(10)))

    def layer(x: Any) -> Any:
        if not is_set.is_set():
            thread.start(), is_set.wait(10)
        return x * weights["w"] * (2 if x.shape[1] == 3 else 1)

    fast = jit(layer)
    np.testing.assert_array_equal(fast(X), X * 10)
    assert weights == {"w": 5.0}
    ended.set(), thread.join()
    np.testing.assert_array_equal(fast(X), X * 10)


def test_a_change_while_the_graph_of_another_signature_is_written() -> None:
    """The graph that was there before is old then, too."""
    weights = [1.0]
    fast = jit(lambda x: x * weights[0] if x.ndim < 3 else (weights.append(0) or weights.insert(0, 5.0) or x))
    fast(X[0])
    fast(X)
    np.testing.assert_array_equal(fast(X[0]), X[0] * 5)


def test_weights_that_a_thread_sets_all_the_time() -> None:
    weights, stop = Model(w=0.0), threading.Event()

    def write() -> None:
        while not stop.is_set():
            weights.w += 1.0

    fast = jit(lambda x: x * weights.w)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            least = weights.w
            assert fast(X)[0, 0, 0] >= np.float32(least)
    finally:
        stop.set(), thread.join()
    np.testing.assert_array_equal(fast(X), X * np.float32(weights.w))


def test_a_layer_that_fills_something_in_its_first_call() -> None:
    class Lazy:
        table: Any = None
        calls = 0

        @functools.cached_property
        def scale(self) -> float:
            return 2.0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            if self.table is None:
                self.table = np.full(4, 3, np.float32)
            return x * self.table * self.scale

    layer = Lazy()
    fast = jit(layer)
    for dtype in (np.float32, np.float64) * 2:
        np.testing.assert_array_equal(fast(X.astype(dtype)), X * 6)
    assert len(fast.models) == 2
    layer.table = layer.table * 2
    np.testing.assert_array_equal(fast(X), X * 12)


def of_a_count(state: Any, x: Any) -> Any:
    state.count += 1
    return x * float(state.count)  # it is in the graph, so no graph may stay


def of_a_first_call(state: Any, x: Any) -> Any:
    y = x * 2 if state.first else x * 3
    state.first = False
    return y


def of_a_queue(state: Any, x: Any) -> Any:
    return x * state.numbers.pop(0)


def of_a_number_that_is_set_back(state: Any, x: Any) -> Any:
    y, state.gain = x * state.gain, 1.0
    return y


def of_a_length(state: Any, x: Any) -> Any:
    """The graph with an open length is refused after the change."""
    y = x * state.numbers.pop(0)
    return y * (2 if x.shape[1] == 3 else 1)


@pytest.mark.parametrize(
    "function", [of_a_count, of_a_first_call, of_a_queue, of_a_number_that_is_set_back, of_a_length]
)
def test_each_call_computes_with_what_it_meets(
    function: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that changes what it reads returns in each call what it would return without jit."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests leave some

    def fresh() -> Any:
        return Model(first=True, numbers=[2.0, 3.0, 5.0, 7.0, 11.0, 13.0], gain=4.0, count=0)

    one, other = fresh(), fresh()
    fast = jit(lambda x: function(one, x))
    for number in range(5):
        if number == 3:
            one.first = other.first = True
            one.gain = other.gain = 6.0
        np.testing.assert_array_equal(fast(X), function(other, X))
        assert (one.first, one.numbers, one.gain) == (other.first, other.numbers, other.gain)


GROWING: dict[type, tuple[Callable[[Any, Any], object], Callable[[Any], Any], Callable[[Any], object]]] = {
    list: (list.append, lambda v: v[0], item(0, 3.0)),
    collections.deque: (lambda v, n: v.append(n), lambda v: v[0], item(0, 3.0)),
    set: (set.add, min, lambda v: (v.discard(2.0), v.add(3.0))),
    dict: (lambda v, n: v.update({n: 0.0}), lambda v: v[2.0], item(2.0, 3.0)),
}
"""How a container grows, what a layer reads of it, and how that changes."""


@pytest.mark.parametrize("kind", GROWING)
def test_what_was_in_a_container_that_grows_is_watched(kind: Any) -> None:
    grow, read, change = GROWING[kind]
    container = kind({2.0: 2.0} if kind is dict else [2.0])
    count = itertools.count(10.0)

    def layer(x: Any) -> Any:
        grow(container, next(count))
        return x * read(container)

    fast = jit(layer)
    for _ in range(4):
        np.testing.assert_array_equal(fast(X), X * 2)
    (model,) = fast.models
    size = len(container)
    fast(X)
    assert (fast.model, len(container)) == (model, size)  # nothing is traced again
    change(container)
    np.testing.assert_array_equal(fast(X), X * 3)


def test_what_does_not_change_a_graph_writes_none() -> None:
    """Counters, logs and other layers' counters; a global with the name of an attribute; objects that raise."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    inner = Model(count=0, odd=Odd(), log={})
    log: list[int] = []
    durations: collections.deque[int] = collections.deque(maxlen=3)

    def counted(x: Any) -> Any:
        inner.count += 1
        log.append(inner.count), durations.append(inner.count)
        inner.log[len(inner.log)] = inner.count
        return x + 1

    one, other = jit(lambda x: counted(x) * 2), jit(lambda x: counted(x) * 3)
    for _ in range(4):  # the deque is full then, and each call changes all of it
        one(X), other(X)
    models, count = (one.model, other.model), inner.count
    for _ in range(3):
        np.testing.assert_array_equal(one(X), (X + 1) * 2)
        np.testing.assert_array_equal(other(X), (X + 1) * 3)
    assert inner.count == count
    counted(X)
    one(X), other(X)
    assert (one.model, other.model) == models
    assert inner.count == count + 1

    globals()["step"] = 0
    layer = Model(step=2.0)
    fast = jit(lambda x: x * layer.step)
    fast(X)
    model = fast.model
    globals()["step"] = 1
    layer.step = float("2")  # an equal number
    fast(X)
    assert fast.model is model


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST", 50)
    program = [Model(number=n) for n in range(100)]
    with pytest.raises(ValueError, match="must lead to at most 100,000 objects"):
        jit(lambda x: x * program[0].number)(X)


@pytest.mark.parametrize("open_length", [True, False])
def test_a_branch_on_the_type_of_a_length(open_length: bool) -> None:
    import numbers

    def layer(x: Any) -> Any:
        n, half = x.shape[0], x.shape[0] / 2
        known = isinstance(n, int) and isinstance(n, numbers.Integral) and not isinstance(n, str | float)
        return x * (2 if known and isinstance(half, float) else 3) if open_length else x * range(n)[-1]

    fast = jit(layer)
    for length in (2, 3):
        x = np.ones((length, 4), np.float32)
        np.testing.assert_array_equal(fast(x), layer(x))
    assert len(fast.models) == (1 if open_length else 2)
