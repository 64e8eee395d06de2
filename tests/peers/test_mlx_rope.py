"""Rotations against mx.fast.rope: its names, and its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdpa_xp.positional import Rotary

mx = pytest.importorskip("mlx.core")


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("width", "base", "offset"), [(8, 10000.0, 0), (6, 100.0, 11)])
def test_rope(traditional: bool, width: int, base: float, offset: Any, rng: np.random.Generator) -> None:
    """Its angles are in float32: of 16 radians they are off by a millionth."""
    x = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    options = {"traditional": traditional, "base": base, "scale": 1.0, "offset": offset}
    expected = mx.fast.rope(mx.array(x), width, **options)
    output = Rotary(width, base, interleaved=traditional).apply(mx.array(x), offset)
    bound = 2.0**-20 * np.abs(x).max()
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=bound)
