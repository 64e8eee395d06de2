"""`jit` never computes with what a layer held before: each kind of change is seen, or `refresh` is for it."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import functools
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
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
NAMED = "a global that is there"


class Model:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __call__(self, x: Any) -> Any:
        bias = getattr(self, "bias", None)
        return x if bias is None else x + bias


class Slots:
    __slots__ = ("bias",)

    def __call__(self, x: Any) -> Any:
        return x + getattr(self, "bias", 0.0)


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


def with_defaults(x: Any, *, scale: Any = (2.0,)) -> Any:
    return x * with_defaults.factor * scale[0]  # type: ignore[attr-defined]


def scaled_by(value: Any, read: Callable[[Any], Any], change: Callable[[Any], object]) -> Case:
    return lambda x: x * read(value), lambda: change(value)


def a_list_grows() -> Case:
    weights = [ONE]
    return lambda x: functools.reduce(lambda y, w: y @ w, weights, x), lambda: weights.append(THREE)


def a_list_shrinks() -> Case:
    weights = [THREE, ONE]
    return lambda x: functools.reduce(lambda y, w: y @ w, weights, x), lambda: weights.pop(0)


def a_dictionary_in_a_list_grows() -> Case:
    return scaled_by([{"a": 1.0}], lambda v: sum(v[0].values()), lambda v: v[0].update(b=3.0))


def a_key_is_renamed() -> Case:
    value = {"a": 2.0}
    return lambda x: x + value.get("b", 0.0), lambda: value.update(b=value.pop("a"))


def a_set_changes_an_element() -> Case:
    return scaled_by({2.0, 5.0}, sum, lambda v: (v.remove(5.0), v.add(7.0)))


def a_field_of_a_dataclass_grows() -> Case:
    model = Sequential()
    return model, lambda: model.layers.append(THREE)


def a_new_attribute() -> Case:
    model = Model()
    return model, lambda: setattr(model, "bias", 2.0)


def an_attribute_goes() -> Case:
    model = Model(bias=2.0)
    return model, lambda: delattr(model, "bias")


def another_dictionary_of_attributes() -> Case:
    model = Model(bias=2.0)
    return model, lambda: setattr(model, "__dict__", {"bias": 5.0})


def a_new_attribute_of_the_class() -> Case:
    kind = type("Derived", (Model,), {})
    return kind(), lambda: setattr(kind, "bias", 2.0)


def another_method() -> Case:
    kind = type(
        "Derived", (Model,), {"factor": lambda self: 2.0, "__call__": lambda self, x: x * self.factor()}
    )
    return kind(), lambda: setattr(kind, "factor", lambda self: 5.0)


def a_slot_without_a_value() -> Case:
    model = Slots()
    return model, lambda: setattr(model, "bias", 2.0)


def a_new_global() -> Case:
    globals().pop("LATER", None)
    return of_globals, lambda: globals().update(LATER=4.0)


def an_attribute_of_a_function() -> Case:
    with_defaults.factor = 2.0  # type: ignore[attr-defined]
    return with_defaults, lambda: setattr(with_defaults, "factor", 7.0)


def a_number_of_another_type() -> Case:
    return scaled_by(
        [2], lambda v: v[0] / 4 if isinstance(v[0], float) else v[0], lambda v: v.insert(0, float(v.pop()))
    )


def the_sign_of_zero() -> Case:
    value = [0.0]
    return lambda x: x * 0 + 1 / np.copysign(1.0, value[0]).astype(np.float32), lambda: value.insert(0, -0.0)


def a_layer_within_another_of_jit() -> Case:
    inner = Model(bias=1.0)
    fast = jit(inner)
    return lambda x: fast(x) + 1, lambda: setattr(inner, "bias", 5.0)


def an_enclosed_module() -> Case:
    module = types.ModuleType("settings")
    module.__dict__["scale"] = 2.0
    holder = Model(module=module)
    return lambda x: x * holder.module.scale, lambda: setattr(holder, "module", Model(scale=3.0))


def an_environment_variable() -> Case:
    os.environ["SDPA_XP_TEST"] = "2"
    return lambda x: x * float(os.environ["SDPA_XP_TEST"]), lambda: os.environ.update(SDPA_XP_TEST="5")


def a_context_variable() -> Case:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)
    return scaled_by(variable, lambda v: v.get(), lambda v: v.set(5.0))


def an_object_of_a_weak_reference() -> Case:
    target = Model(scale=2.0)
    reference = weakref.ref(target)
    return lambda x: x * getattr(reference(), "scale", 1.0), lambda: setattr(target, "scale", 5.0)


def a_read_only_dictionary() -> Case:
    inner = {"scale": 2.0}
    proxy = types.MappingProxyType(inner)
    return lambda x: x * proxy["scale"], lambda: inner.update(scale=5.0)


def of_standard_library() -> Iterator[Case]:
    for kind in (types.SimpleNamespace, argparse.Namespace, Model):
        yield scaled_by(kind(scale=2.0), lambda v: v.scale, lambda v: setattr(v, "scale", 5.0))
        yield scaled_by(kind(), lambda v: getattr(v, "scale", 2.0), lambda v: setattr(v, "scale", 5.0))
        yield scaled_by(kind(a=kind(b=[2.0])), lambda v: sum(v.a.b), lambda v: v.a.b.append(5.0))
    for mapping in (collections.OrderedDict, collections.UserDict, collections.Counter):
        yield scaled_by(mapping(a=2), lambda v: sum(v.values()), lambda v: v.update(b=5))
    yield scaled_by(collections.defaultdict(float, a=2.0), lambda v: v["a"], lambda v: v.update(a=5.0))
    yield scaled_by(collections.ChainMap({}, {"a": 2.0}), lambda v: v["a"], lambda v: v.maps[0].update(a=5.0))
    yield scaled_by(collections.deque([2.0]), sum, lambda v: v.appendleft(5.0))
    yield scaled_by(collections.UserList([2.0]), sum, lambda v: v.append(5.0))
    yield scaled_by(bytearray([2]), lambda v: v[0], lambda v: v.append(1) or v.__setitem__(0, 5))
    yield scaled_by(array.array("d", [2.0]), lambda v: v[0], lambda v: v.__setitem__(0, 5.0))
    yield scaled_by(
        functools.partial(max, 2.0),
        lambda v: v.keywords.get("default", 2.0),
        lambda v: v.keywords.update(default=5.0),
    )


def a_dictionary_changes_its_order() -> Case:
    steps = {"mul": lambda x: x * 2, "add": lambda x: x + 1}
    layer = lambda x: functools.reduce(lambda y, step: step(y), steps.values(), x)  # noqa: E731
    return layer, lambda: steps.update(mul=steps.pop("mul"))


def a_key_of_a_dictionary() -> Case:
    model = Model(bias=1.0)
    factors = {model: 2.0}
    return lambda x: sum(x * f + key.bias for key, f in factors.items()), lambda: setattr(model, "bias", 5.0)


def a_private_slot() -> Case:
    class Private:
        __slots__ = ("__scale",)

        def __init__(self) -> None:
            self.set(2.0)

        def set(self, scale: float) -> None:
            self.__scale = scale

        def __call__(self, x: Any) -> Any:
            return x * self.__scale

    layer = Private()
    return layer, lambda: layer.set(5.0)


def an_attribute_of_a_decorated_function() -> Case:
    @jit
    def inner(x: Any) -> Any:
        return x * inner.scale

    inner.scale = 2.0
    return lambda x: inner(x) + 1, lambda: setattr(inner, "scale", 5.0)


def a_module_in_an_attribute() -> Case:
    module: Any = types.ModuleType("settings_of_a_test")
    module.scale = 2.0
    holder = Model(cfg=module)
    return lambda x: x * holder.cfg.scale, lambda: setattr(module, "scale", 5.0)


def a_module_that_a_function_imports() -> Case:
    module: Any = types.ModuleType("sdpa_settings")
    module.scale = 2.0
    sys.modules["sdpa_settings"] = module

    def layer(x: Any) -> Any:
        from sdpa_settings import scale  # type: ignore[import-not-found]

        return x * scale

    return layer, lambda: setattr(module, "scale", 5.0)


def a_text_that_names_a_global() -> Case:
    globals()["BY_TEXT"] = 2.0
    return lambda x: x * globals()["BY_TEXT"], lambda: globals().update(BY_TEXT=5.0)


def the_defaults_of_a_function() -> Case:
    def inner(x: Any, scale: float = 2.0) -> Any:
        return x * scale

    return lambda x: inner(x), lambda: setattr(inner, "__defaults__", (5.0,))


def a_bound_method_of_a_dictionary() -> Case:
    scales = {"a": 2.0}
    get = scales.get
    return lambda x: x * get("a"), lambda: scales.update(a=5.0)


def a_view_of_a_dictionary() -> Case:
    scales = {"a": 2.0}
    values = scales.values()
    return lambda x: x * sum(values), lambda: scales.update(b=5.0)


def a_metaclass() -> Case:
    meta: Any = type("Meta", (type,), {"scale": 2.0})
    kind = meta("Kind", (), {"__call__": lambda self, x: x * type(type(self)).scale})
    return kind(), lambda: setattr(meta, "scale", 5.0)


def a_function_that_looks_like_one_of_numpy() -> Case:
    scale = [2.0]

    @functools.wraps(np.linalg.norm)
    def layer(x: Any) -> Any:
        return x * scale[0]

    return lambda x: layer(x), lambda: scale.insert(0, 5.0)


def kinds() -> tuple[type, type, type]:
    """A class, and two whose method returns another number."""
    first = type("First", (), {"scale": lambda self: 2.0, "__call__": lambda self, x: x * self.scale()})
    return first, *(type("Other", (first,), {"scale": lambda self, n=n: n}) for n in (3.0, 5.0))


def another_class() -> Case:
    first, other, _ = kinds()
    layer: Any = first()
    return layer, lambda: setattr(layer, "__class__", other)


def another_base_of_a_class() -> Case:
    _, second, third = kinds()
    derived: Any = type("Derived", (second,), {})
    return derived(), lambda: setattr(derived, "__bases__", (third,))


def a_variable_that_is_set_later() -> Case:
    def layer(x: Any) -> Any:
        try:
            return x * scale
        except NameError:
            return x

    def change() -> None:
        nonlocal scale
        scale = 5.0

    if False:
        scale = 1.0
    return layer, change


def an_attribute_of_an_array() -> Case:
    scale: Any = ONE.view(type("Array", (np.ndarray,), {}))
    scale.factor = 2.0
    return lambda x: x * scale.factor, lambda: setattr(scale, "factor", 5.0)


CASES: list[Callable[[], Case]] = [
    another_class, another_base_of_a_class, a_variable_that_is_set_later, an_attribute_of_an_array,
    a_dictionary_changes_its_order, a_key_of_a_dictionary, a_private_slot, an_attribute_of_a_decorated_function,
    a_module_in_an_attribute, a_module_that_a_function_imports, a_text_that_names_a_global,
    the_defaults_of_a_function, a_bound_method_of_a_dictionary, a_view_of_a_dictionary, a_metaclass,
    a_function_that_looks_like_one_of_numpy,
    a_list_grows, a_list_shrinks, a_dictionary_in_a_list_grows, a_key_is_renamed, a_set_changes_an_element,
    a_field_of_a_dataclass_grows, a_new_attribute, an_attribute_goes, another_dictionary_of_attributes,
    a_new_attribute_of_the_class, another_method, a_slot_without_a_value, a_new_global,
    an_attribute_of_a_function,
    a_number_of_another_type, the_sign_of_zero, a_layer_within_another_of_jit, an_enclosed_module,
    an_environment_variable, a_context_variable, an_object_of_a_weak_reference, a_read_only_dictionary,
]  # fmt: skip


def check(case: Case) -> None:
    layer, change = case
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


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_seen(case: Callable[[], Case]) -> None:
    check(case())


@pytest.mark.parametrize("number", range(len([*of_standard_library()])))
def test_a_change_of_an_object_of_the_standard_library_is_seen(number: int) -> None:
    check([*of_standard_library()][number])


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
    if way == "data":
        weight.data = weight.data * 4
    elif way == "transposed":
        weight.data = weight.data.T
    elif way == "shorter":
        weight.data = weight.data[:, :1]
    elif way == "add_":
        weight.detach().add_(1)
    else:
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5).step()
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


def test_a_number_that_counts_the_calls() -> None:
    """It is in the graph, so no graph may stay."""
    layer = Model(count=0)

    def counted(x: Any) -> Any:
        layer.count += 1
        return x * float(layer.count)

    fast = jit(counted)
    assert [fast(X)[0, 0, 0] for _ in range(3)] == [1, 2, 3]


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


@pytest.mark.parametrize("function", [of_a_first_call, of_a_queue, of_a_number_that_is_set_back, of_a_length])
def test_each_call_computes_with_what_it_meets(
    function: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that changes what it reads returns in each call what it would return without jit."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests leave some

    def fresh() -> Any:
        return Model(first=True, numbers=[2.0, 3.0, 5.0, 7.0, 11.0, 13.0], gain=4.0)

    one, other = fresh(), fresh()
    fast = jit(lambda x: function(one, x))
    for number in range(5):
        if number == 3:
            one.first = other.first = True
            one.gain = other.gain = 6.0
        np.testing.assert_array_equal(fast(X), function(other, X))
        assert (one.first, one.numbers, one.gain) == (other.first, other.numbers, other.gain)


@pytest.mark.parametrize("grow", ["dictionary", "list", "set", "deque"])
def test_what_was_in_a_container_that_grows_is_watched(grow: str) -> None:
    containers: dict[str, Any] = {
        "dictionary": {0: 2.0},
        "list": [2.0],
        "set": {2.0},
        "deque": collections.deque([2.0]),
    }
    container = containers[grow]
    count = itertools.count(10.0)

    def layer(x: Any) -> Any:
        if grow == "dictionary":
            container[next(count)] = 0.0
        elif grow == "set":
            container.add(next(count))
        else:
            container.append(0.0)
        return x * (min(container) if grow == "set" else container[0])

    fast = jit(layer)
    for _ in range(4):
        np.testing.assert_array_equal(fast(X), X * 2)
    (model,) = fast.models
    size = len(container)
    fast(X)
    assert (fast.model, len(container)) == (model, size)  # nothing is traced again
    if grow == "set":
        container.discard(2.0)
        container.add(3.0)
    else:
        container[0] = 3.0
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
