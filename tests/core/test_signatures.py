"""Calls that are alike are checked once; a call that is not alike must never pass for one that was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdpa_xp import attention_state, scaled_dot_product_attention
from sdpa_xp._call import prepare

F = np.float32


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose calls were checked, each time; none is known before."""
    calls: list[str] = []
    check = prepare._validated
    monkeypatch.setattr(prepare, "_CACHE", {})
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


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": arrays(3, 5)}, "must agree on axis -1"),
        ({"key": arrays(3, 4, dtype=np.float64)}, "must have one dtype"),
        ({"value": arrays(2, 4)}, "must agree on axis -2"),
        ({"value": [[1.0] * 4] * 3}, "must be a plain array"),
        ({"value": np.ma.masked_array(arrays(3, 4))}, "must be a plain array"),
        ({"is_causal": 1}, "`is_causal` must be"),
        ({"scale": True}, "`scale` must be"),
        ({"scale": "1"}, "`scale` must be"),
        ({"dropout_p": True}, "`dropout_p` must be"),
        ({"dropout_p": 0.5}, "needs `rng`"),
        ({"layout": "LHE"}, "`layout` must be"),
        ({"implementation": "fast"}, "`implementation` must be"),
        ({"implementation": "native"}, "`implementation`"),
        ({"attn_mask": np.ones((3, 3), int)}, "must be boolean"),
    ],
)
def test_a_wrong_call_is_refused_after_right_ones(change: dict[str, Any], error: str) -> None:
    """Each time, too: what is refused is not remembered as right."""
    x = arrays(3, 4)
    call = {"query": x, "key": x, "value": x}
    for rules in ({}, {"is_causal": True}, {"scale": 1.0}, {"scale": 1}, {"dropout_p": 0.0}):
        scaled_dot_product_attention(**call, **rules)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=error):
            scaled_dot_product_attention(**(call | change))


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
