"""Gradients without a framework, against torch's autograd of the textbook and against finite differences.

The output and the weights of the same calls are held against that textbook too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from calls import tracer_of
from differentiable_calls import BAD, CALLS, FEW, HOLES, MANY, MORE_QUERIES, placed_in, shapes
from internals import cut_small, device, judge_together, namespace
from libraries import Library, generator

from sdpa_xp import attention_state, attention_weights, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def attend(library: Library, call: Call, arrays: dict[str, np.ndarray], **more: Any) -> tuple[Any, Any]:
    """Output and pullback, of arrays of the library."""
    with library.guard():
        inputs, rules = placed_in(library, call, arrays)
        return vjp(*inputs, **rules, **more)


def pull(library: Library, pullback: Any, cotangent: np.ndarray) -> dict[str, Any]:
    with library.guard():
        gradients: dict[str, Any] = pullback(library.put(cotangent))
        return gradients


@pytest.fixture
def several_tiles(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6; on JAX, which compiles each shape anew, one of all pairs."""
    if not library.name.startswith("jax"):
        cut_small(monkeypatch)


def assert_agree(library: Library, call: Call, rng: np.random.Generator, dtype: Any = F) -> None:
    """Each gradient is like its array, and as near to autograd's as the house's rule asks.

    Those of the scores are differences of those of the weights, and have roundings of their size.
    """
    arrays = autograd.arrays(call, rng, dtype)
    output, pullback = attend(library, call, arrays)
    cotangent = rng.standard_normal(output.shape).astype(dtype)
    gradients = pull(library, pullback, cotangent)
    name_of_dtype = np.dtype(dtype).name
    expected = autograd.gradients(call, arrays, cotangent)
    textbook = autograd.textbook(
        expected, lambda moved: autograd.gradients(call, moved(arrays), moved(cotangent), name_of_dtype)
    )
    size = max(1.0, np.abs(expected["weights"]).max())
    assert gradients.keys() == arrays.keys()
    for name, gradient in gradients.items():
        with library.guard():
            like = library.put(arrays[name])
        assert namespace(gradient) is library.xp
        assert (gradient.dtype, gradient.shape, device(gradient)) == (like.dtype, like.shape, device(like))
        run = library.get(gradient), expected[name], textbook[name]
        (agreement,) = judge_together([run], name_of_dtype, size)
        assert agreement.agrees, (name, agreement)


@pytest.mark.usefixtures("several_tiles")
@each_call
@pytest.mark.needs("torch")
def test_float32(library: Library, rng: np.random.Generator, call: Call) -> None:
    if library.lazy and "function" in repr(call.rules.get("bias")):
        pytest.skip("a lazy graph cannot try a function: test_refusals.py")
    assert_agree(library, call, rng)


@pytest.mark.sampled(0, on="THIN")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("call", MORE_QUERIES.values(), ids=MORE_QUERIES)
@pytest.mark.needs("torch")
def test_more_queries_than_keys(library: Library, rng: np.random.Generator, call: Call) -> None:
    test_float32(library, rng, call)


@pytest.mark.sampled(0, on="THIN")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize(
    "call",
    [*CALLS.values(), *MORE_QUERIES.values()],
    ids=[*CALLS, *(f"{name}, more queries than keys" for name in MORE_QUERIES)],
)
@pytest.mark.needs("torch")
def test_output_and_weights(library: Library, rng: np.random.Generator, call: Call) -> None:
    """What gradients are derived from, by the same formula: the call, its state, and the weights."""
    by_name = autograd.arrays(call, rng, F)
    (output, weights), (plain_output, plain_weights) = (
        autograd.output_and_weights(call, by_name, dtype) for dtype in ("float64", "float32")
    )
    with library.guard():
        inputs, rules = placed_in(library, call, by_name)
        results = [
            (scaled_dot_product_attention(*inputs, **rules), output, plain_output),
            (attention_state(*inputs, **rules).output, output, plain_output),
        ]
        if inputs[2].ndim <= max(inputs[0].ndim, inputs[1].ndim):  # else weights have the batch of no value
            results.append((attention_weights(*inputs[:2], **rules), weights, plain_weights))
    for result, expected, plain in results:
        run = library.get(result), *(x.reshape(result.shape) for x in (expected, plain))
        (agreement,) = judge_together([run], "float32", 1.0)
        assert agreement.agrees, agreement


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["grouped heads", "mask and bias", "relative", "all"])
@pytest.mark.needs("torch")
def test_dtypes(library: Library, rng: np.random.Generator, name: str, dtype: str) -> None:
    library.needs(dtype)
    assert_agree(library, CALLS[name], rng, dtype)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_is_float32_rounded_once(library: Library, rng: np.random.Generator, dtype: str) -> None:
    """The output among what is kept: in float32, or D would have the roundings of the half dtype."""
    library.needs(dtype)
    call, half = CALLS["all"], np.dtype(dtype)
    arrays = autograd.arrays(call, rng, half)
    wide = {name: x.astype(F) for name, x in arrays.items()}
    cotangent = rng.standard_normal((2, 4, 7, 5)).astype(half)
    gradients = pull(library, attend(library, call, arrays)[1], cotangent)
    expected = pull(library, attend(library, call, wide)[1], cotangent.astype(F))
    for name, gradient in gradients.items():
        rounded = library.get(expected[name]).astype(half)
        np.testing.assert_array_equal(library.get(gradient).astype(half), rounded)


