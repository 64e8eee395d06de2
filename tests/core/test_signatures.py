"""Calls that are alike are checked once, and a later one gives what the first gave; no other passes for one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import MOST_MASK_NUMBERS, prepare

from sdpa_xp import attention_state, attention_weights, biases, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose calls were checked, each time."""
    calls: list[str] = []
    check = prepare._validated
    monkeypatch.setattr(prepare, "_validated", lambda *rest: calls.append(rest[0]) or check(*rest))
    return calls


def arrays(*shape: int, dtype: Any = F, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_an_alike_call_is_checked_once_and_computed_anew(checked: list[str]) -> None:
    x, y = arrays(3, 4), arrays(3, 4, seed=1)
    first, second = scaled_dot_product_attention(x, x, x), scaled_dot_product_attention(y, y, y)
    assert checked == ["scaled_dot_product_attention"]
    np.testing.assert_array_equal(scaled_dot_product_attention(x, x, x), first)
    assert not np.array_equal(first, second)


def test_no_array_is_kept() -> None:
    x = arrays(3, 4)
    scaled_dot_product_attention(x, x, x)
    assert [call.arrays for call in prepare._CACHE.values()] == [{}]


WRONG: dict[str, list[Any]] = {
    "key": [arrays(3, 5), arrays(3, 4, dtype=np.float64)],
    "value": [arrays(2, 4), [[1.0] * 4] * 3, np.ma.masked_array(arrays(3, 4))],
    "is_causal": [1],
    "scale": [True, "1"],
    "dropout_p": [True, 0.5],
    "layout": ["LHE"],
    "implementation": ["fast", "native"],
    "attn_mask": [np.ones((3, 3), int)],
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, several in WRONG.items() for wrong in several]
)
def test_a_wrong_call_is_refused_after_right_ones(name: str, wrong: Any) -> None:
    """Each time, too: what is refused is not remembered as right."""
    x = arrays(3, 4)
    call = {"query": x, "key": x, "value": x}
    for rules in ({}, {"is_causal": True}, {"scale": 1.0}, {"scale": 1}, {"dropout_p": 0.0}):
        scaled_dot_product_attention(**call, **rules)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
            scaled_dot_product_attention(**(call | {name: wrong}))


def test_each_difference_is_seen(checked: list[str]) -> None:
    x, half = arrays(3, 4), arrays(3, 4, dtype=np.float16)
    scaled_dot_product_attention(x, x, x)
    attention_state(x, x, x)
    for rules in ({"scale": 0.5}, {"scale": 0.25}, {"softcap": 1.0}, {"is_causal": True}):
        scaled_dot_product_attention(x, x, x, **rules)
    assert scaled_dot_product_attention(half, half, half).dtype == np.float16
    assert scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).shape == (1, 1, 3, 4)
    swapped = scaled_dot_product_attention(*[arrays(1, 3, 2, 4)] * 3, layout="...LHE")
    assert swapped.shape == (1, 3, 2, 4)
    assert scaled_dot_product_attention(*[arrays(1, 3, 2, 4)] * 3, layout="...HLE").shape == (1, 3, 2, 4)
    assert len(checked) == 10


def test_what_is_remembered_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST_CACHED", 5)
    for length in range(1, 20):
        x = arrays(length, 4)
        scaled_dot_product_attention(x, x, x)
        assert len(prepare._CACHE) <= 5


CONSTANT: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"attn_mask": masks.causal()},
    "lower right": lambda: {"attn_mask": masks.causal("lower_right")},
    "lengths": lambda: {"attn_mask": masks.padding([2])},
    "ids": lambda: {"attn_mask": masks.document([0, 1, 1], [0, 0, 1])},
    "operators": lambda: {"attn_mask": (masks.causal() & ~masks.prefix(1)) | masks.dilated(2)},
    "slopes": lambda: {"bias": biases.alibi([0.5]) + biases.alibi(1)},
    "both": lambda: {"attn_mask": masks.chunked(2), "bias": biases.alibi(1), "is_causal": True},
}


@pytest.mark.parametrize("name", CONSTANT)
def test_masks_and_biases_without_arrays_are_bound_once(name: str, checked: list[str]) -> None:
    """Two that are made alike are one."""
    x, y = arrays(1, 3, 4), arrays(1, 3, 4, seed=1)
    rules, alike = CONSTANT[name](), CONSTANT[name]()
    expected = scaled_dot_product_attention(y, y, y, **rules)
    prepare._CACHE.clear()
    scaled_dot_product_attention(x, x, x, **rules)
    np.testing.assert_array_equal(scaled_dot_product_attention(y, y, y, **alike), expected)
    assert len(checked) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (masks.causal(), masks.causal(1)),
        (masks.causal(), ~masks.causal()),
        (masks.causal() & masks.prefix(1), masks.causal() | masks.prefix(1)),
        (masks.prefix(1), masks.causal(1)),
        (masks.padding(2), masks.padding(None, 2)),
        (masks.document([0, 1, 1]), masks.document([0, 0, 1])),
        (
            masks.causal() & (masks.prefix(1) | masks.prefix(2)),
            masks.causal() & masks.prefix(1) | masks.prefix(2),
        ),
    ],
    ids=str,
)
def test_masks_that_differ_are_told_apart(one: masks.Mask, other: masks.Mask, checked: list[str]) -> None:
    x = arrays(1, 3, 4)
    outputs = [scaled_dot_product_attention(x, x, x, mask) for mask in (one, other)]
    assert len(checked) == 2
    for mask, output in zip((one, other), outputs, strict=True):
        expected = scaled_dot_product_attention(x, x, x, masks.to_array(mask, (3, 3)))
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)


