"""The derivatives that JAX and MLX compute themselves: in any order, and beside a masked NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from differentiable_calls import CALLS, FEW, HOLES, MANY
from libraries import Library
from transformations import Function, Transformations, transformations

from sdpa_xp import biases
from sdpa_xp import scaled_dot_product_attention as attend
from sdpa_xp import scaled_dot_product_attention_vjp as vjp


@pytest.fixture(autouse=True)
def _of_jax_and_mlx(library: Library) -> None:
    if library.name not in ("jax-x64", "mlx"):
        pytest.skip("it computes no derivatives, or has tests of its own")


def of_two(by: Transformations, function: Function, arrays: Sequence[Any]) -> Any:
    """The results for two equal queries, mapped at once, with the same other arrays."""
    query, *others = arrays
    return by.vmap(lambda query: function(query, *others))(by.stack([query, query]))


def derivatives(
    library: Library,
    function: Function,
    arrays: Sequence[Any],
    tangents: Sequence[Any],
    cotangent: Any,
    *,
    compiles: bool,
) -> dict[str, list[np.ndarray]]:
    """By the order in which they are computed. The second ones are the Hessian times the tangents."""
    by, count = transformations(library.name), len(arrays)

    def gradients(*arrays: Any) -> Any:
        return tuple(by.vjp(function, arrays, [cotangent]))

    def tangent(*arrays: Any) -> Any:
        return tuple(by.jvp(function, arrays, tangents))

    orders: dict[str, Function] = {
        "reverse": lambda *x: list(gradients(*x)),
        "forward": lambda *x: list(tangent(*x)),
        "forward over reverse": lambda *x: by.jvp(gradients, x, tangents),
        "reverse over reverse": lambda *x: by.vjp(gradients, x, tangents),
        "reverse over forward": lambda *x: by.vjp(tangent, x, [cotangent]),
        "reverse, mapped": lambda *x: by.vmap(gradients)(*(y[None] for y in x)),
        "reverse, two mapped": lambda *x: of_two(by, gradients, x),
        "reverse of two mapped": lambda *x: by.vjp(
            lambda *x: of_two(by, function, x), x, [by.stack([0.25 * cotangent, 0.75 * cotangent])]
        ),
    }

    def all_of(*arrays: Any) -> list[Any]:
        return [x for order in orders.values() for x in order(*arrays)]

    with library.guard():
        computed = iter([library.get(x) for x in (by.compiled(all_of) if compiles else all_of)(*arrays)])
    counts = {name: 1 if name == "forward" else count for name in orders}
    by_order = {name: [next(computed) for _ in range(n)] for name, n in counts.items()}
    for name in ("reverse, mapped", "reverse, two mapped"):
        by_order[name] = [x[0] for x in by_order[name]]
    return by_order


def of_call(call: Call, library: Library) -> tuple[dict[str, np.ndarray], Function, list[Any]]:
    """The arrays of a call, and the call as a function of them."""
    arrays = autograd.arrays(call, np.random.default_rng(3), np.float64)
    with library.guard():
        placed = {name: library.put(x) for name, x in arrays.items()}

    def function(*leaves: Any) -> Any:
        named = dict(zip(arrays, leaves, strict=True))
        rules = {k: library.put(x) if isinstance(x, np.ndarray) else x for k, x in call.rules.items()}
        keywords = autograd.keywords(call._replace(rules=rules), named)
        return (attend(*(named[name] for name in autograd.INPUTS), implementation="xp", **keywords),)

    return arrays, function, [*placed.values()]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        *("2-D", "batches broadcast", "causal", "padding of both", "bias of each pair"),
        *("biases of several kinds", "relative", "scale of each query", "softcap"),
        *("sinks of each entry, and an empty row", "all"),
    ],
)
def test_any_order_agrees_with_the_textbook(library: Library, name: str) -> None:
    if (library.name, name) == ("mlx", "relative"):
        pytest.skip("MLX has no forward mode of the gradient of a table")
    call = CALLS[name]
    arrays, function, placed = of_call(call, library)
    rng = np.random.default_rng(4)
    moved = {n: rng.standard_normal(x.shape) for n, x in arrays.items()}
    shape = autograd.output_and_weights(call, arrays, "float64")[0].shape
    cotangent = rng.standard_normal(shape)
    with library.guard():
        tangents, placed_cotangent = [library.put(x) for x in moved.values()], library.put(cotangent)
    by_order = derivatives(
        library, function, placed, tangents, placed_cotangent, compiles=library.name != "mlx"
    )
    first = autograd.gradients(call, arrays, cotangent)
    second = autograd.second_order(call, arrays, moved, (cotangent, np.zeros_like(cotangent)))
    expected = {
        order: [second[n] for n in arrays] if "over" in order else [first[n] for n in arrays]
        for order in by_order
    } | {"forward": [autograd.jvp(call, arrays, moved)]}
    for order, results in by_order.items():
        for result, wanted in zip(results, expected[order], strict=True):
            bound = 1e-12 * max(1.0, np.abs(wanted).max())
            np.testing.assert_allclose(result, wanted, rtol=0, atol=bound, err_msg=order)


MASKED: dict[str, dict[str, Any]] = {
    "boolean mask": {"attn_mask": HOLES},
    "with a soft cap": {"attn_mask": HOLES, "softcap": 2.0},
    "bias of -inf": {"bias": np.where(HOLES, 0.5, -math.inf)},
    "bias of -inf with a soft cap": {"bias": np.where(HOLES, 0.5, -math.inf), "softcap": 2.0},
    "learned scale and sinks": {
        "attn_mask": HOLES,
        "scale": np.linspace(0.1, 0.5, FEW)[:, None],
        "sinks": np.linspace(-1, 1, 4),
    },
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", MASKED.values(), ids=MASKED)
def test_masked_nan_adds_nothing(library: Library, rules: dict[str, Any]) -> None:
    """To any derivative: of a key and a value that no query attends to, and of a query without keys."""
    rng = np.random.default_rng(5)
    empty, unseen = HOLES.any(axis=1).tolist().index(False), HOLES.any(axis=0).tolist().index(False)
    clean = [rng.standard_normal(shape) for shape in ((2, 4, FEW, 8), (2, 2, MANY, 8), (2, 2, MANY, 5))]
    bad = [x.copy() for x in clean]
    bad[0][..., empty, :], bad[1][..., unseen, :], bad[2][..., unseen, :] = math.nan, math.inf, math.nan
    more = [rules[name] for name in ("scale", "sinks") if name in rules]
    tangents = [rng.standard_normal(x.shape) for x in (*clean, *more)]
    cotangent = rng.standard_normal((2, 4, FEW, 5))
    compiles = library.name != "mlx"

    def computed(inputs: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        with library.guard():
            arrays, moved = ([library.put(x) for x in part] for part in ((*inputs, *more), tangents))
            fixed = {k: library.put(x) if isinstance(x, np.ndarray) else x for k, x in rules.items()}
            placed_cotangent = library.put(cotangent)

        def function(query: Any, key: Any, value: Any, *more: Any) -> Any:
            learned = dict(zip(("scale", "sinks"), more, strict=bool(more)))
            return (attend(query, key, value, implementation="xp", **fixed | learned),)

        return derivatives(library, function, arrays, moved, placed_cotangent, compiles=compiles)

    expected = computed(clean)
    for order, results in computed(bad).items():
        for result, wanted in zip(results, expected[order], strict=True):
            np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12, err_msg=order)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_nan_shows_where_it_is_attended(library: Library, softcap: float | None) -> None:
    """Rows before the fifth key do not attend to it, and the keys after the last row are attended by none."""
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal((2, length, 4)) for length in (7, 9, 9)]
    arrays[1][:, 4] = math.nan
    by = transformations(library.name)
    with library.guard():
        mask = library.put(np.tri(7, 9, dtype=bool))

    def function(*inputs: Any) -> Any:
        output = attend(*inputs, mask, softcap=softcap, implementation="xp")
        return (output * output,)

    with library.guard():
        cotangent = library.put(np.ones((2, 7, 4)))
        gradients = [library.get(x) for x in by.vjp(function, [library.put(x) for x in arrays], [cotangent])]
    bad_rows, bad_keys = [False] * 4 + [True] * 3, [True] * 7 + [False] * 2
    for gradient, is_bad in zip(gradients, (bad_rows, bad_keys, bad_keys), strict=True):
        np.testing.assert_array_equal(np.isnan(gradient).any(axis=(0, 2)), is_bad)


def test_masked_nan_adds_nothing_to_derivatives_of_a_pullback(library: Library) -> None:
    rng = np.random.default_rng(8)
    clean = [rng.standard_normal((2, length, 4)) for length in (3, 5, 5)]
    bad = [x.copy() for x in clean]
    bad[1][:, 4] = bad[2][:, 4] = math.nan
    by = transformations(library.name)
    with library.guard():
        mask = library.put(np.arange(5) < 4)

    def function(*inputs: Any) -> Any:
        output, pullback = vjp(*inputs, mask, softcap=2.0)
        gradients, moved = pullback.jvp(output, {"query": inputs[0]})
        return (gradients["query"], moved["query"], moved["value"])

    def computed(arrays: list[np.ndarray]) -> list[np.ndarray]:
        with library.guard():
            placed = [library.put(x) for x in arrays]
            ones = [library.put(np.ones_like(x)) for x in (clean[0], clean[0], clean[2])]

            def derivatives(*inputs: Any) -> Any:
                return tuple(by.vjp(function, inputs, ones))

            return [library.get(x) for x in by.compiled(derivatives)(*placed)]

    for gradient, wanted in zip(computed(bad), computed(clean), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-12)


def test_a_nan_that_a_function_masks_adds_nothing_to_the_array_that_it_reads(library: Library) -> None:
    query, key, value = (library.put(np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 4, 3)) for _ in "qkv")
    xp, by = library.xp, transformations(library.name)
    is_last = library.put(np.arange(4) == 3)

    def call(factor: Any, bad: float) -> Any:
        def changed(score: Any, *_: Any) -> Any:
            return xp.where(is_last, -math.inf, score * factor)

        keys = xp.where(is_last[:, None], bad, key)
        return (attend(query, keys, value, bias=biases.from_function(changed)),)

    factor = library.put(np.asarray(1.5, np.float32))
    cotangent = [library.put(np.ones((2, 4, 3), np.float32))]
    for_nan, for_zero = (
        by.vjp(lambda factor, bad=bad: call(factor, bad), (factor,), cotangent) for bad in (math.nan, 0.0)
    )
    np.testing.assert_allclose(library.get(for_nan[0]), library.get(for_zero[0]), rtol=1e-6)