@pytest.mark.needs("torch")
def test_softmax_dtype(library: Library, rng: np.random.Generator) -> None:
    """Computed in float64, the gradients are those of float64, rounded to the dtype of the arrays."""
    library.needs("float64")
    arrays = autograd.arrays(CALLS["all"], rng, F)
    call = CALLS["all"]._replace(rules={**CALLS["all"].rules, "softmax_dtype": "float64"})
    output, pullback = attend(library, call, arrays)
    cotangent = rng.standard_normal(output.shape).astype(F)
    expected = autograd.gradients(call, arrays, cotangent)
    for name, gradient in pull(library, pullback, cotangent).items():
        np.testing.assert_allclose(library.get(gradient), expected[name].astype(F), rtol=2**-22, atol=1e-12)


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("name", ["batches broadcast", "documents", "relative", "all", "dropout"])
def test_finite_differences(library: Library, rng: np.random.Generator, name: str) -> None:
    """Of the library's own output, along a random direction in each array."""
    if not library.holds("float64") or library.lazy:
        pytest.skip("in float64, and computed right away")
    call = CALLS.get(name, CALLS["softcap"])
    more = (lambda: {"dropout_p": 0.4, "rng": generator(library)}) if name == "dropout" else dict

    def loss(arrays: dict[str, np.ndarray]) -> float:
        return float((library.get(attend(library, call, arrays, **more())[0]) * cotangent).sum())

    arrays = autograd.arrays(call, rng, np.float64)
    output, pullback = attend(library, call, arrays, **more())
    cotangent = rng.standard_normal(output.shape)
    for argument, gradient in pull(library, pullback, cotangent).items():
        direction = rng.standard_normal(arrays[argument].shape)
        ahead, back = (loss(arrays | {argument: arrays[argument] + step * direction}) for step in (1e-5, -1e-5))
        slope = (library.get(gradient) * direction).sum()
        assert slope == pytest.approx((ahead - back) / 2e-5, rel=1e-6, abs=1e-7), argument


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("p", [0.4, 1.0])
@pytest.mark.needs("torch")
def test_dropout_is_that_of_the_output(library: Library, rng: np.random.Generator, p: float) -> None:
    """Each pullback drops the same weights, those that `attention_weights` shows, and draws nothing."""
    call = CALLS["causal"]
    arrays = autograd.arrays(call, rng, F)
    random = generator(library)
    output, pullback = attend(library, call, arrays, dropout_p=p, rng=random)
    with library.guard():
        ones = [library.put(np.zeros_like(arrays[name])) for name in ("query", "key")]
        kept = attention_weights(*ones, dropout_p=p, rng=generator(library))
    factor = library.get(kept) * float(MANY)
    cotangent = rng.standard_normal(output.shape).astype(F)
    expected = autograd.gradients(call, arrays, cotangent, dropped=factor.astype(np.float64))
    for _ in range(2):
        for name, gradient in pull(library, pullback, cotangent).items():
            np.testing.assert_allclose(library.get(gradient), expected[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("query", "key", "width"),
    [
        ((2, 0, 8), (2, 5, 8), 3),
        ((2, 4, 8), (2, 0, 8), 3),
        ((2, 4, 8), (2, 5, 8), 0),
        ((0, 2, 4, 8), (2, 5, 8), 3),
    ],
    ids=["L", "S", "Ev", "batch"],
)
def test_empty_axes(library: Library, query: Any, key: Any, width: int) -> None:
    library.needs_empty_arrays()
    call = Call(shapes(query, key, width, sinks=(2,), scale=(2, 1, 1)), {"is_causal": True})
    arrays = {name: np.ones(shape, F) for name, shape in call.shapes.items()}
    arrays["key"] *= math.nan  # no element of the output depends on it
    output, pullback = attend(library, call, arrays)
    gradients = pull(library, pullback, np.ones(output.shape, F))
    assert gradients.keys() == arrays.keys()
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(library.get(gradient), np.zeros_like(arrays[name]))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
def test_a_row_without_a_key_has_no_gradient(library: Library, rng: np.random.Generator) -> None:
    """Of its query, scale and bias. Keys that no query attends, and sinks of -inf, have none either."""
    more = {"scale": (4, 7, 1), "bias": (FEW, MANY), "sinks": (4,)}
    call = CALLS["boolean array with an empty row"]._replace(shapes=shapes(**more))
    arrays = autograd.arrays(call, rng, F) | {"sinks": np.asarray([0, -math.inf, 0, -math.inf], F)}
    arrays["scale"][:, 1] = math.nan
    output, pullback = attend(library, call, arrays)
    np.testing.assert_array_equal(library.get(output)[:, :, 1], 0)
    gradients = {n: library.get(x) for n, x in pull(library, pullback, np.ones(output.shape, F)).items()}
    nothing = (
        gradients["query"][:, :, 1],
        gradients["scale"][:, 1],
        gradients["bias"][~HOLES],
        gradients["sinks"][[1, 3]],
    )
    for gradient in nothing:
        np.testing.assert_array_equal(gradient, 0)
    unseen = ~HOLES.any(axis=0)
    for name in ("key", "value"):
        assert np.all(np.any(gradients[name] != 0, axis=-1) == ~unseen)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("name", ["query", "key", "value", "cotangent"])
def test_what_is_masked_adds_nothing(library: Library, rng: np.random.Generator, name: str) -> None:
    """NaN and inf in one row of an input show in what attends it or is attended by it, and nowhere else."""
    if library.lazy:
        pytest.skip("a lazy graph holds this for padding: test_padding_adds_nothing")
    call = CALLS["all"]
    arrays = autograd.arrays(call, rng, F)
    _, pullback = attend(library, call, arrays)
    cotangent = rng.standard_normal((2, 4, 7, 5)).astype(F)
    clean = {n: library.get(x) for n, x in pull(library, pullback, cotangent).items()}

    allowed = HOLES & np.tri(FEW, MANY, dtype=bool)
    for bad in BAD:
        wrong, other = {n: x.copy() for n, x in arrays.items()}, cotangent.copy()
        rows = np.zeros(7, bool)
        if name in ("query", "cotangent"):  # the row attends some keys; another, without any, is bad as well
            (other if name == "cotangent" else wrong[name])[0, 1, [1, 5]] = bad
            rows[5] = True
        else:
            wrong[name][0, 0, 3] = bad
            rows = allowed[:, 3]
        _, pullback = attend(library, call, wrong)
        gradients = {n: library.get(x) for n, x in pull(library, pullback, other).items()}
        heads = [1] if name in ("query", "cotangent") else [0, 1]  # of queries
        attended = allowed[rows].any(axis=0)

        expected = {n: np.zeros(x.shape, bool) for n, x in clean.items()}
        expected["query"][np.ix_([0], heads, rows)] = True
        for argument in ("key", "value"):
            expected[argument][np.ix_([0], [0], attended)] = True
        for n in ("query", "key", "value"):
            spoilt = expected[n]
            np.testing.assert_array_equal(gradients[n][~spoilt], clean[n][~spoilt], err_msg=f"{n}, {bad}")
        assert not np.isfinite(gradients["query"][expected["query"]]).any()
        if name != "value":  # whose own gradient does not know it
            assert not np.isfinite(gradients["value"][expected["value"]]).any()
        np.testing.assert_array_equal(gradients["scale"][2:], clean["scale"][2:])
        assert np.isfinite(gradients["bias"][:, ~allowed]).all()


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_padding_adds_nothing(library: Library, rng: np.random.Generator) -> None:
    """Also in a lazy graph: keys and values that no query attends may be NaN."""
    call = CALLS["padding"]
    arrays = autograd.arrays(call, rng, F)
    cotangent = rng.standard_normal((2, 4, 7, 5)).astype(F)
    clean = pull(library, attend(library, call, arrays)[1], cotangent)
    wrong = {n: x.copy() for n, x in arrays.items()}
    wrong["key"][1, :, MANY // 2 :], wrong["value"][1, :, MANY // 2 :] = math.nan, math.inf
    gradients = pull(library, attend(library, call, wrong)[1], cotangent)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(library.get(gradient), library.get(clean[name]), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.needs("torch")
def test_inside_a_jit(library: Library, rng: np.random.Generator) -> None:
    tracer = tracer_of(library)
    call = CALLS["all"]
    arrays = autograd.arrays(call, rng, F)
    cotangent = rng.standard_normal((2, 4, 7, 5)).astype(F)

    def both(arrays: dict[str, Any], cotangent: Any, holes: Any) -> Any:
        inputs = [arrays[name] for name in autograd.INPUTS]
        rules = autograd.keywords(call, arrays) | {"attn_mask": holes}
        output, pullback = vjp(*inputs, **rules)
        return output, pullback(cotangent)

    with library.guard():
        placed = {name: library.put(x) for name, x in arrays.items()}
        _, result = tracer(both)(placed, library.put(cotangent), library.put(HOLES))
    expected = autograd.gradients(call, arrays, cotangent)
    for name, gradient in result.items():
        np.testing.assert_allclose(library.get(gradient), expected[name], rtol=0, atol=2e-5)


def test_a_jit_of_the_pullback_alone(library: Library, rng: np.random.Generator) -> None:
    """What is known of the inputs is used; nothing is read of the cotangent."""
    library.needs_jit()
    call = CALLS["all"]
    arrays = autograd.arrays(call, rng, F)
    cotangent = rng.standard_normal((2, 4, 7, 5)).astype(F)
    _, pullback = attend(library, call, arrays)
    with library.guard():
        result = library.jit(pullback)(library.put(cotangent))
    for name, gradient in pull(library, pullback, cotangent).items():
        np.testing.assert_allclose(library.get(result[name]), library.get(gradient), rtol=0, atol=1e-5)


def by_the_library(library: Library, forward: Callable[..., Any], arrays: list[Any], cotangent: Any) -> Any:
    """Return the gradients of the library's own framework, through the forward pass."""
    base = library.name.split("-")[0]
    with library.guard():
        if base == "torch":
            import torch

            leaves = [x.requires_grad_() for x in arrays]
            return torch.autograd.grad(forward(*leaves), leaves, cotangent)
        if base == "jax":
            import jax

            return jax.vjp(forward, *arrays)[1](cotangent)
        if base == "mlx":
            import mlx.core as mx

            return mx.vjp(forward, arrays, [cotangent])[1]
    pytest.skip("the library does not differentiate")


@pytest.mark.leaves_out("jax-debug", "torch-inference")
def test_against_the_library_that_differentiates(library: Library, rng: np.random.Generator) -> None:
    call = CALLS["all"]
    by_name = autograd.arrays(call, rng, F)
    cotangent = rng.standard_normal((2, 4, 7, 5)).astype(F)
    rules = {**call.rules, "implementation": "xp"}

    def forward(*arrays: Any) -> Any:
        placed = dict(zip(by_name, arrays, strict=True))
        inputs = [placed.pop(name) for name in autograd.INPUTS]
        return scaled_dot_product_attention(*inputs, **placed, **rules | {"attn_mask": library.put(HOLES)})

    arrays = [library.put(x) for x in by_name.values()]
    derived = by_the_library(library, forward, arrays, library.put(cotangent))
    gradients = pull(library, attend(library, call, by_name)[1], cotangent)
    for name, expected in zip(by_name, derived, strict=True):
        np.testing.assert_allclose(library.get(gradients[name]), library.get(expected), rtol=0, atol=2e-5)


@pytest.mark.leaves_out("torch-inference")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("score", [-1e9, float(np.finfo(F).min), 1e9])
@pytest.mark.parametrize("source", ["bias", "products"])
def test_rows_of_large_scores(library: Library, score: float, source: str) -> None:
    """All keys weigh alike, and so do their gradients, with the kernel that is a default too."""
    keys, size = 18, 2.0**18
    query = np.full((1, 2, 5, 8), math.copysign(size, score) if source == "products" else 1.0, F)
    key = np.full((1, 2, keys, 8), size if source == "products" else 1.0, F)
    value, bias = np.ones((1, 2, keys, 8), F), np.full((5, keys), score, F)

    def forward(value: Any) -> Any:
        rules = {"bias": library.put(bias)} if source == "bias" else {}
        return scaled_dot_product_attention(library.put(query), library.put(key), value, **rules)

    (derived,) = by_the_library(library, forward, [library.put(value)], library.put(np.ones((1, 2, 5, 8), F)))
    np.testing.assert_allclose(library.get(derived), 5 / keys, rtol=1e-5)
