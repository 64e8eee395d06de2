"""A type of array with `__sdpa_xp__` gets the calls that it is in, as they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sdpa_xp
from sdpa_xp import masks


class Answering:
    """Answers with what it was asked."""

    def __sdpa_xp__(self, *arguments: Any) -> Any:
        return self, *arguments


FUNCTIONS: list[Callable[..., Any]] = [
    sdpa_xp.scaled_dot_product_attention,
    sdpa_xp.scaled_dot_product_attention_vjp,
    sdpa_xp.attention_state,
    sdpa_xp.dot_product_attention,
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_any_input_answers(function: Callable[..., Any], place: int) -> None:
    answering, inputs = Answering(), [np.ones((2, 4))] * 3
    inputs[place] = answering  # type: ignore[call-overload]
    answer, name, arrays, rules = function(*inputs, is_causal=True, scale="as it came")
    assert (answer, name) == (answering, function.__name__)
    assert list(arrays) == ["query", "key", "value"]
    assert all(one is other for one, other in zip(arrays.values(), inputs, strict=True))
    assert (rules["is_causal"], rules["scale"]) == (True, "as it came")


TANGENTS, X = {"query": "as it came"}, np.ones((2, 4))


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (sdpa_xp.attention_weights, {}),
        (sdpa_xp.attention_scores, {}),
        (sdpa_xp.scaled_dot_product_attention_jvp, {"value": X, "tangents": TANGENTS}),
        (sdpa_xp.scaled_dot_product_attention_laplacian, {"value": X, "tangents": TANGENTS}),
    ],
)
def test_without_values_and_along_directions(function: Callable[..., Any], more: dict[str, Any]) -> None:
    answering, mask = Answering(), masks.causal()
    answer, name, arrays, rules = function(X, answering, attn_mask=mask, **more)
    assert (answer, name) == (answering, function.__name__)
    assert list(arrays) == ["query", "key", *(["value"] if more else [])]
    assert rules["attn_mask"] is mask
    assert rules.get("tangents") is more.get("tangents")


def test_the_base_of_the_logarithm() -> None:
    *_, rules = sdpa_xp.attention_state(Answering(), Answering(), Answering(), lse_base=2)  # type: ignore[type-var]
    assert rules["lse_base"] == 2


@pytest.mark.parametrize("function", [*FUNCTIONS, sdpa_xp.attention_weights])
def test_what_is_not_implemented_is_computed(function: Callable[..., Any]) -> None:
    names: list[str] = []

    class Declining(np.ndarray):
        __array_ufunc__ = np.ndarray.__array_ufunc__

        def __sdpa_xp__(self, name: str, *_: Any) -> Any:
            names.append(name)
            return NotImplemented

    rng = np.random.default_rng(0)
    inputs = list(rng.standard_normal((2 if function is sdpa_xp.attention_weights else 3, 5, 2, 4)))
    expected = function(*inputs)
    result = function(inputs[0].view(Declining), *inputs[1:])
    assert names == [function.__name__]
    if function is sdpa_xp.scaled_dot_product_attention_vjp:
        result, expected = result[0], expected[0]
    elif function is sdpa_xp.attention_state:
        result, expected = result.output, expected.output
    np.testing.assert_array_equal(result, expected)


def noting(answer: Any, *bases: type) -> type:
    """A class whose method notes that it was called."""

    def method(self: Any, *_: Any) -> Any:
        METHODS_CALLED.append(type(self))
        return answer

    return type("Noting", bases, {"__sdpa_xp__": method})


Base, Unrelated = (noting(NotImplemented) for _ in range(2))
Derived = noting("derived", Base)
METHODS_CALLED: list[type] = []


@pytest.mark.parametrize(
    ("inputs", "order"),
    [
        ([Base(), Base(), Derived()], [Derived]),
        ([Unrelated(), Base(), Derived()], [Unrelated, Derived]),
        ([Unrelated(), Unrelated(), Derived()], [Unrelated, Derived]),
        ([Derived(), Base(), Unrelated()], [Derived]),
    ],
)
def test_each_type_is_asked_once_and_subclasses_first(inputs: list[Any], order: list[type]) -> None:
    METHODS_CALLED.clear()
    assert sdpa_xp.scaled_dot_product_attention(*inputs) == "derived"
    assert order == METHODS_CALLED


def test_options_of_jax_are_those_of_the_library() -> None:
    answering = Answering()
    rules = {"mask": masks.causal(), "key_value_seq_lengths": [2], "local_window_size": 1}
    *_, options = sdpa_xp.dot_product_attention(answering, answering, answering, **rules)  # type: ignore[type-var]
    joined = masks.causal() & masks.sliding_window(1, 1) & masks.padding([2])
    assert (repr(options["attn_mask"]), options["layout"]) == (repr(joined), "...LHE")


def test_an_attribute_of_an_instance_does_not_count() -> None:
    """As with Python's own special methods, the type is asked."""

    class Array(np.ndarray):
        pass

    x = np.ones((2, 4)).view(Array)
    x.__sdpa_xp__ = lambda *_: None  # type: ignore[attr-defined]
    assert sdpa_xp.scaled_dot_product_attention(x, x, x).shape == (2, 4)
