"""Calls that many tests make: their arrays, the call on a library, and whether its result is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from internals import judge, namespace, reference, textbook
from libraries import Library

from sdpa_xp import scaled_dot_product_attention

F = np.float32


def draw(rng: np.random.Generator, *shapes: tuple[int, ...], dtype: Any = F) -> list[np.ndarray]:
    """Return an array of normal numbers for each shape."""
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def draw_named(
    rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]], dtype: Any = F
) -> dict[str, np.ndarray]:
    """Return arrays of normal numbers by name: the arguments of a call."""
    return dict(zip(shapes, draw(rng, *shapes.values(), dtype=dtype), strict=True))


def draw_masked(
    rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...] | None], dtype: Any = F
) -> dict[str, np.ndarray]:
    """Return the arrays of a call: a mask with an empty row where it has rows, a bias with some -inf."""
    named = {name: shape for name, shape in shapes.items() if shape is not None}
    arrays = draw_named(rng, named, dtype)
    if "attn_mask" in named:
        arrays["attn_mask"] = rng.random(named["attn_mask"]) < 0.7
        if len(named["attn_mask"]) > 1:
            arrays["attn_mask"][..., 0, :] = named["attn_mask"][-2] == 1
    if "bias" in named:
        arrays["bias"][rng.random(named["bias"]) < 0.2] = -np.inf
    return arrays


def ones(*shape: int, dtype: Any = F) -> np.ndarray:
    return np.ones(shape, dtype)


def sloping(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod of all its indices, also where integers are not promoted to floating numbers."""
    return score * 0.5 + namespace(score).astype(h * b - i + j, score.dtype)


def moved(x: np.ndarray, layout: str) -> np.ndarray:
    """Return an array in the default layout in `layout`, or one in `layout` in the default."""
    return x if layout == "...HLE" else np.ascontiguousarray(np.swapaxes(x, -2, -3))


def bits(state: Any, index: Any = ...) -> list[bytes]:
    """Of the output and the log-sum-exp, or of some entries, heads and rows of both."""
    return [x[index].tobytes() for x in state]


def attend(library: Library, *arrays: np.ndarray, **rules: Any) -> np.ndarray:
    """Return the output that the library computes, as a NumPy array."""
    return library.get(library.call(scaled_dot_product_attention, *arrays, **rules))


def gradients(library: Library, function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of a scalar function by the library itself; skip the test if it has none."""
    base, numbers = library.name.split("-")[0], tuple(range(len(arrays)))
    with library.guard():
        placed = [library.put(x) for x in arrays]
        if base == "torch":
            import torch

            placed = [x.clone().requires_grad_() for x in placed]
            results = torch.autograd.grad(function(*placed), placed)
        elif base == "jax":
            import jax

            results = jax.jit(jax.grad(function, numbers))(*placed)  # compiled once, not by operation
        elif base == "mlx":
            import mlx.core as mx

            results = mx.grad(lambda drawn: function(*drawn))(placed)  # of a tuple of one number: no list
        else:
            pytest.skip("the library has no gradients")
    return [library.get(x) for x in results]


def vmap_of(library: Library) -> Callable[..., Any]:
    """Return the function that maps another over a batch; skip the test if the library has none."""
    base = library.name.split("-")[0]
    if base == "jax":
        import jax

        return jax.vmap
    if base == "torch":
        import torch

        return torch.func.vmap
    if base == "mlx":
        import mlx.core as mx

        return mx.vmap
    pytest.skip("the library has no vmap")


def tracer_of(library: Library) -> Callable[..., Any]:
    """Return what makes one graph of a function: a jit, or torch.compile; skip the test without one."""
    if library.jit is not None:
        return library.jit
    if library.name.partition("-")[0] != "torch":
        pytest.skip("the library has no traces")
    import torch

    torch.compiler.reset()
    return partial(torch.compile, fullgraph=True, backend="eager")


def assert_agrees(library: Library, result: np.ndarray, call: Mapping[str, np.ndarray], **rules: Any) -> None:
    """Assert that the output of a call is as near to the reference as the house's rule asks."""
    with np.errstate(all="ignore"):
        plain = library.get(library.compiled.call(partial(textbook, library.xp), **call, **rules))
        expected, _, weights = reference.attention(**call, **rules)
    agreement = judge(result, expected, plain, call["query"].dtype.name, largest_terms(weights, call["value"]))
    assert agreement.agrees, agreement


def largest_terms(weights: np.ndarray, value: np.ndarray) -> float:
    """The largest sum of the sizes of what an output adds: its error has this size, whatever is added first."""
    if value.ndim > 2:
        value = np.repeat(value, weights.shape[-3] // value.shape[-3], axis=-3)
    sizes = np.abs(np.where(np.isfinite(value), value, 0).astype(np.float64))
    return float(np.max(np.where(np.isfinite(weights), weights, 0) @ sizes, initial=0.0))
