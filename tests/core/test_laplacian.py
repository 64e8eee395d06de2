"""The sum of second derivatives along directions, against torch's forward over forward mode of the textbook."""

from __future__ import annotations

import math
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from differentiable_calls import BAD, CALLS, FEW, HOLES, MANY, placed_in, shapes
from internals import cut_small, device, judge_together
from libraries import LIBRARIES, Library, generator

from sdpa_xp import scaled_dot_product_attention_jvp
from sdpa_xp import scaled_dot_product_attention_laplacian as laplacian

F = np.float32
DIRECTIONS = 3
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(F)


@pytest.fixture
def several_tiles(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6; on JAX, which compiles each shape anew, one of all pairs."""
    if not library.name.startswith("jax"):
        cut_small(monkeypatch)


class Drawn:
    """Arrays of a call, directions, and laplacians of the arrays."""

    def __init__(self, call: Call, rng: np.random.Generator, dtype: Any = F) -> None:
        self.call = call
        self.arrays, self.laplacians = (autograd.arrays(call, rng, dtype) for _ in range(2))
        self.tangents = {
            name: rng.standard_normal((DIRECTIONS, *x.shape)).astype(dtype) for name, x in self.arrays.items()
        }


def run(library: Library, drawn: Drawn, **more: Any) -> list[Any]:
    """Output, tangents and laplacian, of arrays of the library, as NumPy's."""
    if library.lazy:
        pytest.skip("refused: test_arrays_in_chunks")
    with library.guard():
        inputs, rules = placed_in(library, drawn.call, drawn.arrays)
        moved, bends = (
            {n: library.put(x) for n, x in part.items()} for part in (drawn.tangents, drawn.laplacians)
        )
        results = laplacian(*inputs, moved, laplacians=bends, **rules, **more)
    output, *derivatives = results
    for x in derivatives:
        assert (x.dtype, device(x)) == (output.dtype, device(output))
    return [library.get(x) for x in results]


def assert_agree(library: Library, drawn: Drawn, dtype: Any) -> None:
    kind = np.dtype(dtype).name
    _, *results = run(library, drawn)
    inputs = drawn.arrays, drawn.tangents, drawn.laplacians
    exact = autograd.laplacian(drawn.call, *inputs)
    textbook = autograd.textbook(
        dict(enumerate(exact)),
        lambda moved: dict(enumerate(autograd.laplacian(drawn.call, *moved(inputs), kind))),
    )
    for result, x in zip(results, exact, strict=True):
        assert result.shape == x.shape
    runs = list(zip(results, exact, textbook.values(), strict=True))
    for agreement in judge_together(runs, kind, max(1.0, *(np.abs(x).max() for x in exact))):
        assert agreement.agrees, agreement


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.needs("torch")
def test_float64(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """To the last digits."""
    cut_small(monkeypatch)
    drawn = Drawn(call, rng, np.float64)
    _, *results = run(LIBRARIES["numpy"][1](), drawn)
    expected = autograd.laplacian(call, drawn.arrays, drawn.tangents, drawn.laplacians)
    for result, x in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, x, rtol=0, atol=1e-13 * max(1, np.abs(x).max()))


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("name", ["batches broadcast", "relative", "scale of each query", "all"])
@pytest.mark.needs("torch")
def test_float32(library: Library, rng: np.random.Generator, name: str) -> None:
    assert_agree(library, Drawn(CALLS[name], rng), F)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.needs("torch")
def test_dtypes(library: Library, rng: np.random.Generator, dtype: str) -> None:
    library.needs(dtype)
    assert_agree(library, Drawn(CALLS["all"], rng, np.dtype(dtype)), dtype)


@pytest.mark.parametrize("name", ["softcap", "sinks of each entry, and an empty row"])
def test_finite_differences_of_the_tangent(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With dropout: all results drop the same weights."""
    cut_small(monkeypatch)
    numpy = LIBRARIES["numpy"][1]()
    drawn = Drawn(CALLS[name], rng, np.float64)

    def slope(arrays: dict[str, Any], direction: dict[str, Any]) -> np.ndarray:
        inputs, rules = placed_in(numpy, drawn.call, arrays)
        more = {"dropout_p": 0.3, "rng": generator(numpy)}
        result: np.ndarray = scaled_dot_product_attention_jvp(*inputs, direction, **rules, **more)[1]
        return result

    expected = slope(drawn.arrays, drawn.laplacians)
    _, tangents, computed = run(numpy, drawn, dropout_p=0.3, rng=generator(numpy))
    for n in range(DIRECTIONS):
        direction = {name: x[n] for name, x in drawn.tangents.items()}
        np.testing.assert_allclose(tangents[n], slope(drawn.arrays, direction), rtol=0, atol=1e-13)
        ahead, back = ({m: x + h * direction[m] for m, x in drawn.arrays.items()} for h in (1e-5, -1e-5))
        expected = expected + (slope(ahead, direction) - slope(back, direction)) / 2e-5
    np.testing.assert_allclose(computed, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.needs("torch")
def test_some_inputs_alone(rng: np.random.Generator) -> None:
    """One input moves, and another has a laplacian."""
    numpy, call = LIBRARIES["numpy"][1](), CALLS["all"]
    for moved, bent in (("value", "query"), ("key", "sinks"), ("scale", "value"), ("sinks", "bias")):
        drawn = Drawn(call, rng, np.float64)
        zeros = {n: np.zeros_like(x) for n, x in drawn.arrays.items()}
        tangents, laplacians = {moved: drawn.tangents[moved]}, {bent: drawn.laplacians[bent]}
        all_tangents = {n: np.stack([x] * DIRECTIONS) for n, x in zeros.items()} | tangents
        expected = autograd.laplacian(call, drawn.arrays, all_tangents, zeros | laplacians)
        drawn.tangents, drawn.laplacians = tangents, laplacians
        for result, x in zip(run(numpy, drawn)[1:], expected, strict=True):
            np.testing.assert_allclose(result, x, rtol=0, atol=1e-13 * max(1, np.abs(x).max()))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("where", ["arrays", "tangents", "laplacians"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_masked_adds_nothing(library: Library, rng: np.random.Generator, name: str, where: str) -> None:
    """NaN and inf in a query without keys, and in a key that no query attends to, have no effect."""
    drawn = Drawn(CALLS["all"], rng)
    clean = run(library, drawn)
    unseen = ~(HOLES & np.tri(FEW, MANY, dtype=bool)).any(axis=0)
    for bad in BAD:
        array = getattr(drawn, where)[name]
        original = array.copy()
        array[..., 1 if name == "query" else unseen, :] = bad
        for result, x in zip(run(library, drawn), clean, strict=True):
            np.testing.assert_allclose(result, x, rtol=0, atol=1e-5 * np.abs(x).max())
            np.testing.assert_array_equal(result[..., 1, :], 0)
        array[...] = original


def test_large_common_change(rng: np.random.Generator) -> None:
    """If all scores of a row change alike, the output does not move."""
    call = Call(shapes(bias=(4, FEW, MANY), sinks=(4,)), {"attn_mask": HOLES})
    drawn = Drawn(call, rng)
    drawn.tangents = {n: np.full_like(drawn.tangents[n], 2.0**10) for n in ("bias", "sinks")}
    drawn.laplacians = {n: np.full_like(drawn.laplacians[n], 2.0**16) for n in ("bias", "sinks")}
    for x in run(LIBRARIES["numpy"][1](), drawn)[1:]:
        np.testing.assert_allclose(x, 0, atol=2.0**16 * 2.0**-20)


def test_a_sink_of_minus_infinity(rng: np.random.Generator) -> None:
    """It is none, however it would change."""
    drawn = Drawn(CALLS["sinks"], rng)
    drawn.arrays["sinks"][1] = -math.inf
    drawn.tangents["sinks"][:, 1] = drawn.laplacians["sinks"][1] = math.nan
    results = run(LIBRARIES["numpy"][1](), drawn)
    for part in (drawn.arrays, drawn.tangents, drawn.laplacians):
        del part["sinks"]
    for x, y in zip(results, run(LIBRARIES["numpy"][1](), drawn), strict=True):
        np.testing.assert_allclose(x[..., 1, :, :], y[..., 1, :, :], rtol=0, atol=1e-5 * np.abs(y).max())


def test_inside_a_jit(library: Library, rng: np.random.Generator) -> None:
    library.needs_jit()
    drawn = Drawn(CALLS["softcap"], rng)
    _, _, expected = run(library, drawn)

    def compute(arrays: Any, tangents: Any, bends: Any) -> Any:
        inputs = (arrays[n] for n in autograd.INPUTS)
        return laplacian(*inputs, tangents, laplacians=bends, softcap=1.5)[2]

    with library.guard():
        parts = (drawn.arrays, drawn.tangents, drawn.laplacians)
        result = library.jit(compute)(*({n: library.put(x) for n, x in part.items()} for part in parts))
    np.testing.assert_allclose(library.get(result), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("query", "key", "width"), [((2, 0, 8), (2, 5, 8), 3), ((2, 4, 8), (2, 0, 8), 3), ((2, 4, 8), (2, 5, 8), 0)]
)
def test_empty_axes(query: Any, key: Any, width: int) -> None:
    arrays = [np.ones(shape, F) for shape in shapes(query, key, width).values()]
    results = laplacian(*arrays, {"key": np.ones((2, *key), F)})
    for x, shape in zip(results, [(), (2,), ()], strict=True):
        np.testing.assert_array_equal(x, np.zeros((*shape, *query[:-1], width)))


def test_many_tiles_in_threads(rng: np.random.Generator) -> None:
    """Of the query alone, a direction is a second difference."""
    query, key, value, moved = rng.standard_normal((4, 2, 300, 8))
    _, _, computed = laplacian(query, key, value, {"query": moved[None]}, is_causal=True)
    ahead, back = (
        scaled_dot_product_attention_jvp(query + h * moved, key, value, {"query": moved}, is_causal=True)[1]
        for h in (1e-5, -1e-5)
    )
    np.testing.assert_allclose(computed, (ahead - back) / 2e-5, rtol=1e-6, atol=1e-6)
    assert math.isfinite(computed.sum())
