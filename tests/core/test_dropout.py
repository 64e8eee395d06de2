"""Dropout: which weights are dropped follows from the generator's state and the place of the pair alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import attend, draw_named
from internals import TileSize, dropout, override
from libraries import Library, generator

import sdpa_xp
from sdpa_xp import KVCache, attention_state, attention_weights, biases, masks, scaled_dot_product_attention

F = np.float32
SEED = 20170612


@pytest.fixture
def call(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"query": (2, 4, 9, 8), "key": (2, 2, 13, 8), "value": (2, 2, 13, 5)}
    return draw_named(rng, shapes)


def weigh(library: Library, call: dict[str, np.ndarray], **rules: Any) -> np.ndarray:
    return library.get(library.call(attention_weights, call["query"], call["key"], **rules))


@pytest.mark.rule("R22")
def test_weights_are_dropped_and_the_others_scaled(library: Library, call: dict[str, np.ndarray]) -> None:
    plain, dropped = weigh(library, call), weigh(library, call, dropout_p=0.25, rng=generator(library))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], plain[kept] / 0.75, rtol=1e-6)
    assert 0.65 < kept.mean() < 0.85  # 936 draws of probability 0.75: 0.014 is one standard deviation


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(
    "rules", [{}, {"attn_mask": masks.sliding_window(3, 3), "softcap": 2.0}], ids=["", "mask"]
)
def test_output_is_the_dropped_weights_times_value(
    library: Library, call: dict[str, np.ndarray], rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the call is cut: weights are made in whole rows, the output in tiles of 5 x 7."""
    w = weigh(library, call, dropout_p=0.5, rng=generator(library), **rules)
    expected = w.astype(np.float64) @ np.repeat(call["value"], 2, axis=1)
    for rows, columns in ((256, 1024), (5, 7)):
        for name in ("ONE_CORE", "ALL_CORES", "DEVICE"):
            override(monkeypatch, name, TileSize(rows, columns, rows * columns))
        output = attend(library, **call, dropout_p=0.5, rng=generator(library), **rules)
        np.testing.assert_allclose(output, expected, rtol=0, atol=4e-6)


