"""Each bias against the array that NumPy makes of its formula, on every library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import assert_agrees, draw
from internals import device, namespace
from libraries import Library

from sdpa_xp import attention_state, attention_weights, biases, masks, scaled_dot_product_attention

F = np.float32
PAIRS = (2, 4, 7, 11)  # B, Hq, L, S
EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
I, J = np.ogrid[:7, :11]
DRAWN = np.random.default_rng(3).standard_normal((7, 11)).astype(F)
TABLE = np.random.default_rng(4).standard_normal((8, 4)).astype(F)


def published_slopes(heads: int) -> list[float]:
    """`get_slopes` of the authors: github.com/ofirpress/attention_with_linear_biases, fairseq/models."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**head for head in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return published_slopes(lower) + published_slopes(2 * lower)[0::2][: heads - lower]


def t5_bucket(distance: np.ndarray, bidirectional: bool, count: int, max_distance: int) -> np.ndarray:
    """`_relative_position_bucket` of Hugging Face's T5Attention, in float32 as there; distance is j - i."""
    first = np.zeros_like(distance)
    if bidirectional:
        count //= 2
        first = (distance > 0) * count
        away = np.abs(distance)
    else:
        away = -np.minimum(distance, 0)
    exact = count // 2
    share = np.log(np.maximum(away, exact).astype(F) / F(exact)) / F(math.log(max_distance / exact))
    far = np.minimum(exact + (share * F(count - exact)).astype(np.int64), count - 1)
    return first + np.where(away < exact, away, far)


def linear(slopes: Any, offset: Any = 0) -> np.ndarray:
    """-slope * |i + offset - j| with slopes (..., Hq) and one offset, or one per batch entry."""
    shift = np.reshape(offset, (-1, 1, 1, 1))
    return -np.asarray(slopes, F)[..., None, None] * np.abs(I + shift - J).astype(F)


def learned(table: np.ndarray, offset: int = 0, max_distance: int = 16) -> np.ndarray:
    bucket = t5_bucket(J - I - offset, True, table.shape[0], max_distance)
    return np.moveaxis(table[bucket], -1, 0)


