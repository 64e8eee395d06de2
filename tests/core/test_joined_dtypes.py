"""What joins the scores has the dtype of the query or of the scores, or a narrower one, which is promoted."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from calls import gradients
from internals import dtype_name
from libraries import Library

from sdpa_xp import biases, scaled_dot_product_attention, scaled_dot_product_attention_vjp

F, HALF, BRAIN, DOUBLE = np.float32, np.float16, ml_dtypes.bfloat16, np.float64
JOINED: dict[str, tuple[tuple[int, ...], Any]] = {
    "attn_mask": ((3, 3), lambda x: {"attn_mask": x}),
    "bias": ((2, 4, 1, 3), lambda x: {"bias": x}),
    "bias of two": ((3, 3), lambda x: {"bias": biases.alibi(4) + x}),
    "bias.slopes": ((4,), lambda x: {"bias": biases.alibi(x)}),
    "bias.table": ((8, 4), lambda x: {"bias": biases.relative(x)}),
    "scale": ((4, 1, 1), lambda x: {"scale": x}),
    "sinks": ((4,), lambda x: {"sinks": x}),
}
"""The shape of each array that joins the scores, and the keywords of a call with it."""
NARROWER = {
    "float16": (HALF, F),
    "bfloat16": (BRAIN, F),
    "float32": (F, DOUBLE),
    "half of double": (HALF, DOUBLE),
}


def call(query: Any, name: str, dtype: Any) -> Any:
    x, (shape, rules) = np.ones((2, 4, 3, 8), query), JOINED[name]
    return scaled_dot_product_attention(x, x, x, **rules(np.full(shape, 2, dtype)))


@pytest.mark.rule("R12")
@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize(
    ("query", "fits"),
    [(HALF, (HALF, F)), (BRAIN, (BRAIN, F)), (F, (HALF, BRAIN, F)), (DOUBLE, (HALF, BRAIN, F, DOUBLE))],
)
def test_dtypes(name: str, query: Any, fits: tuple[Any, ...]) -> None:
    for dtype in (HALF, BRAIN, F, DOUBLE):
        if dtype in fits:
            assert call(query, name, dtype).dtype == query
            continue
        with pytest.raises(TypeError, match="the dtype of `query`"):
            call(query, name, dtype)


def drawn(library: Library, name: str, dtypes: tuple[Any, Any], rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value in the wider dtype, and the array that joins the scores in the narrower one."""
    narrow, wide = map(np.dtype, dtypes)
    if not (library.holds(narrow.name) and library.holds(wide.name)):
        pytest.skip("the library lacks a dtype")
    inputs = [rng.standard_normal((2, 4, 3, 8)).astype(wide) for _ in range(3)]
    return [*inputs, rng.standard_normal(JOINED[name][0]).astype(narrow)]


@pytest.mark.rule("R12")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", [None, "xp"])
@pytest.mark.parametrize("dtypes", NARROWER.values(), ids=NARROWER)
@pytest.mark.parametrize("name", JOINED)
def test_promotion_is_exact(
    library: Library, rng: np.random.Generator, name: str, dtypes: Any, implementation: str | None
) -> None:
    """The output is that of the same numbers in the dtype of the query, bit for bit."""
    *inputs, joined = drawn(library, name, dtypes, rng)

    def attend(query: Any, key: Any, value: Any, joined: Any) -> Any:
        rules = JOINED[name][1](joined)
        return scaled_dot_product_attention(query, key, value, **rules, implementation=implementation)

    outputs = [library.get(library.call(attend, *inputs, x)) for x in (joined, joined.astype(dtypes[1]))]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.rule("R12")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtypes", NARROWER.values(), ids=NARROWER)
@pytest.mark.parametrize("name", JOINED)
def test_its_gradient_has_its_dtype(library: Library, rng: np.random.Generator, name: str, dtypes: Any) -> None:
    """It is the gradient of the promoted numbers, rounded once."""
    *inputs, joined = drawn(library, name, dtypes, rng)

    def gradient(query: Any, key: Any, value: Any, joined: Any) -> Any:
        output, pullback = scaled_dot_product_attention_vjp(query, key, value, **JOINED[name][1](joined))
        gradients = pullback(output)
        (of_joined,) = (x for other, x in gradients.items() if other not in ("query", "key", "value"))
        return of_joined

    narrow, wide = (library.call(gradient, *inputs, x) for x in (joined, joined.astype(dtypes[1])))
    assert dtype_name(narrow.dtype) == joined.dtype.name
    np.testing.assert_array_equal(library.get(narrow), library.get(wide).astype(joined.dtype))


@pytest.mark.leaves_out("jax-debug", "torch-inference")
@pytest.mark.parametrize("implementation", [None, "xp"])
def test_its_gradient_by_the_library(
    library: Library, rng: np.random.Generator, implementation: str | None
) -> None:
    """Also where torch, JAX or MLX differentiates."""
    *inputs, joined = drawn(library, "bias", NARROWER["bfloat16"], rng)

    def total(bias: Any) -> Any:
        placed = [library.put(x) for x in inputs]
        output = scaled_dot_product_attention(*placed, bias=bias, implementation=implementation)
        return (output * output).sum()

    (narrow,), (wide,) = (gradients(library, total, x) for x in (joined, joined.astype(F)))
    assert narrow.dtype == BRAIN
    np.testing.assert_array_equal(narrow, wide.astype(BRAIN))
