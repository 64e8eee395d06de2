"""The rotation of rotary embeddings in float64, written with complex numbers."""

from __future__ import annotations

import math

import numpy as np

from sdpa_xp.positional import Rotary, YaRNScaling


def turned(x: np.ndarray, positions: np.ndarray, rotary: Rotary) -> np.ndarray:
    """(..., H, L, E) at positions (..., L), by products of complex numbers in float64."""
    half, width = rotary.width // 2, rotary.width
    angles = positions[..., None, :, None] * np.asarray(rotary.frequencies)
    factor = 0.1 * math.log(4) + 1 if isinstance(rotary.scaling, YaRNScaling) else 1.0
    one, other = (
        (slice(0, width, 2), slice(1, width, 2)) if rotary.interleaved else (slice(half), slice(half, width))
    )
    pairs = (x[..., one] + 1j * x[..., other]) * factor * np.exp(1j * angles)
    result = x.astype(np.float64)
    result[..., one], result[..., other] = pairs.real, pairs.imag
    return result