def sloping(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod of all its indices, by the standard's rules: no division of integers."""
    return score - namespace(score).astype(b + h + 2 * i + j, score.dtype) / 8


SLOPES = np.asarray([[0.5, 0.25, 0.1, 0.0], [1.0, -0.5, 0.3, 0.01]], F)


class Case(NamedTuple):
    """A bias, made with a function that puts NumPy arrays into the library, and what it adds."""

    make: Callable[[Callable[[np.ndarray], Any]], biases.Bias]
    added: np.ndarray


CASES: dict[str, Case] = {
    "alibi": Case(lambda _: biases.alibi(4), linear([2**-2, 2**-4, 2**-6, 2**-8])),
    "alibi list": Case(lambda _: biases.alibi([0.5, 0.1, 0, -1]), linear([0.5, 0.1, 0, -1])),
    "alibi array": Case(lambda put: biases.alibi(put(SLOPES[0])), linear(SLOPES[0])),
    "alibi each entry": Case(lambda put: biases.alibi(put(SLOPES)), linear(SLOPES)),
    "alibi offset": Case(lambda put: biases.alibi(put(SLOPES), offset=3), linear(SLOPES, 3)),
    "alibi lower_right": Case(lambda _: biases.alibi([0.5] * 4, offset="lower_right"), linear([0.5] * 4, 4)),
    "alibi offsets": Case(
        lambda put: biases.alibi(put(SLOPES), offset=put(np.asarray([5, -2], np.int32))),
        linear(SLOPES, [5, -2]),
    ),
    "alibi listed offsets": Case(lambda _: biases.alibi([1.0] * 4, offset=[0, 20]), linear([1.0] * 4, [0, 20])),
    "relative": Case(lambda put: biases.relative(put(TABLE), max_distance=16), learned(TABLE)),
    "relative offset": Case(
        lambda put: biases.relative(put(TABLE), max_distance=5, offset=-3), learned(TABLE, -3, 5)
    ),
    "relative lower_right": Case(
        lambda put: biases.relative(put(TABLE), max_distance=16, offset="lower_right"), learned(TABLE, 4)
    ),
    "array": Case(lambda put: biases.from_array(put(DRAWN)), DRAWN),
    "bias + array": Case(lambda put: biases.alibi([0.5] * 4) + put(DRAWN), linear([0.5] * 4) + DRAWN),
    "sum of three": Case(
        lambda put: (
            biases.relative(put(TABLE), max_distance=16) + biases.alibi(4) + biases.from_array(put(DRAWN))
        ),
        learned(TABLE) + linear(published_slopes(4)) + DRAWN,
    ),
    "function": Case(
        lambda _: biases.from_function(sloping),
        -(np.add.outer(np.arange(2), np.arange(4))[..., None, None] + 2 * I + J).astype(F) / 8,
    ),
}


def whole(added: np.ndarray) -> np.ndarray:
    return np.array(np.broadcast_to(added, PAIRS))


def grouped(rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value whose scores are PAIRS; two query heads read one key head."""
    shapes = ((2, 4, 7, 8), (2, 2, 11, 8), (2, 2, 11, 5))
    return draw(rng, *shapes)


@pytest.mark.rule("R16")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_to_array(library: Library, case: Case) -> None:
    """In the widest dtype of the library; a sum of three numbers may be rounded there and here."""
    with library.guard():
        like = library.put(np.zeros(1, F))
        array = biases.to_array(case.make(library.put), PAIRS, like=like)
    assert namespace(array) is library.xp
    assert device(array) == device(like)
    dtype = library.get(array).dtype
    assert dtype == ("float64" if library.holds("float64") else "float32")
    bound = 4 * EPS["float32"] * np.max(np.abs(case.added))
    np.testing.assert_allclose(library.get(array), whole(case.added), rtol=0, atol=bound)
    with library.guard():
        part = biases.to_array(case.make(library.put), PAIRS, rows=range(1, 3), like=like)
    np.testing.assert_array_equal(library.get(part), library.get(array)[..., 1:3, :])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", CASES)
def test_attention(library: Library, rng: np.random.Generator, name: str) -> None:
    inputs = grouped(rng)
    with library.guard():
        bias = CASES[name].make(library.put)
    output = library.call(scaled_dot_product_attention, *inputs, bias=bias)
    call = dict(zip(("query", "key", "value"), inputs, strict=True))
    assert_agrees(library, library.get(output), call, bias=whole(CASES[name].added))


@pytest.mark.usefixtures("tiles")
def test_bias_with_a_mask(library: Library, rng: np.random.Generator) -> None:
    """A bias value and a mask value hold both, also beside an array that masks."""
    inputs = grouped(rng)
    added = DRAWN.copy()
    added[2], added[:, 8] = -math.inf, -math.inf
    with library.guard():
        bias = biases.alibi([0.5] * 4) + library.put(added)
    state = library.call(attention_state, *inputs, attn_mask=masks.causal(2), bias=bias)
    call = dict(zip(("query", "key", "value"), inputs, strict=True))
    assert_agrees(
        library, library.get(state.output), call, attn_mask=J <= I + 2, bias=whole(linear([0.5] * 4) + added)
    )
    np.testing.assert_array_equal(library.get(state.output)[:, :, 2], 0)
    np.testing.assert_array_equal(np.isneginf(library.get(state.lse)).all((0, 1)), np.arange(7) == 2)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 32])
def test_slopes_of_the_paper(heads: int) -> None:
    """Powers of two or not; each slope is what a distance of 1 takes off."""
    array = -biases.to_array(biases.alibi(heads), (heads, 1, 2))[:, 0, 1]
    np.testing.assert_allclose(array, published_slopes(heads), rtol=16 * EPS["float64"])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("count", "max_distance"), [(32, 128), (32, 64), (16, 128), (8, 20), (8, 16), (4, 5), (64, 256)]
)
def test_buckets_of_t5(count: int, max_distance: int, bidirectional: bool) -> None:
    """The number of the bucket itself, for every distance from -300 to 300."""
    table = np.arange(count, dtype=F)[:, None]
    bias = biases.relative(table, bidirectional=bidirectional, max_distance=max_distance, offset=300)
    expected = t5_bucket(np.arange(-300, 301), bidirectional, count, max_distance)
    np.testing.assert_array_equal(biases.to_array(bias, (1, 1, 601))[0, 0], expected)


@pytest.mark.parametrize("offset", [-40, 40])
def test_distance_beyond_the_call(offset: int) -> None:
    """Two queries and three keys, but far apart by the offset: buckets in between are not cut off."""
    table = np.arange(32, dtype=F)[:, None]
    array = biases.to_array(biases.relative(table, offset=offset), (1, 2, 3))[0]
    i, j = np.ogrid[:2, :3]
    np.testing.assert_array_equal(array, t5_bucket(j - i - offset, True, 32, 128))


def weights(library: Library, bias: Any, **rules: Any) -> np.ndarray:
    """Of one query of 1 against the keys 1, 2 and 3."""
    q, k = np.asarray([[1.0]], F), np.asarray([[1.0], [2.0], [3.0]], F)
    return library.get(library.call(attention_weights, q, k, bias=bias, **rules))[0]


def softmax(*scores: float) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum()


def test_function_gets_the_score_after_scale_and_softcap(library: Library) -> None:
    bias = biases.from_function(lambda s, *_: s * s)
    result = weights(library, bias, scale=2.0, softcap=3.0)
    expected = softmax(*((3 * math.tanh(2 * key / 3)) ** 2 for key in (1, 2, 3)))
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)


def test_function_that_masks(library: Library) -> None:
    """-inf masks a pair, and a row of -inf is 0; the mask holds whatever the function makes of a score."""
    xp = library.xp

    def odd(score: Any, _b: Any, _h: Any, _i: Any, j: Any) -> Any:
        return xp.where(j % 2 == 1, score, -math.inf)

    with library.guard():
        nothing = biases.from_function(lambda s, *_: xp.full_like(s, -math.inf))
    np.testing.assert_array_equal(weights(library, biases.from_function(odd)), [0, 1, 0])
    np.testing.assert_array_equal(weights(library, nothing), [0, 0, 0])
    flat = biases.from_function(lambda s, *_: s * 0)
    np.testing.assert_array_equal(weights(library, flat, attn_mask=masks.padding(2)), [0.5, 0.5, 0])


@pytest.mark.leaves_out("jax-debug")
def test_pair_that_a_function_masks_may_hold_anything(library: Library) -> None:
    """What it makes -inf is masked, also where the score was -inf before."""
    if library.lazy:
        pytest.skip("a lazy graph promises this only for keys that no query attends")
    q, k = np.ones((2, 1), F), np.ones((2, 1), F)
    v = np.asarray([[3.0], [math.nan]], F)
    mine = biases.from_function(lambda s, _b, _h, i, j: library.xp.where(i >= j, s, -math.inf))
    output = library.get(library.call(scaled_dot_product_attention, q, k, v, bias=mine))
    np.testing.assert_array_equal(output, [[3], [math.nan]])
    k[1] = -math.inf
    output = library.get(library.call(scaled_dot_product_attention, q, k, v, bias=mine))
    np.testing.assert_array_equal(output, [[3], [3]])


@pytest.mark.parametrize("kind", ["given", "made"])
def test_array_is_the_callers_own(library: Library, kind: str) -> None:
    """It may be written, and no bias changes with it."""
    if not library.name.startswith(("numpy", "torch")):
        pytest.skip("only NumPy and torch have arrays that are views of others and can be written")
    array = library.put(np.zeros((3, 1)))
    bias = biases.from_array(array) if kind == "given" else biases.alibi(1)
    before = library.get(biases.to_array(bias, (3, 3), like=array)).copy()
    result = biases.to_array(bias, (3, 3), like=array)
    result[1, 2] = 7.0
    assert np.count_nonzero(library.get(result) != before) == 1
    np.testing.assert_array_equal(library.get(biases.to_array(bias, (3, 3), like=array)), before)


def test_a_later_function_does_not_unmask(library: Library) -> None:
    flat = biases.from_function(lambda s, *_: s * 0)
    raised = biases.from_function(lambda s, *_: library.xp.zeros_like(s))
    with library.guard():
        masking = biases.from_array(library.put(np.asarray([0, -math.inf, 0], F)))
    bias = flat + masking + raised
    np.testing.assert_array_equal(weights(library, bias), [0.5, 0, 0.5])


@pytest.mark.rule("R18")
def test_biases_are_applied_from_left_to_right(library: Library) -> None:
    double = biases.from_function(lambda s, *_: s * 2)
    added = np.asarray([0.5, 0.0, -1.0], F)
    with library.guard():
        array = biases.from_array(library.put(added))
        first, last = array + double, double + array
        (one, other) = (library.get(biases.to_array(x, (1, 3)))[0] for x in (first, last))
    np.testing.assert_array_equal(one, 2 * added)
    np.testing.assert_array_equal(other, added)
    np.testing.assert_allclose(weights(library, first), softmax(3, 4, 4), rtol=0, atol=2e-6)
    np.testing.assert_allclose(weights(library, last), softmax(2.5, 4, 5), rtol=0, atol=2e-6)


@pytest.mark.rule("R18")
def test_a_floating_mask_comes_before_the_bias(library: Library) -> None:
    double, mask = biases.from_function(lambda s, *_: s * 2), np.asarray([0.5, 0.0, -1.0], F)
    np.testing.assert_allclose(weights(library, double, attn_mask=mask), softmax(3, 4, 4), rtol=0, atol=2e-6)


def test_array_on_the_left(library: Library) -> None:
    """The array lets the bias answer, and comes first."""
    if library.name.startswith(("strict", "mlx")):
        pytest.skip("the library raises where Python lets the other operand answer")
    with library.guard():
        bias = library.put(DRAWN) + biases.from_function(lambda s, *_: s * 2)
        array = biases.to_array(bias, (7, 11))
    np.testing.assert_array_equal(library.get(array), 2 * DRAWN)


def test_table_that_masks(library: Library) -> None:
    """-inf in the bucket of a distance of 0, which is exact."""
    table = np.asarray([-math.inf, 0, 0, 0], F)[:, None]
    with library.guard():
        bias = biases.relative(library.put(table), max_distance=9, offset=1)
    np.testing.assert_allclose(weights(library, bias, scale=0.0), [0.5, 0, 0.5], rtol=0, atol=2e-6)
