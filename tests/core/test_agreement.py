"""Every shape, mask and dtype against the float64 reference, on every library."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from agreement import CASES, Case, assert_agrees, assert_call_agrees, sequences_of
from calls import draw_masked
from libraries import Library

from sdpa_xp import scaled_dot_product_attention

F = np.float32
# query, key, value, attn_mask, bias: the shapes of a call
SHAPES: dict[str, tuple[tuple[int, ...] | None, ...]] = {
    "2-D": ((7, 8), (11, 8), (11, 8), None, None),
    "2-D, Ev != E": ((7, 8), (11, 8), (11, 3), (7, 11), None),
    "3-D": ((4, 7, 8), (4, 11, 8), (4, 11, 8), (7, 11), (4, 1, 11)),
    "4-D": ((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8), (2, 1, 1, 11), (4, 7, 11)),
    "5-D": ((3, 2, 4, 7, 8), (3, 2, 4, 11, 8), (3, 2, 4, 11, 8), (2, 1, 1, 11), None),
    "batches broadcast": ((3, 1, 4, 7, 8), (2, 4, 11, 8), (1, 1, 4, 11, 5), (3, 2, 1, 1, 11), (11,)),
    "batch of value alone": ((4, 7, 8), (4, 11, 8), (2, 4, 11, 8), (7, 1), None),
    "ranks differ": ((4, 7, 8), (11, 8), (11, 8), (11,), None),
    "grouped heads": ((2, 6, 7, 8), (2, 2, 11, 8), (2, 2, 11, 3), (2, 6, 7, 11), (6, 1, 11)),
    "one key head": ((2, 6, 7, 8), (2, 1, 11, 8), (2, 1, 11, 8), (6, 7, 1), None),
    "one query": ((2, 4, 1, 8), (2, 2, 11, 8), (2, 2, 11, 8), (2, 1, 1, 11), None),
    "one key": ((4, 7, 8), (4, 1, 8), (4, 1, 8), (7, 1), None),
    "width 1": ((4, 7, 1), (4, 11, 1), (4, 11, 1), None, None),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "scale 0": {"scale": 0},
    "scale < 0": {"scale": -0.5, "is_causal": True},
    "softcap": {"softcap": 2.5},
    "all": {"is_causal": True, "scale": 1.5, "softcap": 3},
}


# Each shape with two of the rules, so that each rule meets several shapes.
PAIRS = [
    pytest.param(shapes, rules, id=f"{name}-{rule}")
    for index, (name, shapes) in enumerate(SHAPES.items())
    for turn, (rule, rules) in enumerate(RULES.items())
    if (turn - index) % len(RULES) in (0, 3)
]


def draw(rng: np.random.Generator, shapes: tuple[Any, ...], dtype: Any = F) -> dict[str, np.ndarray]:
    names = ("query", "key", "value", "attn_mask", "bias")
    return draw_masked(rng, dict(zip(names, shapes, strict=True)), dtype)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(("shapes", "rules"), PAIRS)
def test_float32(library: Library, rng: np.random.Generator, shapes: Any, rules: Any) -> None:
    assert_call_agrees(library, draw(rng, shapes), rules)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("shapes", "rules"), PAIRS)
def test_many_tiles(library: Library, rng: np.random.Generator, shapes: Any, rules: Any) -> None:
    assert_call_agrees(library, draw(rng, shapes), rules)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_dtypes(library: Library, rng: np.random.Generator, shapes: Any, dtype: str) -> None:
    library.needs(dtype)
    assert_call_agrees(library, draw(rng, shapes, dtype), {"is_causal": True})


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shapes", ["3-D", "4-D", "5-D", "grouped heads"])
def test_heads_behind_the_length(library: Library, rng: np.random.Generator, shapes: str) -> None:
    """Masks, biases and the log-sum-exp stay (..., Hq, L, S) and (..., Hq, L)."""
    assert_call_agrees(library, draw(rng, SHAPES[shapes]), RULES["all"], layout="...LHE")


@pytest.mark.rule("R4")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_is_float32_rounded_once(library: Library, rng: np.random.Generator, dtype: str) -> None:
    library.needs(dtype)
    arrays = draw(rng, SHAPES["grouped heads"], dtype)
    wide = {name: x if x.dtype == bool else x.astype(np.float32) for name, x in arrays.items()}
    half = library.get(library.call(scaled_dot_product_attention, **arrays))
    single = library.get(library.call(scaled_dot_product_attention, **wide))
    np.testing.assert_array_equal(half.astype(dtype), single.astype(dtype))


@pytest.mark.leaves_out("numpy-torch")
def test_implementation_xp_is_the_default_without_a_kernel(library: Library, rng: np.random.Generator) -> None:
    if library.name.split("-")[0] in ("torch", "jax", "mlx") and not library.traces:
        pytest.skip("the library has a kernel: tests/peers/test_*_native.py")
    arrays = draw(rng, SHAPES["4-D"])
    first = library.call(scaled_dot_product_attention, **arrays)
    second = library.call(scaled_dot_product_attention, **arrays, implementation="xp")
    np.testing.assert_array_equal(library.get(first), library.get(second))


# Function, layout, numbers of queries and of keys: with a sequence without queries, and one without keys; of
# equal lengths, side by side or with another in between; a prompt, the next token of a sequence whose block is
# full, an idle sequence, and a draft of two tokens.
FUNCTIONS: dict[str, tuple[str, str, list[int], list[int]]] = {
    "dense": ("dense", "...HLE", [5] * 4, [8] * 4),
    "dense, heads behind": ("dense", "...LHE", [7] * 4, [5] * 4),
    "varlen": ("varlen", "...HLE", [5, 0, 3, 1], [7, 3, 0, 4]),
    "varlen, equal lengths": ("varlen", "...LHE", [3] * 4, [4] * 4),
    "varlen, some equal": ("varlen", "...HLE", [3, 2, 3, 3], [4, 5, 4, 4]),
    "varlen, some equal, heads behind": ("varlen", "...LHE", [3, 2, 3, 3], [4, 5, 4, 4]),
    "pages": ("pages", "...HLE", [3, 1, 0, 2], [3, 5, 6, 5]),
    "pages, batch": ("pages", "...LHE", [2] * 4, [2, 6, 8, 5]),
}
OF_ANY_LENGTHS = ("plain", "is_causal", "lower right", "window", "function", "alibi, lower right")


def assert_row_agrees(library: Library, row: Any, case: Case, dtype: str = "float32") -> None:
    function, layout, queries, keys = row
    old = [s - n for n, s in zip(queries, keys, strict=True)] if function == "pages" else ()
    sequences = sequences_of(queries, keys, dtype)
    assert_agrees(library, function, case, sequences, old, layout=layout)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("row", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.leaves_out("jax-jit")  # which would compile each function for each row
def test_each_sequence_is_as_if_alone(library: Library, row: Any, case: Case) -> None:
    assert_row_agrees(library, row, case)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("row", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.leaves_out("jax-jit")
def test_dtypes_of_sequences(library: Library, row: Any, dtype: str) -> None:
    library.needs(dtype)
    assert_row_agrees(library, row, CASES["is_causal"], dtype)


@pytest.mark.sampled(0, on="EAGER_JAX")
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=4),
    name=st.sampled_from(OF_ANY_LENGTHS),
)
@pytest.mark.parametrize("function", ["varlen", "pages"])
@pytest.mark.leaves_out("jax-jit")
def test_any_lengths(library: Library, lengths: list[tuple[int, int]], name: str, function: str) -> None:
    if library.lazy and function == "pages":
        pytest.skip("the graphs of many calls take long; the calls above ask the same")
    queries, keys = ([pair[axis] for pair in lengths] for axis in (0, 1))
    hypothesis.assume(any(queries) and any(keys))
    keys = [s if function == "varlen" else s + n for n, s in lengths]
    assert_row_agrees(library, (function, "...HLE", queries, keys), CASES[name])
