"""Lengths that are symbols of `jax.export`: one program, serialized, agrees with all eager calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from open_calls import FIXED, INPUTS, ROWS, TRACED, Row, call_of, functions

from sdpa_xp import biases, dot_product_attention, masks, scaled_dot_product_attention

jax: Any = pytest.importorskip("jax")
pytestmark = pytest.mark.needs("jax")
F = np.float32


def symbols_of(letters: str, constraints: Sequence[str] = ()) -> dict[str, Any]:
    named = jax.export.symbolic_shape("B, L, S", constraints=constraints)
    return {letter: symbol for letter, symbol in zip("BLS", named, strict=True) if letter in letters}


def exported(call: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """The program of a call, serialized and read again."""
    program = jax.export.export(jax.jit(call))(*specs)
    called: Callable[..., Any] = jax.export.deserialize(bytearray(program.serialize())).call
    return called


def program_of(call: Callable[..., Any], row: Row, symbols: str, constraints: Sequence[str] = ()) -> Any:
    sizes = FIXED | TRACED | symbols_of(symbols, constraints)
    dtypes = [x.dtype for x in row.draw(TRACED)]
    shapes = [tuple(sizes[letter] for letter in axes) for axes in row.axes]
    specs = [jax.ShapeDtypeStruct(*spec) for spec in zip(shapes, dtypes, strict=True)]
    return exported(call, *specs)


def with_gradients(call: Callable[..., Any], row: Row) -> Callable[..., Any]:
    floating = tuple(n for n, x in enumerate(row.draw(TRACED)) if x.dtype == F)
    return jax.value_and_grad(lambda *arrays: (call(*arrays) ** 2).mean(), floating)  # type: ignore[no-any-return]


def assert_agrees(program: Callable[..., Any], call: Callable[..., Any], row: Row, symbols: str) -> None:
    for arrays, expected in row.runs(call, jax.numpy.asarray, symbols):
        for one, other in zip(*map(jax.tree.leaves, (program(*arrays), expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("implementation", [None, "xp"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_exported_program(row: Row, implementation: Any) -> None:
    call = call_of(row, implementation=implementation)
    bounds = [] if row.most == np.inf else [f"{letter} <= {row.most}" for letter in "LS"]
    assert_agrees(program_of(call, row, row.symbols, bounds), call, row, row.symbols)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("row", [row for row in ROWS.values() if "L" in row.symbols])
def test_self_attention(row: Row) -> None:
    """One symbol is the number of the queries and that of the keys."""
    call, length = call_of(row), symbols_of("L", [f"L <= {row.most}"] if row.most < np.inf else [])["L"]
    sizes, arrays = FIXED | TRACED | {"L": length, "S": length}, row.draw(TRACED)
    shapes = [tuple(sizes[letter] for letter in axes) for axes in row.axes]
    program = exported(
        call, *(jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, arrays, strict=True))
    )
    for number in (3, 8, 12):
        arrays = [jax.numpy.asarray(x) for x in row.draw(TRACED | {"L": number, "S": number})]
        np.testing.assert_allclose(program(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("symbols", ["L", "S", "B", "BLS"])
@pytest.mark.parametrize(
    "name", ["plain", "is_causal", "window, lower right", "padding", "T5", "ALiBi, lower right"]
)
def test_some_lengths_are_known(name: str, symbols: str) -> None:
    row = ROWS[name]
    call = call_of(row)
    if symbols != "BLS":
        assert_agrees(program_of(call, row, symbols), call, row, symbols)
        return
    arrays = [jax.numpy.asarray(x) for x in row.draw({"B": 3, "L": 6, "S": 9})]
    program = program_of(call, row, symbols, ["L >= 2", "S >= L"])
    np.testing.assert_allclose(program(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "name",
    ["plain", "window", "padding", "ALiBi, lower right", "T5", "function of the scores", "softcap, sinks"],
)
def test_gradients_of_an_exported_program(name: str) -> None:
    row = ROWS[name]
    call = with_gradients(call_of(row), row)
    assert_agrees(program_of(call, row, row.symbols), call, row, row.symbols)


def test_the_kernel_of_jax() -> None:
    """It needs values as wide as the keys."""
    batch, *lengths = symbols_of("BLS").values()
    specs = [jax.ShapeDtypeStruct((batch, 4, n, 8), F) for n in lengths]

    def call(query: Any, key: Any) -> Any:
        mask = masks.sliding_window(2, 1)
        return scaled_dot_product_attention(query, key, key, mask, implementation="native")

    program = exported(call, *specs)
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((3, 4, n, 8)).astype(F) for n in (6, 9)]
    expected = call(*map(jax.numpy.asarray, arrays))
    np.testing.assert_allclose(program(*arrays), expected, rtol=2e-5, atol=2e-5)


FUNCTIONS = functions(jax.numpy.ones(1)) | {
    "dropout": lambda q, k, v: scaled_dot_product_attention(
        q, k, v, dropout_p=0.4, rng=jax.random.PRNGKey(3), is_causal=True
    ),
    "halves": lambda q, k, v: scaled_dot_product_attention(
        *(x.astype(jax.numpy.bfloat16) for x in (q, k, v)), is_causal=True
    ).astype(F),
    "dot_product_attention": lambda q, k, _: dot_product_attention(
        q.swapaxes(1, 2), k.swapaxes(1, 2), k.swapaxes(1, 2), is_causal=True
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_other_functions(call: Callable[..., Any]) -> None:
    row = ROWS["plain"]
    program = program_of(call, row, "BLS")
    for lengths in ({"B": 3, "L": 6, "S": 9}, {"B": 2, "L": 2, "S": 4}):
        arrays = [jax.numpy.asarray(x) for x in row.draw(lengths)]
        for one, other in zip(*map(jax.tree.leaves, (program(*arrays), call(*arrays))), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def _names(option: Any) -> set[str]:
    return (
        {option.name}.union(*map(_names, option.parts))
        if isinstance(option, masks.Mask | biases.Bias)
        else set()
    )


def test_each_mask_and_bias_has_a_row() -> None:
    keywords = [row.keywords(*row.draw(TRACED)[len(INPUTS) :]) for row in ROWS.values()]
    named = set[str]().union(*(_names(option) for options in keywords for option in options.values()))
    public = {name for name in (*masks.__all__, *biases.__all__) if name.islower()}
    assert public - named == {"to_array"}
