"""Calls that many tests make: their arrays, the call on a library, and whether its result is right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
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


def ones(*shape: int, dtype: Any = F) -> np.ndarray:
    return np.ones(shape, dtype)


def sloping(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod of all its indices, also where integers are not promoted to floating numbers."""
    return score * 0.5 + namespace(score).astype(h * b - i + j, score.dtype)


def moved(x: np.ndarray, layout: str) -> np.ndarray:
    """Return an array in the default layout in `layout`, or one in `layout` in the default."""
    return x if layout == "...HLE" else np.ascontiguousarray(np.swapaxes(x, -2, -3))


def attend(library: Library, *arrays: np.ndarray, **rules: Any) -> np.ndarray:
    """Return the output that the library computes, as a NumPy array."""
    return library.get(library.call(scaled_dot_product_attention, *arrays, **rules))


def assert_agrees(
    library: Library,
    result: np.ndarray,
    call: Mapping[str, np.ndarray],
    sinks: np.ndarray | None = None,
    **rules: Any,
) -> None:
    """Assert that the output of a call is as near to the reference as the house's rule asks.

    A sink joins the sum of a row, so it takes its share of the output.
    """
    with np.errstate(all="ignore"):
        plain = library.get(library.compiled.call(partial(textbook, library.xp), **call, **rules))
        output, lse, _ = reference.attention(**call, **rules)
        share = 1.0 if sinks is None else 1 / (1 + np.exp(sinks[..., None] - lse))[..., None]
    agreement = judge(result, output * share, plain * share, call["query"].dtype.name)
    assert agreement.agrees, agreement