def test_same_state_same_result(library: Library, call: dict[str, np.ndarray]) -> None:
    first, again, other = (
        attend(library, **call, dropout_p=0.5, rng=generator(library, seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.mean(first != other) > 0.9


@pytest.mark.rule("R8")
def test_a_generator_moves_on(library: Library, call: dict[str, np.ndarray]) -> None:
    """But a key of JAX or MLX, which has no state."""
    rng = generator(library)
    first, second = (attend(library, **call, dropout_p=0.5, rng=rng) for _ in range(2))
    assert np.array_equal(first, second) == library.name.startswith(("jax", "mlx"))


@pytest.mark.rule("R22")
def test_log_sum_exp_is_not_touched(library: Library, call: dict[str, np.ndarray]) -> None:
    plain = library.call(attention_state, **call)
    dropped = library.call(attention_state, **call, dropout_p=0.5, rng=generator(library))
    np.testing.assert_array_equal(library.get(dropped.lse), library.get(plain.lse))


@pytest.mark.parametrize(("p", "left"), [(0.0, 1.0), (1.0, 0.0), (1e-12, 1.0)])
def test_none_or_all(library: Library, call: dict[str, np.ndarray], p: float, left: float) -> None:
    output = attend(library, **call, dropout_p=p, rng=generator(library))
    np.testing.assert_allclose(output, left * attend(library, **call), rtol=0, atol=1e-6)


def test_pairs_are_dropped_independently() -> None:
    """Neighbours in each axis, far ones, and two calls agree as often as chance has it."""
    x = np.ones((8, 4, 64, 1), F)

    def dropped(seed: int) -> np.ndarray:
        w: np.ndarray = attention_weights(x, x, dropout_p=0.5, rng=np.random.default_rng(seed))
        return np.sign(w) * 2 - 1  # -1 or 1

    d, sigma = dropped(0), 1 / math.sqrt(8 * 4 * 64 * 64)
    assert abs(d.mean()) < 5 * sigma
    assert abs((d * dropped(1)).mean()) < 5 * sigma
    for axis in range(4):
        for step in (1, 2, 3):
            assert abs((d * np.roll(d, step, axis)).mean()) < 5 * sigma, (axis, step)
    assert abs((d * d.swapaxes(-1, -2)).mean()) < 6 * sigma + 1 / 64  # the diagonal meets itself
    rows = d.reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)
    variance = (rows @ rows.T / 8)[np.triu_indices(len(rows), 1)].var()  # of sums of 64 signs, over 8
    assert abs(variance - 1) < 0.01


def test_libraries_with_one_seed_drop_the_same(library: Library, call: dict[str, np.ndarray]) -> None:
    """Those that take NumPy's generator do."""
    if library.name.split("-")[0] not in ("numpy", "strict", "dask"):
        pytest.skip("the library has a generator of its own")
    rules = {"dropout_p": 0.5}
    expected = attention_weights(call["query"], call["key"], **rules, rng=np.random.default_rng(SEED))
    weights = weigh(library, call, **rules, rng=np.random.default_rng(SEED))
    np.testing.assert_array_equal(weights == 0, expected == 0)


def state_of(rng: Any) -> Any:
    """What a generator would draw next."""
    if hasattr(rng, "get_state"):
        return rng.get_state().tolist()
    return rng.bit_generator.state if hasattr(rng, "bit_generator") else None


def refuses(*_: Any) -> Any:
    raise LookupError("refused")


def of_another_dtype(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    return i - j


FAILING: dict[str, Any] = {
    "a mask function that raises": {"attn_mask": masks.from_function(refuses)},
    "a mask function that returns no condition": {"attn_mask": masks.from_function(of_another_dtype)},
    "a bias function that raises": {"bias": biases.from_function(refuses)},
    "a mask that does not fit": {"attn_mask": masks.padding([1, 2, 3])},
}
FUNCTIONS: dict[str, Any] = {
    "attention": lambda x, **rules: scaled_dot_product_attention(x, x, x, **rules),
    "state": lambda x, **rules: attention_state(x, x, x, **rules),
    "weights": lambda x, **rules: attention_weights(x, x, **rules),
    "gradients": lambda x, **rules: sdpa_xp.scaled_dot_product_attention_vjp(x, x, x, **rules),
    "cache": lambda x, **rules: KVCache(x, x).attend(x, **rules),
    "varlen": lambda x, **rules: sdpa_xp.varlen_attention(
        x[0, ...], x[0, ...], x[0, ...], [0, 5], [0, 5], **rules
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("rules", FAILING.values(), ids=FAILING)
def test_a_call_that_fails_draws_nothing(library: Library, function: Any, rules: dict[str, Any]) -> None:
    if library.lazy:
        pytest.skip("the mask of a lazy call is not computed yet")
    rng = generator(library)
    before = state_of(rng)
    with library.guard(), pytest.raises((TypeError, ValueError, LookupError)):
        function(library.put(np.ones((1, 5, 2, 4), np.float32)), dropout_p=0.5, rng=rng, **rules)
    assert state_of(rng) == before


ALL = 2**32 - 1
EDGES = [0, 1, 2, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]


def lowbias32(x: int) -> int:
    """As published, in unsigned numbers: github.com/skeeto/hash-prospector."""
    x ^= x >> 16
    x = x * 0x7FEB352D & ALL
    x ^= x >> 15
    x = x * 0x846CA68B & ALL
    return x ^ x >> 16


def test_signed_numbers_are_mixed_as_unsigned_ones() -> None:
    numbers = [*EDGES, *np.random.default_rng(0).integers(0, 2**32, 1000).tolist()]
    signed: Any = np.asarray(numbers, np.uint32).view(np.int32)
    with np.errstate(over="ignore"):
        mixed = np.asarray(dropout._mix(signed)).view(np.uint32).tolist()
    assert mixed == [lowbias32(number) for number in numbers]
