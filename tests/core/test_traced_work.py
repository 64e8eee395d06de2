"""How much work a traced call is, in counts: products, loops and operations of JAX, and tasks of Dask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from libraries import Library

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": masks.padding(3)},
    "slopes": {"bias": biases.alibi(4)},
    "softcap": {"softcap": 2.0},
}
MOST = {
    ("plain", 8): (25, 70, 80),
    ("causal", 8): (43, 96, 183),
    ("padding", 8): (27, 74, 164),
    ("slopes", 8): (39, 84, 116),
    ("softcap", 8): (28, 79, 91),
    ("plain", 4096): (35, 125, 92),
    ("causal", 4096): (55, 175, 197),
    ("padding", 4096): (37, 131, 176),
    ("slopes", 4096): (51, 156, 130),
    ("softcap", 4096): (38, 137, 103),
}
"""Operations of the call, of its gradients by JAX, and of those by the library; none to be raised."""
TASKS = {"plain": 4, "causal": 4, "padding": 4, "slopes": 5, "softcap": 4}
"""Tasks of Dask's graph for one block, likewise: two inputs, a state, the output, and the slopes."""


def operations(program: Any) -> Iterator[Any]:
    """Those of a program of JAX, and of the programs in it."""
    for operation in program.eqns:
        yield operation
        for parameter in operation.params.values():
            for value in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


def counted(function: Callable[..., Any], length: int) -> Counter[str]:
    import jax

    query, shared = (jax.ShapeDtypeStruct((2, heads, length, 16), np.float32) for heads in (4, 2))
    program = jax.make_jaxpr(function)(query, shared, shared)
    return Counter(operation.primitive.name for operation in operations(program.jaxpr))


@pytest.fixture
def _of_jax(library: Library) -> Iterator[None]:
    if library.name != "jax":
        pytest.skip("a program of JAX")
    with library.guard():
        yield


def functions(name: str) -> tuple[Callable[..., Any], ...]:
    """The call, its gradients by JAX, and those by the library."""
    import jax

    def call(*inputs: Any) -> Any:
        return scaled_dot_product_attention(*inputs, implementation="xp", **RULES[name])

    def pulled(*inputs: Any) -> Any:
        output, pullback = vjp(*inputs, **RULES[name])
        return pullback(output)

    return call, jax.grad(lambda *inputs: call(*inputs).sum(), argnums=(0, 1, 2)), pulled


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize("length", [8, 300, 4096])
@pytest.mark.parametrize("name", RULES)
def test_two_products_and_one_exponential(name: str, length: int) -> None:
    """In one loop where the call is long, and else in none."""
    count = counted(functions(name)[0], length)
    assert count["dot_general"] == 2
    assert count["exp"] == 1
    assert count["scan"] + count["while"] == (length > 300)


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize("name", RULES)
def test_products_of_gradients(name: str) -> None:
    """JAX keeps the weights of a short call, and computes those of a long one again; the library always does.

    What a mask may hide is looked at for NaN, which takes three products more.
    """
    for length, by_jax in ((8, 6), (4096, 8)):
        _, derived, pulled = functions(name)
        assert counted(derived, length)["dot_general"] == by_jax
        assert counted(pulled, length)["dot_general"] == (10 if name in ("causal", "padding") else 7)


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize(("name", "length"), MOST)
def test_operations(name: str, length: int) -> None:
    counts = tuple(sum(counted(function, length).values()) for function in functions(name))
    assert all(count <= most for count, most in zip(counts, MOST[name, length], strict=True)), counts


@pytest.mark.parametrize("length", [8, 1100])
@pytest.mark.parametrize("name", RULES)
def test_tasks_of_a_lazy_graph(library: Library, name: str, length: int) -> None:
    if not library.lazy:
        pytest.skip("only Dask has one")
    import dask.array as da

    query, shared = (da.zeros((2, heads, length, 16), dtype=np.float32, chunks=-1) for heads in (4, 2))
    with library.guard():
        output = scaled_dot_product_attention(query, shared, shared, **RULES[name])
    tasks = dict(output.__dask_graph__())
    assert sum("attention-partial" in str(name) for name in tasks) == 1
    assert len(tasks) == TASKS[name], [*tasks]
