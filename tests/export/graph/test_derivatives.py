"""Derivatives in a graph: the library's own code writes them, for numbers and names of lengths."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import run
from open_calls import FIXED, ROWS, TRACED, Row
from short_runs import agreed

import sdpa_xp
from sdpa_xp import jvp, scaled_dot_product_attention, scaled_dot_product_attention_vjp
from sdpa_xp_export import TensorSpec, jit, to_onnx, verify_layer

F = np.float32
RNG = np.random.default_rng(0)
STEPS: dict[str, Callable[..., dict[str, Any]]] = {}
LISTS = [ROWS["keys"], ROWS["keys, blocks"]]
"""A graph needs to know how many keys there are."""
DIFFERENTIABLE = {name: row for name, row in ROWS.items() if name != "function of the scores"}


def named(**arrays: Any) -> dict[str, Any]:
    """Arrays, and those of mappings of them, by names that outputs may have."""
    return {
        f"{name}{'_' * bool(n)}{n}".replace(".", "_"): x
        for name, part in arrays.items()
        for n, x in (part.items() if isinstance(part, dict) else [("", part)])
    }


def step(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    STEPS[function.__name__] = function
    return function


@step
def gradients(query: Any, key: Any, value: Any, rules: dict[str, Any]) -> dict[str, Any]:
    output, pullback = scaled_dot_product_attention_vjp(query, key, value, **rules)
    return named(output=output, gradient=pullback(output))


@step
def hessian(query: Any, key: Any, value: Any, rules: dict[str, Any]) -> dict[str, Any]:
    output, pullback = scaled_dot_product_attention_vjp(query, key, value, **rules)
    gradient, derivative = pullback.jvp(output, {"query": query, "value": value})
    return named(gradient=gradient, derivative=derivative)


@step
def tangent(query: Any, key: Any, value: Any, rules: dict[str, Any]) -> dict[str, Any]:
    moved = {"query": query * query, "key": key, "value": value}
    return named(moved=sdpa_xp.scaled_dot_product_attention_jvp(query, key, value, moved, **rules)[1])


@step
def laplacian(query: Any, key: Any, value: Any, rules: dict[str, Any]) -> dict[str, Any]:
    xp = query.__array_namespace__()
    moved = {"query": xp.stack([query, -query * query]), "value": xp.stack([value, value])}
    output, tangents, bend = sdpa_xp.scaled_dot_product_attention_laplacian(query, key, value, moved, **rules)
    return named(output=output, tangents=tangents, bend=bend)


@step
def twice(query: Any, key: Any, value: Any, rules: dict[str, Any]) -> dict[str, Any]:
    def slope(x: Any) -> Any:
        return jvp(lambda y: scaled_dot_product_attention(y, key, value, **rules), (x,), (query,))[1]

    return named(second=jvp(slope, (query,), (query * query,))[1])


def model_of(name: str, row: Row, symbols: str) -> onnx.ModelProto:
    sizes = FIXED | TRACED | {letter: letter for letter in symbols}
    specs = [
        TensorSpec(str(x.dtype), tuple(sizes[letter] for letter in axes))
        for x, axes in zip(row.draw(TRACED), row.axes, strict=True)
    ]
    return to_onnx(call_of(name, row), *specs)


def call_of(name: str, row: Row) -> Callable[..., dict[str, Any]]:
    return lambda query, key, value, *more: STEPS[name](query, key, value, row.keywords(*more))


def assert_close(result: np.ndarray, expected: np.ndarray) -> None:
    largest = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5 * largest)


def assert_agrees(model: onnx.ModelProto, call: Callable[..., Any], row: Row, symbols: str) -> None:
    for arrays, expected in row.runs(call, np.asarray, symbols):
        results = run(model, {value.name: x for value, x in zip(model.graph.input, arrays, strict=True)})
        assert [*results] == [*expected]
        for name, x in expected.items():
            assert results[name].dtype == x.dtype
            assert_close(results[name], x)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("row", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("name", STEPS)
def test_open_lengths(name: str, row: Row) -> None:
    is_open = row.most == np.inf and row not in LISTS
    symbols = row.symbols if is_open else row.symbols.strip("LS")
    model = model_of(name, row, symbols)
    assert_agrees(model, call_of(name, row), row, symbols)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("row", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("name", STEPS)
def test_fixed_lengths(name: str, row: Row) -> None:
    arrays, call = row.draw(TRACED), call_of(name, row)
    model = model_of(name, row, "")
    assert [5, 7] not in [[*array.dims[-2:]] for array in model.graph.initializer]
    results = run(model, {value.name: x for value, x in zip(model.graph.input, arrays, strict=True)})
    for output, x in call(*arrays).items():
        assert_close(results[output], x)


def test_a_step_in_a_jit() -> None:
    def update(weight: Any, x: Any, target: Any) -> Any:
        query = x @ weight
        output, pullback = scaled_dot_product_attention_vjp(query, x, x, is_causal=True, softcap=3.0)
        return weight - 0.1 * (x.mT @ pullback(output - target)["query"])

    fast, weight = jit(update), RNG.standard_normal((8, 8)).astype(F)
    for length in (5, 9, 40, 1):
        x, target = RNG.standard_normal((2, 2, 3, length, 8)).astype(F)
        np.testing.assert_allclose(fast(weight, x, target), update(weight, x, target), atol=2e-5)
    assert [dim.dim_param for dim in fast.model.graph.input[1].type.tensor_type.shape.dim][2] == "x_2"


TABLE = np.linspace(-1, 1, 64, dtype=F).reshape(8, 8)
ALONG: dict[str, Callable[..., Any]] = {
    "key alone": lambda q, k, v, t: jvp(lambda z: scaled_dot_product_attention(q, z, v), (k,), (t,)),
    "value alone": lambda q, k, v, t: jvp(lambda z: scaled_dot_product_attention(q, k, z), (v,), (t,)),
    "weights": lambda q, k, _v, t: jvp(lambda z: sdpa_xp.attention_weights(q, z), (k,), (t,)),
    "state": lambda q, k, v, t: jvp(lambda z: sdpa_xp.attention_state(q, z, v), (k,), (t,))[1].lse,
    "slopes": lambda q, k, v, t: jvp(
        lambda z: scaled_dot_product_attention(q, k, v, bias=sdpa_xp.biases.alibi(z[0, :1])), (k,), (t,)
    ),
    "scale": lambda q, k, v, t: jvp(
        lambda z: scaled_dot_product_attention(q, k, v, scale=z[:, :1]), (q,), (t,)
    ),
    "gradient": lambda q, k, v, t: jvp(
        lambda z: scaled_dot_product_attention_vjp(q, z, v)[1](t)["query"], (k,), (t,)
    ),
    "cache": lambda q, k, v, t: jvp(
        lambda z: sdpa_xp.KVCache(k[None], v[None]).append(z[None], v[None]).attend(q[None]), (k,), (t,)
    ),
    "weight": lambda q, _k, _v, _t: jvp(lambda w: q @ w, (TABLE,), (TABLE,)),
    "left operand": lambda q, k, _v, t: jvp(
        lambda z: (t * z - q, t @ z.mT, z.__array_namespace__().where(t > z, q, z)), (k,), (t,)
    ),
    "no derivative": lambda _q, k, v, t: jvp(lambda z: (v, z.__array_namespace__().argmax(z)), (k,), (t,))[0],
}


@pytest.mark.parametrize("name", ALONG)
def test_what_stands_beside_an_array_with_derivatives_is_a_value_of_the_graph(name: str) -> None:
    arrays = RNG.standard_normal((4, 5, 8)).astype(F)
    results = jit(ALONG[name])(*arrays)
    for result, expected in zip(leaves_of(results), leaves_of(ALONG[name](*arrays)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6)


def leaves_of(results: Any) -> list[Any]:
    return [x for part in results for x in leaves_of(part)] if isinstance(results, tuple) else [results]


def pulled(query: Any, key: Any, value: Any, cotangent: Any, **rules: Any) -> dict[str, Any]:
    """Gradients and a Hessian-vector product. The gradient of one weight is 0, but for rounding errors."""
    _, pullback = scaled_dot_product_attention_vjp(query, key, value, **rules)
    gradient, derivative = pullback.jvp(cotangent, {"query": query, "key": key, "value": value})
    return named(gradient=gradient, derivative=derivative)


X = TensorSpec("float32", ("B", 2, "L", 8))
CROSS = [TensorSpec("float32", ("B", 2, length, 8)) for length in "LSSL"]


@pytest.mark.usefixtures("few_long_runs")
@pytest.mark.parametrize("seed", [3, 28, 30, 33, 91])
def test_terms_that_cancel_are_no_fault(seed: int) -> None:
    """Large tokens leave one key all the weight: products of 1e28 add up to 0, but for rounding errors."""
    report = agreed(verify_layer(to_onnx(pulled, *CROSS), pulled, seed=seed))
    assert "the reference is" not in str(report)
    assert len([run for run in report.runs if "large tokens" not in run.inputs]) > 20
    assert any("large tokens" in run.inputs for run in report.runs)


def with_a_finite_number(query: Any, key: Any, value: Any, cotangent: Any) -> dict[str, Any]:
    """A causal mask that adds -1e4, which only large tokens show."""
    xp = query.__array_namespace__()
    later = xp.arange(query.shape[-2])[:, None] < xp.arange(key.shape[-2])
    results = pulled(query, key, value, cotangent, attn_mask=xp.where(later, -1e4, 0.0 * query[0, 0, :, :1]))
    return {name: x for name, x in results.items() if "attn_mask" not in name}


def times_a_factor(query: Any, key: Any, value: Any, cotangent: Any) -> dict[str, Any]:
    return {name: x * 1.0001 for name, x in pulled(query, key, value, cotangent, is_causal=True).items()}


WRONG_STEPS = {
    "-1e4 for -inf": with_a_finite_number,
    "another scale": partial(pulled, is_causal=True, scale=8**-0.5 * 1.00001),
    "a factor": times_a_factor,
}


@pytest.mark.usefixtures("few_long_runs")
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_large_tokens_show_a_fault_beside_terms_that_cancel(name: str) -> None:
    model = to_onnx(WRONG_STEPS[name], *[X] * 4)
    for seed in (0, 3):
        report = verify_layer(model, pulled, seed=seed, is_causal=True)
        assert any("large tokens" in run.inputs for run in report.failing)


def test_a_masked_nan_stays_hidden() -> None:
    row = Row(lambda: {"attn_mask": sdpa_xp.masks.padding([3, 1])}, fixed="B")
    query, key, value = row.draw(TRACED)
    for array in (key, value):
        array[0, :, 3:], array[1, :, 1:] = np.nan, np.inf
    call = call_of("gradients", row)
    results, expected = jit(call)(query, key, value), call(query, key, value)
    for name, x in expected.items():
        assert np.isfinite(x).all()
        np.testing.assert_allclose(results[name], x, atol=2e-6)


@pytest.mark.parametrize("lengths", [{"L": 0}, {"S": 0}, {"B": 0}])
def test_empty_lengths(lengths: dict[str, int]) -> None:
    row = ROWS["is_causal"]
    arrays, call = row.draw(TRACED), call_of("gradients", row)
    sizes = FIXED | TRACED | lengths
    arrays = [x[tuple(slice(sizes[n]) for n in axes)] for x, axes in zip(arrays, row.axes, strict=True)]
    results = jit(call)(*arrays)
    for name, x in call(*arrays).items():
        np.testing.assert_array_equal(results[name], x, err_msg=name)


X = TensorSpec("float32", ("B", 2, "L", 8))


def test_no_graph_is_kept() -> None:
    kept: list[weakref.ref[Any]] = []

    def layer(x: Any) -> Any:
        kept.append(weakref.ref(x.graph.library))
        return jvp(lambda y: scaled_dot_product_attention(y, x, x), (x,), (x,))[1] + gradient(x)

    def gradient(x: Any) -> Any:
        return sdpa_xp.scaled_dot_product_attention_jvp(x, x, x, {"query": x})[1]

    to_onnx(layer, X)
    gc.collect()
    assert kept[0]() is None
