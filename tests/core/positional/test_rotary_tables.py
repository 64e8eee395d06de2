"""Rotary embeddings by the caller's own cosines and sines, alone and in caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_formula import rotated
from calls import draw, moved
from libraries import Library

from sdpa_xp.positional import RotaryTables

F = np.float32
ROWS, TOKENS = 20, 6


def tables(rng: np.random.Generator, *batch: int, width: int = 8, dtype: Any = F) -> list[np.ndarray]:
    """Of random angles and lengths: no formula of positions gives them."""
    angles = rng.uniform(0, 7, (*batch, ROWS, width // 2))
    lengths = rng.uniform(0.5, 2, angles.shape)
    return [(lengths * part).astype(dtype) for part in (np.cos(angles), np.sin(angles))]


def turned(x: np.ndarray, tables: list[np.ndarray], places: Any, *, interleaved: bool = False) -> np.ndarray:
    """(B, H, L, E) at places (B, L) or (L,)."""
    cos, sin = (np.broadcast_to(part, (len(x), *part.shape[-2:])).astype(np.float64) for part in tables)
    rows = np.arange(len(x))[:, None], np.broadcast_to(np.asarray(places), (len(x), TOKENS))
    return rotated(x, (cos + 1j * sin)[rows][:, None], interleaved=interleaved)


@pytest.mark.sampled(5)
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["shared", "of each entry"])
@pytest.mark.parametrize("width", [8, 6])
def test_apply_and_inverse(
    library: Library, rng: np.random.Generator, batch: Any, interleaved: bool, layout: Any, width: int
) -> None:
    (x,), (cos, sin) = draw(rng, (2, 3, TOKENS, 8)), tables(rng, *batch, width=width)
    anywhere = rng.integers(0, ROWS, (2, TOKENS))
    cases = [
        (4, range(4, 4 + TOKENS)),
        ([*range(TOKENS)], range(TOKENS)),
        (anywhere.astype(np.int32), anywhere),
    ]
    for positions, places in cases:
        with library.guard():
            rotary = RotaryTables(library.put(cos), library.put(sin), interleaved=interleaved)
            token_positions = library.put(positions) if isinstance(positions, np.ndarray) else positions
            there = rotary.apply(library.put(moved(x, layout)), token_positions, layout=layout)
            back = rotary.inverse(there, token_positions, layout=layout)
        expected = turned(x, [cos, sin], places, interleaved=interleaved)
        np.testing.assert_allclose(moved(library.get(there), layout), expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(moved(library.get(back), layout), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_tables_of_another_dtype(rng: np.random.Generator, dtype: Any) -> None:
    """The result has the dtype of what is rotated; the tables are rounded no further than its accumulation."""
    (x,), (cos, sin) = draw(rng, (2, 3, TOKENS, 8)), tables(rng, dtype=dtype)
    output = RotaryTables(cos, sin).apply(x, 2)
    assert output.dtype == F
    places = range(2, 2 + TOKENS)
    np.testing.assert_allclose(output, turned(x, [cos, sin], places), rtol=0, atol=2e-6)


def test_cos_sin(library: Library, rng: np.random.Generator) -> None:
    """The rows of the tables, in their own library."""
    cos, sin = tables(rng)
    with library.guard():
        rotary = RotaryTables(library.put(cos), library.put(sin), interleaved=True)
        rows = [library.get(table) for table in rotary.cos_sin([3, 0])]
    np.testing.assert_array_equal(rows, [cos[[3, 0]], sin[[3, 0]]])
    assert rotary.width == 8
