"""`jit` as a decorator of functions and methods, and what a decorated function is to Python."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import Any

import numpy as np

from sdpa_xp_export import jit

X = np.ones((2, 3), np.float32)


@jit
def shifted(x: Any, by: float = 1.0) -> Any:
    """Return x + by."""
    return x + by


@jit(form="primitive", verify=True)
def doubled(x: Any) -> Any:
    return x * 2


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @jit
    def method(self, x: Any, *, negative: bool = False) -> Any:
        """Scale x."""
        return -x * self.scale if negative else x * self.scale

    @jit(opset=20)
    def other(self, x: Any) -> Any:
        return x + self.scale

    @staticmethod
    @jit
    def static(x: Any) -> Any:
        return x + 1

    @classmethod
    @jit
    def of_class(cls, x: Any) -> Any:
        return x * cls.factor

    factor = 4.0
    function = jit(functools.partial(lambda by, x: x + by, 2.0))


def test_functions() -> None:
    np.testing.assert_array_equal(shifted(X, by=2.0), X + 2)
    np.testing.assert_array_equal(doubled(X), X * 2)
    assert (shifted.__name__, shifted.__doc__, shifted.__module__) == ("shifted", "Return x + by.", __name__)
    assert shifted.__wrapped__(X, 5.0).max() == 6
    assert [*inspect.signature(shifted).parameters] == ["x", "by"]
    assert pickle.loads(pickle.dumps(shifted)) is shifted
    assert copy.deepcopy(shifted) is shifted


def test_methods_have_graphs_of_their_own() -> None:
    one, other = Scaled(2.0), Scaled(3.0)
    for _ in range(2):
        np.testing.assert_array_equal(one.method(X), X * 2)
        np.testing.assert_array_equal(other.method(X, negative=True), X * -3)
        np.testing.assert_array_equal(one.other(X), X + 2)
        np.testing.assert_array_equal(Scaled.method.__get__(other)(X), X * 3)
    assert len(one.method.models) == 1
    assert len(other.method.models) == 2
    assert Scaled.method.models == ()
    assert one.other.model.opset_import[0].version == 20
    assert (Scaled.method.__name__, one.method.__name__, one.method.__doc__) == ("method", "method", "Scale x.")
    one.scale = 5.0
    np.testing.assert_array_equal(one.method(X), X * 5)
    np.testing.assert_array_equal(one.static(X), X + 1)
    np.testing.assert_array_equal(Scaled.method(other, X), X * 3)
    np.testing.assert_array_equal(one.of_class(X), X * 4)
    np.testing.assert_array_equal(type("Derived", (Scaled,), {"factor": 6.0}).of_class(X), X * 6)
    assert pickle.loads(pickle.dumps(Scaled.static)) is Scaled.static
    np.testing.assert_array_equal(one.function(X), X + 2)


def test_copies_of_an_object_have_graphs_of_their_own() -> None:
    one = Scaled(2.0)
    one.method(X)
    for copied in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        copied.scale = 7.0
        np.testing.assert_array_equal(copied.method(X), X * 7)
        np.testing.assert_array_equal(one.method(X), X * 2)
    assert len(one.method.models) == 1
    method = pickle.loads(pickle.dumps(one.method))
    np.testing.assert_array_equal(method(X), X * 2)


class Shared:
    factor = 3.0

    @classmethod
    def scaled(cls, x: Any) -> Any:
        return x * cls.factor


def test_a_class_method() -> None:
    fast = pickle.loads(pickle.dumps(jit(Shared.scaled)))
    np.testing.assert_array_equal(fast(X), X * 3)


def test_a_method_lives_no_longer_than_its_object() -> None:
    one = Scaled(2.0)
    one.method(X)
    reference = weakref.ref(one)
    del one
    gc.collect()
    assert reference() is None
