"""The derivative of the pullback along a direction, against double backward of the textbook by torch."""

from __future__ import annotations

import math
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from calls import tracer_of
from differentiable_calls import BAD, CALLS, FEW, HOLES, MANY, placed_in, shapes
from internals import cut_small, judge_together, override
from libraries import LIBRARIES, Library, generator

from sdpa_xp import scaled_dot_product_attention_jvp
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(F)
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def several_tiles(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6; on JAX, which compiles each shape anew, one of all pairs."""
    if not library.name.startswith("jax"):
        cut_small(monkeypatch)


class Drawn:
    """Arrays of a call, a direction, and a cotangent with its tangent."""

    def __init__(self, call: Call, rng: np.random.Generator, dtype: Any = F) -> None:
        self.call = call
        self.arrays, self.tangents = (autograd.arrays(call, rng, dtype) for _ in range(2))
        output, _ = vjp(*(self.arrays[n] for n in autograd.INPUTS), **autograd.keywords(call, self.arrays))
        self.cotangents = tuple(rng.standard_normal((2, *output.shape)).astype(dtype))


def run(library: Library, drawn: Drawn, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients and their derivatives, of arrays of the library, as NumPy's."""
    if library.lazy:
        pytest.skip("refused: test_arrays_in_chunks")
    with library.guard():
        inputs, rules = placed_in(library, drawn.call, drawn.arrays)
        _, pullback = vjp(*inputs, **rules, **more)
        moved = {name: library.put(x) for name, x in drawn.tangents.items()}
        first, second = map(library.put, drawn.cotangents)
        results = pullback.jvp(first, moved, second)
    gradients, derivatives = ({n: library.get(x) for n, x in part.items()} for part in results)
    return gradients, derivatives


def assert_agree(library: Library, drawn: Drawn, dtype: Any = F) -> None:
    gradients, derivatives = run(library, drawn)
    assert gradients.keys() == derivatives.keys() == drawn.arrays.keys()
    kind = np.dtype(dtype).name
    expected = autograd.gradients(drawn.call, drawn.arrays, drawn.cotangents[0])
    inputs = drawn.arrays, drawn.tangents, drawn.cotangents
    exact = autograd.second_order(drawn.call, *inputs)
    textbook = autograd.textbook(exact, lambda moved: autograd.second_order(drawn.call, *moved(inputs), kind))
    for name, array in drawn.arrays.items():
        assert (derivatives[name].shape, derivatives[name].dtype) == (array.shape, array.dtype)
        size = max(1.0, np.abs(expected[name]).max())
        eps = 1e-12 if kind == "float64" else 2e-5 if kind == "float32" else 3e-2
        np.testing.assert_allclose(gradients[name].astype("f8"), expected[name], rtol=0, atol=eps * size)
    runs = [(derivatives[name], exact[name], textbook[name]) for name in drawn.arrays]
    size = max(1.0, *(np.abs(x).max() for x in exact.values()))
    for name, agreement in zip(drawn.arrays, judge_together(runs, kind, size), strict=True):
        assert agreement.agrees, (name, agreement)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("several_tiles")
@each_call
@pytest.mark.needs("torch")
def test_float32(library: Library, rng: np.random.Generator, call: Call) -> None:
    assert_agree(library, Drawn(call, rng))


@each_call
@pytest.mark.parametrize("has_threads", [False, True], ids=["one thread", "threads"])
@pytest.mark.needs("torch")
def test_float64(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, call: Call, has_threads: bool
) -> None:
    """To the last digits, with the queries divided between threads or not."""
    numpy = LIBRARIES["numpy"][1]()
    drawn = Drawn(call, rng, np.float64)
    cut_small(monkeypatch)
    if has_threads:
        override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
        override(monkeypatch, "SMALLEST_SIDE", 2)
        monkeypatch.setattr("os.cpu_count", lambda: 64)
    inputs, rules = placed_in(numpy, call, drawn.arrays)
    gradients, derivatives = run(numpy, drawn)
    first = autograd.gradients(call, drawn.arrays, drawn.cotangents[0])
    second = autograd.second_order(call, drawn.arrays, drawn.tangents, drawn.cotangents)
    pairs = ((vjp(*inputs, **rules)[1](drawn.cotangents[0]), first), (gradients, first), (derivatives, second))
    for computed, expected in pairs:
        for name, x in computed.items():
            exact = expected[name]
            np.testing.assert_allclose(x, exact, rtol=0, atol=1e-12 * max(1, np.abs(exact).max()))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.needs("torch")
def test_dtypes(library: Library, rng: np.random.Generator, dtype: str) -> None:
    library.needs(dtype)
    assert_agree(library, Drawn(CALLS["all"], rng, np.dtype(dtype)), dtype)


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("name", ["batches broadcast", "softcap", "relative", "all"])
def test_finite_differences_of_the_pullback(rng: np.random.Generator, name: str) -> None:
    """With dropout: each pullback drops the same weights."""
    numpy = LIBRARIES["numpy"][1]()
    drawn = Drawn(CALLS[name], rng, np.float64)

    def gradients(step: float) -> dict[str, np.ndarray]:
        there = {n: x + step * drawn.tangents[n] for n, x in drawn.arrays.items()}
        inputs, rules = placed_in(numpy, drawn.call, there)
        _, pullback = vjp(*inputs, **rules, dropout_p=0.3, rng=generator(numpy))
        result: dict[str, np.ndarray] = pullback(drawn.cotangents[0] + step * drawn.cotangents[1])
        return result

    ahead, back = gradients(1e-5), gradients(-1e-5)
    _, derivatives = run(numpy, drawn, dropout_p=0.3, rng=generator(numpy))
    for n, x in derivatives.items():
        np.testing.assert_allclose(x, (ahead[n] - back[n]) / 2e-5, rtol=1e-6, atol=1e-6, err_msg=n)


def test_double_backward_is_a_jvp_and_symmetric(rng: np.random.Generator) -> None:
    """<u, H t> = <t, H u>, and the slope with the cotangent is the derivative of the output."""
    drawn, other = (Drawn(CALLS["all"], rng, np.float64) for _ in range(2))
    inputs, rules = placed_in(LIBRARIES["numpy"][1](), drawn.call, drawn.arrays)
    _, pullback = vjp(*inputs, **rules)
    t, u, c = drawn.tangents, other.tangents, drawn.cotangents[0]
    gradients, by_t = pullback.jvp(c, t)
    _, by_u = pullback.jvp(c, u)
    left, right = (sum((x[n] * y[n]).sum() for n in t) for x, y in ((u, by_t), (t, by_u)))
    assert left == pytest.approx(right, rel=1e-10)
    _, tangent = scaled_dot_product_attention_jvp(*inputs, u, **rules)
    assert sum((u[n] * gradients[n]).sum() for n in u) == pytest.approx((c * tangent).sum(), rel=1e-10)


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("of_tangent", [False, True], ids=["arrays", "tangents"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_masked_adds_nothing(
    library: Library, rng: np.random.Generator, name: str, of_tangent: bool
) -> None:
    """NaN and inf in a query without keys, and in a key that no query attends to, have no effect."""
    drawn = Drawn(CALLS["all"], rng)
    clean, clean_derivatives = run(library, drawn)
    unseen = ~(HOLES & np.tri(FEW, MANY, dtype=bool)).any(axis=0)
    for bad in BAD:
        where = drawn.tangents if of_tangent else drawn.arrays
        original = where[name].copy()
        where[name][:, :, 1 if name == "query" else unseen] = bad
        gradients, derivatives = run(library, drawn)
        where[name][...] = original
        for n in clean:
            for x, y in ((gradients, clean), (derivatives, clean_derivatives)):
                np.testing.assert_allclose(x[n], y[n], rtol=0, atol=1e-5 * np.abs(y[n]).max(), err_msg=n)
        np.testing.assert_array_equal(derivatives["query"][:, :, 1], 0)
        np.testing.assert_array_equal(derivatives["key"][:, :, unseen], 0)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_inside_a_jit(library: Library, rng: np.random.Generator) -> None:
    tracer = tracer_of(library)
    drawn = Drawn(CALLS["softcap"], rng)
    expected = run(library, drawn)[1]

    def derivatives(arrays: dict[str, Any], tangents: dict[str, Any], first: Any, second: Any) -> Any:
        _, pullback = vjp(*(arrays[n] for n in autograd.INPUTS), softcap=1.5)
        return pullback.jvp(first, tangents, second)[1]

    with library.guard():
        parts = [{n: library.put(x) for n, x in part.items()} for part in (drawn.arrays, drawn.tangents)]
        result = tracer(derivatives)(*parts, *map(library.put, drawn.cotangents))
    for n, x in result.items():
        np.testing.assert_allclose(library.get(x), expected[n], rtol=0, atol=2e-5 * np.abs(expected[n]).max())


@pytest.mark.parametrize(
    ("query", "key", "width"), [((2, 0, 8), (2, 5, 8), 3), ((2, 4, 8), (2, 0, 8), 3), ((2, 4, 8), (2, 5, 8), 0)]
)
def test_empty_axes(query: Any, key: Any, width: int) -> None:
    arrays = {name: np.ones(shape, F) for name, shape in shapes(query, key, width).items()}
    output, pullback = vjp(*arrays.values())
    for part in pullback.jvp(np.ones_like(output), arrays):
        for name, x in part.items():
            np.testing.assert_array_equal(x, np.zeros_like(arrays[name]))
            x[...] = 1  # the caller's own, which no other result shares


def test_the_textbook_of_several_draws() -> None:
    """A small sum of large numbers may be exact by luck; in another order it is not, and has to agree."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(200):
        x = rng.standard_normal(30).astype(F)
        exact = {"": x.astype(np.float64).sum(keepdims=True)}
        textbook = autograd.textbook(exact, lambda moved, x=x: {"": moved(x).sum(keepdims=True)})
        result = np.add.accumulate(rng.permutation(x))[-1:]
        (agreement,) = judge_together([(result, exact[""], textbook[""])], "float32")
        shares.append(agreement.share)
        result += F(4 * agreement.bound)
        assert not judge_together([(result, exact[""], textbook[""])], "float32")[0].agrees
    assert max(shares) < 0.75


def test_repr() -> None:
    words = "<pullback of scaled_dot_product_attention_vjp: (2, 4, 8) to query, key, value>"
    assert repr(vjp(X, X, X)[1]) == words


def test_large_common_change(rng: np.random.Generator) -> None:
    """If all scores of a row change alike, no gradient changes."""
    call = Call(shapes(bias=(4, FEW, MANY), sinks=(4,)), {"attn_mask": HOLES})
    drawn = Drawn(call, rng)
    drawn.tangents = {n: np.zeros_like(x) for n, x in drawn.arrays.items()}
    drawn.tangents["bias"] += F(2.0**16)
    drawn.tangents["sinks"] += F(2.0**16)
    drawn.cotangents = (drawn.cotangents[0], 0 * drawn.cotangents[1])
    _, derivatives = run(LIBRARIES["numpy"][1](), drawn)
    for x in derivatives.values():
        np.testing.assert_allclose(x, 0, atol=2.0**16 * 2.0**-20)
    assert math.isfinite(sum(float(x.sum()) for x in derivatives.values()))
