"""What joins the scores has the dtype of the query or of the scores: any other is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdpa_xp import attention_state, attention_weights, biases, masks, scaled_dot_product_attention

F, HALF, DOUBLE = np.float32, np.float16, np.float64
RULES: dict[str, Any] = {
    "attn_mask": lambda dtype: {"attn_mask": np.ones((3, 3), dtype)},
    "bias": lambda dtype: {"bias": np.ones((3, 3), dtype)},
    "bias of two": lambda dtype: {"bias": biases.alibi(4) + np.ones((3, 3), dtype)},
    "bias.slopes": lambda dtype: {"bias": biases.alibi(np.ones(4, dtype))},
    "bias.table": lambda dtype: {"bias": biases.relative(np.ones((8, 4), dtype))},
    "scale": lambda dtype: {"scale": np.ones((4, 1, 1), dtype)},
    "sinks": lambda dtype: {"sinks": np.ones(4, dtype)},
}


def call(query: Any, name: str, dtype: Any) -> Any:
    x = np.ones((2, 4, 3, 8), query)
    return scaled_dot_product_attention(x, x, x, **RULES[name](dtype))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("query", "fits"), [(HALF, (HALF, F)), (F, (F,)), (DOUBLE, (DOUBLE,))])
def test_dtypes(name: str, query: Any, fits: tuple[Any, ...]) -> None:
    for dtype in (HALF, F, DOUBLE):
        if dtype in fits:
            assert call(query, name, dtype).dtype == query
            continue
        argument = name.partition(" ")[0]
        rule = f"`{argument}` must have the dtype of `query` or of the scores"
        with pytest.raises(TypeError, match=rf"{rule}.*got {argument}.dtype={np.dtype(dtype).name}"):
            call(query, name, dtype)


@pytest.mark.parametrize("name", RULES)
def test_integers(name: str) -> None:
    argument = name.partition(" ")[0]
    with pytest.raises(TypeError, match=rf"{argument.partition('.')[2] or argument}.*int64"):
        call(F, name, np.int64)


def test_hints_fit_what_came() -> None:
    """A function belongs to `from_function`; a number has no such hint."""
    for join in (lambda x: masks.causal() & x, lambda x: biases.alibi(4) + x):
        with pytest.raises(TypeError, match=r"`from_function` takes a function of the indices\.$"):
            join(lambda b, h, i, j: i >= j)
        with pytest.raises(TypeError) as refused:
            join(1)
        assert "from_function" not in str(refused.value)


def test_no_pair_of_a_range_of_queries() -> None:
    """Weights of 0 and no NaN, also beside a sink."""
    x = np.ones((2, 4, 3, 8), F)
    for rules in ({}, {"sinks": np.ones(4, F)}):
        weights = attention_weights(x, x, masks.padding(0), **rules)
        np.testing.assert_array_equal(weights, np.zeros((2, 4, 3, 3)))
        state = attention_state(x, x, x, masks.padding(0), **rules)
        np.testing.assert_array_equal(state.output, 0)
        np.testing.assert_array_equal(state.lse, 1 if rules else -np.inf)
