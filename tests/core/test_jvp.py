"""The derivative along a direction, against torch's forward mode of the textbook and finite differences."""

from __future__ import annotations

import math
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from differentiable_calls import BAD, CALLS, FEW, HOLES, MANY, MORE_QUERIES, placed_in, shapes
from internals import cut_small, device, judge_together, namespace
from libraries import Library, generator

from sdpa_xp import attention_weights, biases, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_jvp as jvp

F = np.float32
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def several_tiles(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6; on JAX, which compiles each shape anew, one of all pairs."""
    if not library.name.startswith("jax"):
        cut_small(monkeypatch)


def push(
    library: Library, call: Call, arrays: dict[str, Any], tangents: dict[str, Any], **more: Any
) -> tuple[Any, Any]:
    """Output and tangent, of arrays of the library."""
    if library.lazy:
        pytest.skip("refused: tests/refusals/chunks.txt")
    with library.guard():
        inputs, rules = placed_in(library, call, arrays)
        moved = {name: library.put(x) for name, x in tangents.items()}
        output, tangent = jvp(*inputs, moved, **rules, **more)
        return output, tangent


def draw(call: Call, rng: np.random.Generator, dtype: Any = F) -> tuple[dict[str, Any], dict[str, Any]]:
    return autograd.arrays(call, rng, dtype), autograd.arrays(call, rng, dtype)


def assert_agree(library: Library, call: Call, rng: np.random.Generator, dtype: Any = F) -> None:
    arrays, tangents = draw(call, rng, dtype)
    output, tangent = push(library, call, arrays, tangents)
    assert namespace(tangent) is library.xp
    assert (tangent.dtype, tangent.shape, device(tangent)) == (output.dtype, output.shape, device(output))
    with library.guard():
        inputs, rules = placed_in(library, call, arrays)
        plain = scaled_dot_product_attention(*inputs, **rules, implementation="xp")
    kind = np.dtype(dtype).name
    eps = {"float64": 1e-14, "float32": 4e-6}.get(kind, 2e-2)
    np.testing.assert_allclose(*(library.get(x).astype("f8") for x in (output, plain)), rtol=0, atol=eps)
    expected = autograd.jvp(call, arrays, tangents)
    textbook = autograd.textbook(
        {"": expected}, lambda moved: {"": autograd.jvp(call, moved(arrays), moved(tangents), dtype=kind)}
    )
    size = max(1.0, np.abs(expected).max())
    (agreement,) = judge_together([(library.get(tangent), expected, textbook[""])], kind, size)
    assert agreement.agrees, agreement


@pytest.mark.usefixtures("several_tiles")
@each_call
@pytest.mark.needs("torch")
def test_float32(library: Library, rng: np.random.Generator, call: Call) -> None:
    assert_agree(library, call, rng)


@pytest.mark.sampled(0, on="THIN")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("call", MORE_QUERIES.values(), ids=MORE_QUERIES)
@pytest.mark.needs("torch")
def test_more_queries_than_keys(library: Library, rng: np.random.Generator, call: Call) -> None:
    assert_agree(library, call, rng)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["grouped heads", "mask and bias", "relative", "all"])
@pytest.mark.needs("torch")
def test_dtypes(library: Library, rng: np.random.Generator, name: str, dtype: str) -> None:
    library.needs(dtype)
    assert_agree(library, CALLS[name], rng, dtype)


@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["without a maximum", "too large for that"])
@pytest.mark.needs("torch")
def test_many_tiles(rng: np.random.Generator, scale: float) -> None:
    """In threads, and with the softmax without a maximum: see `_Shortcut`."""
    call = Call(
        shapes((4, 300, 8), (2, 600, 8)), {"scale": scale, "is_causal": True}, allowed=lambda i, j: j <= i
    )
    arrays, tangents = draw(call, rng, np.float64)
    _, tangent = jvp(*(arrays[name] for name in autograd.INPUTS), tangents, **call.rules)
    expected = autograd.jvp(call, arrays, tangents)
    np.testing.assert_allclose(tangent, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("name", ["batches broadcast", "documents", "relative", "all", "dropout"])
def test_finite_differences(library: Library, rng: np.random.Generator, name: str) -> None:
    """Of the library's own output, along a random direction of each array alone, and of all of them."""
    library.needs("float64")
    call = CALLS.get(name, CALLS["softcap"])
    more = (lambda: {"dropout_p": 0.4, "rng": generator(library)}) if name == "dropout" else dict
    arrays, direction = draw(call, rng, np.float64)

    def output(step: float, moved: dict[str, Any]) -> np.ndarray:
        there = arrays | {argument: arrays[argument] + step * x for argument, x in moved.items()}
        with library.guard():
            inputs, rules = placed_in(library, call, there)
            result = scaled_dot_product_attention(*inputs, **rules, **more(), implementation="xp")
        return library.get(result)

    total = np.zeros(())
    for argument, x in direction.items():
        slope = (output(1e-5, {argument: x}) - output(-1e-5, {argument: x})) / 2e-5
        _, tangent = push(library, call, arrays, {argument: x}, **more())
        np.testing.assert_allclose(library.get(tangent), slope, rtol=1e-6, atol=1e-8, err_msg=argument)
        total = total + library.get(tangent)
    _, tangent = push(library, call, arrays, direction, **more())
    np.testing.assert_allclose(library.get(tangent), total, rtol=0, atol=1e-12)


@pytest.mark.needs("torch")
def test_dropout_is_that_of_the_output(library: Library, rng: np.random.Generator) -> None:
    call = CALLS["causal"]
    arrays, tangents = draw(call, rng)
    output, tangent = push(library, call, arrays, tangents, dropout_p=0.4, rng=generator(library))
    with library.guard():
        inputs, _ = placed_in(library, call, arrays)
        zeros = [library.put(np.zeros_like(arrays[name])) for name in ("query", "key")]
        kept = attention_weights(*zeros, dropout_p=0.4, rng=generator(library))
        same = scaled_dot_product_attention(*inputs, is_causal=True, dropout_p=0.4, rng=generator(library))
    np.testing.assert_allclose(library.get(output), library.get(same), rtol=0, atol=4e-6)
    dropped = library.get(kept).astype(np.float64) * MANY
    expected = autograd.jvp(call, arrays, tangents, dropped=dropped)
    np.testing.assert_allclose(library.get(tangent), expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.usefixtures("several_tiles")
def test_scores_that_change_alike(library: Library, rng: np.random.Generator) -> None:
    """The output does not change, nor do large numbers of opposite signs leave their roundings in it."""
    call = Call(shapes(bias=(4, FEW, MANY), sinks=(4,)), {"attn_mask": HOLES})
    arrays = autograd.arrays(call, rng, F)
    tangents = {name: np.full_like(arrays[name], 2.0**16) for name in ("bias", "sinks")}
    _, tangent = push(library, call, arrays, tangents)
    np.testing.assert_allclose(library.get(tangent), 0, atol=2.0**16 * 2.0**-21)


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
    for result in push(library, call, arrays, arrays):
        np.testing.assert_array_equal(library.get(result), np.zeros((*query[:-1], width)))


def test_no_tangent_is_none(library: Library, rng: np.random.Generator) -> None:
    arrays, _ = draw(CALLS["all"], rng)
    output, tangent = push(library, CALLS["all"], arrays, {})
    np.testing.assert_array_equal(library.get(tangent), np.zeros(output.shape))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("of_tangent", [False, True], ids=["arrays", "tangents"])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
def test_what_is_masked_adds_nothing(
    library: Library, rng: np.random.Generator, name: str, of_tangent: bool
) -> None:
    """NaN and inf show in the rows that attend to them, and nowhere else; rows without a key are 0."""
    call = CALLS["all"]
    arrays, tangents = draw(call, rng)
    clean = library.get(push(library, call, arrays, tangents)[1])
    allowed = HOLES & np.tri(FEW, MANY, dtype=bool)
    for bad in BAD:
        wrong = {n: x.copy() for n, x in (tangents if of_tangent else arrays).items()}
        heads, rows = [0, 1], allowed[:, 3]
        if name == "query":
            wrong[name][0, 1, [1, 5]] = bad  # query 1 attends to no key
            heads, rows = [1], np.arange(FEW) == 5
        elif name == "bias":
            wrong[name][:, ~allowed], rows = bad, np.zeros(FEW, bool)
        else:
            wrong[name][0, 0, 3] = bad
        both = (arrays, wrong) if of_tangent else (wrong, tangents)
        tangent = library.get(push(library, call, *both)[1])
        spoilt = np.zeros(clean.shape, bool)
        spoilt[np.ix_([0], heads, rows)] = True
        np.testing.assert_array_equal(tangent[:, :, 1], 0)
        np.testing.assert_allclose(tangent[~spoilt], clean[~spoilt], rtol=0, atol=4e-6 * np.abs(clean).max())
        assert not np.isfinite(tangent[spoilt]).any()


def test_padding_adds_nothing(library: Library, rng: np.random.Generator) -> None:
    call = CALLS["padding"]
    arrays, tangents = draw(call, rng)
    clean = library.get(push(library, call, arrays, tangents)[1])
    for where in (arrays, tangents):
        wrong = {n: x.copy() for n, x in where.items()}
        wrong["key"][1, :, MANY // 2 :], wrong["value"][1, :, MANY // 2 :] = math.nan, math.inf
        both = (wrong, tangents) if where is arrays else (arrays, wrong)
        tangent = library.get(push(library, call, *both)[1])
        np.testing.assert_allclose(tangent, clean, rtol=0, atol=4e-6 * np.abs(clean).max())


@pytest.mark.needs("torch")
def test_inside_a_jit(library: Library, rng: np.random.Generator) -> None:
    library.needs_jit()
    call = CALLS["all"]
    arrays, tangents = draw(call, rng)

    def both(arrays: dict[str, Any], tangents: dict[str, Any], holes: Any) -> Any:
        rules = autograd.keywords(call, arrays) | {"attn_mask": holes}
        return jvp(*(arrays[name] for name in autograd.INPUTS), tangents, **rules)[1]

    with library.guard():
        placed = [{name: library.put(x) for name, x in part.items()} for part in (arrays, tangents)]
        result = library.jit(both)(*placed, library.put(HOLES))
        # What is known of the arrays is used; nothing is read of the tangents.
        of_tangents = library.jit(lambda moved: both(placed[0], moved, library.put(HOLES)))(placed[1])
    expected = autograd.jvp(call, arrays, tangents)
    for tangent in (result, of_tangents):
        np.testing.assert_allclose(library.get(tangent), expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def test_inputs_are_not_written_to(rng: np.random.Generator) -> None:
    arrays, tangents = draw(CALLS["all"], rng)
    for x in (*arrays.values(), *tangents.values()):
        x.flags.writeable = False
    inputs = [arrays[name] for name in autograd.INPUTS]
    first, second = (jvp(*inputs, tangents, **autograd.keywords(CALLS["all"], arrays)) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.flags.c_contiguous


def test_a_change_of_the_bias_alone_is_not_written_to(rng: np.random.Generator) -> None:
    """Its tiles are slices of the caller's array, and not the memory of the products."""
    query, bias, moved = rng.standard_normal((2, 64, 8)), *rng.standard_normal((2, 2, 64, 4096))
    key, before = rng.standard_normal((2, 4096, 8)), moved.copy()
    jvp(query, key, key, {"bias": moved}, bias=bias)
    np.testing.assert_array_equal(moved, before)


def test_two_biases_of_one_kind(rng: np.random.Generator) -> None:
    x, t = rng.standard_normal((2, 2, 5, 5))
    slopes, moved = rng.standard_normal((2, 2))
    both = biases.alibi(slopes) + biases.from_array(x) + biases.alibi(2 * slopes)
    query = rng.standard_normal((2, 5, 4))
    _, tangent = jvp(query, query, query, {"bias.slopes (2)": moved, "bias.array": t}, bias=both)
    added = biases.to_array(biases.alibi(moved), (2, 5, 5)) + t
    whole = biases.to_array(biases.alibi(3 * slopes), (2, 5, 5)) + x
    _, expected = jvp(query, query, query, {"bias": added}, bias=whole)
    np.testing.assert_allclose(tangent, expected, rtol=0, atol=1e-13)
