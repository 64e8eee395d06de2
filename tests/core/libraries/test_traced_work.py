"""How much work a traced call is, in counts: products, loops and operations of JAX, and tasks of Dask."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from internals import MOST_BANDS
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
    ("plain", 8): (25, 58, 80),
    ("causal", 8): (43, 133, 184),
    ("padding", 8): (27, 76, 165),
    ("slopes", 8): (39, 72, 116),
    ("softcap", 8): (28, 67, 91),
    ("plain", 4096): (34, 106, 131),
    ("causal", 4096): (230, 853, 1032),
    ("padding", 4096): (36, 126, 170),
    ("slopes", 4096): (50, 137, 171),
    ("softcap", 4096): (37, 118, 142),
}
"""Operations of the call, of its gradients by JAX, and of those by the library; none to be raised.

A long causal call has four loops, and its gradients by the library four more."""
KINDS = ("call", "gradients by JAX", "gradients by the library")
TASKS = {"plain": 4, "causal": 4, "padding": 4, "slopes": 5, "softcap": 4}
"""Tasks of Dask's graph for one block, likewise: two inputs, a state, the output, and the slopes."""


RULES_OF_DERIVATIVES = {"checkpoint", "remat2", "custom_jvp_call", "stop_gradient"}
"""What says how operations are differentiated, and is no operation of a compiled program."""


def operations(program: Any) -> Iterator[Any]:
    """Those of a program of JAX, and of the programs in it."""
    for operation in program.eqns:
        if operation.primitive.name not in RULES_OF_DERIVATIVES:
            yield operation
        for parameter in operation.params.values():
            for value in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


@pytest.fixture
def _of_jax(library: Library) -> Iterator[None]:
    if library.name != "jax":
        pytest.skip("a program of JAX")
    with library.guard():
        yield


@cache
def counted(name: str, kind: str, length: int) -> Counter[str]:
    """Of the call, of its gradients by JAX, or of those by the library; several tests ask about one program."""
    import jax

    def call(*inputs: Any) -> Any:
        return scaled_dot_product_attention(*inputs, implementation="xp", **RULES[name])

    def pulled(*inputs: Any) -> Any:
        output, pullback = vjp(*inputs, **RULES[name])
        return pullback(output)

    derived = jax.grad(lambda *inputs: call(*inputs).sum(), argnums=(0, 1, 2))
    function = dict(zip(KINDS, (call, derived, pulled), strict=True))[kind]
    query, shared = (jax.ShapeDtypeStruct((2, heads, length, 16), np.float32) for heads in (4, 2))
    program = jax.make_jaxpr(function)(query, shared, shared)
    return Counter(operation.primitive.name for operation in operations(program.jaxpr))


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize("length", [8, 300, 4096])
@pytest.mark.parametrize("name", RULES)
def test_two_products_and_one_exponential(name: str, length: int) -> None:
    """In one loop where the call is long, and else in none; a long causal call has a loop for each band."""
    count = counted(name, KINDS[0], length)
    loops = 0 if length <= 300 else MOST_BANDS if name == "causal" else 1
    assert count["dot_general"] == 2 * max(1, loops)
    assert count["exp"] == max(1, loops)
    assert count["scan"] + count["while"] == loops


def pairs(rules: dict[str, Any], length: int) -> int:
    """The scores that the loops of a call compute, in all heads."""
    import jax

    x = jax.ShapeDtypeStruct((2, 4, length, 16), np.float32)
    program = jax.make_jaxpr(lambda *inputs: scaled_dot_product_attention(*inputs, **rules))(x, x, x)
    loops = [operation for operation in operations(program.jaxpr) if operation.primitive.name == "scan"]
    products = [
        (
            loop.params["length"],
            next(operation for operation in operations(loop.params["jaxpr"].jaxpr) if is_product(operation)),
        )
        for loop in loops
    ]
    return sum(length * math.prod(product.outvars[0].aval.shape) for length, product in products)


def is_product(operation: Any) -> bool:
    return bool(operation.primitive.name == "dot_general")


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize(
    ("rules", "share"),
    [
        ({}, 1),
        ({"is_causal": True}, 5 / 8),
        ({"attn_mask": masks.sliding_window(100, 0)}, 0.3),
        ({"attn_mask": masks.causal("lower_right")}, 5 / 8),
    ],
    ids=["all pairs", "causal", "window", "lower right"],
)
def test_a_band_reads_its_keys_alone(rules: dict[str, Any], share: float) -> None:
    assert 0 < pairs(rules, 4096) <= share * 8 * 4096**2


@pytest.mark.usefixtures("_of_jax")
def test_several_devices_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A band may lie on one of them, and the others would wait."""
    monkeypatch.setattr("jax.device_count", lambda: 2)
    assert pairs({"is_causal": True}, 4096) == 8 * 4096**2


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize("name", RULES)
def test_products_of_gradients(name: str) -> None:
    """JAX keeps the weights of a short call, and computes those of a long one again; the library always does.

    What a mask may hide is looked at for NaN, which takes three products more.
    """
    for length, by_jax in ((8, 6), (4096, 8 * MOST_BANDS if name == "causal" else 8)):
        assert counted(name, KINDS[1], length)["dot_general"] == by_jax
        bands = MOST_BANDS if (name, length) == ("causal", 4096) else 1
        # The loops of a long call read no padding.
        masked = 3 if (name, length) in (("causal", 8), ("causal", 4096), ("padding", 8)) else 0
        assert counted(name, KINDS[2], length)["dot_general"] == bands * (2 + 5 + masked)


@pytest.mark.usefixtures("_of_jax")
@pytest.mark.parametrize(("name", "length"), MOST)
def test_operations(name: str, length: int) -> None:
    counts = tuple(sum(counted(name, kind, length).values()) for kind in KINDS)
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