def test_a_wrong_argument_equal_to_a_right_one_is_refused() -> None:
    """1 == 1.0. That True == 1 does not get here: a mask refuses it."""
    x = arrays(1, 3, 4)
    for right in (masks.causal(1), masks.padding(1), masks.padding([1]), masks.prefix(1)):
        scaled_dot_product_attention(x, x, x, right)
    for wrong in (masks.causal(1.0), masks.padding(1.0), masks.padding([1.0]), masks.prefix(1.0)):  # type: ignore[arg-type,list-item]
        with pytest.raises(TypeError, match="must be an integer"):
            scaled_dot_product_attention(x, x, x, wrong)


def test_what_may_change_is_bound_each_time(checked: list[str]) -> None:
    """A mask copies its array, but a bias may be written to, and a function may answer otherwise."""
    x, allowed = arrays(1, 3, 4), np.ones((3, 3), bool)
    length = [3]
    changing: list[dict[str, Any]] = [
        {"attn_mask": masks.from_array(allowed)},
        {"attn_mask": masks.causal() & masks.from_array(allowed)},
        {"attn_mask": masks.from_function(lambda b, h, q_idx, kv_idx: kv_idx < length[0])},
        {"bias": biases.from_function(lambda score, b, h, q_idx, kv_idx: score + (q_idx * length[0]))},
        {"attn_mask": masks.padding(np.asarray([2]))},
    ]
    for rules in changing:
        allowed[:], length[0] = True, 3
        scaled_dot_product_attention(x, x, x, **rules)
        allowed[:, 1:], length[0] = False, 1
        scaled_dot_product_attention(x, x, x, **rules)
    assert len(checked) == 2 * len(changing)
    assert prepare._CACHE == {}
    everywhere = scaled_dot_product_attention(x, x, x, np.ones((3, 3), bool))
    np.testing.assert_array_equal(scaled_dot_product_attention(x, x, x, changing[0]["attn_mask"]), everywhere)
    expected = np.broadcast_to(x[:, :1], x.shape)
    np.testing.assert_array_equal(scaled_dot_product_attention(x, x, x, changing[2]["attn_mask"]), expected)
    y = arrays(1, MOST_MASK_NUMBERS + 1, 4)
    scaled_dot_product_attention(y, y, y, masks.document(range(MOST_MASK_NUMBERS + 1)))
    assert prepare._CACHE == {}


QUERIES = {2: (7, 8), 3: (4, 7, 8), 4: (2, 4, 7, 8), 5: (3, 1, 4, 7, 8)}
KEYS = {2: (5, 8), 3: (2, 5, 8), 4: (2, 2, 5, 8), 5: (3, 2, 2, 5, 8)}


def drawn(ranks: tuple[int, int, int], layout: str, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [QUERIES[ranks[0]], KEYS[ranks[1]], (*KEYS[ranks[2]][:-1], 3)]
    arrays = draw(rng, *shapes)
    return [x.swapaxes(-2, -3) if layout == "...LHE" and x.ndim > 2 else x for x in arrays]


def fitting(ranks: tuple[int, int, int]) -> bool:
    """Keys and values have as many heads; a query of 2 axes has one head, and takes keys of one."""
    query, key, value = ranks
    return (key == 2) == (value == 2) and (query > 2 or key == 2)


RANKS = [ranks for ranks in itertools.product(QUERIES, repeat=3) if fitting(ranks)]


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_the_second_call(ranks: tuple[int, int, int], layout: str) -> None:
    one, other = (drawn(ranks, layout, seed) for seed in (0, 1))
    functions: list[Any] = [
        lambda *x: [scaled_dot_product_attention(*x, layout=layout)],
        lambda *x: attention_state(*x, layout=layout, is_causal=True),
        lambda *x: [attention_weights(*x[:2], layout=layout)],
        lambda *x: [*(pair := vjp(*x, layout=layout))[1](pair[0]).values()],
    ]
    for function in functions:
        first = function(*one)
        function(*other)
        for result, expected in zip(function(*one), first, strict=True):
            np.testing.assert_array_equal(result, expected)
