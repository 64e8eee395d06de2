"""Views whose elements may share memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy._arrays import ndarray


def as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    """Return a view, which can be written to."""
    return x._view(np.lib.stride_tricks.as_strided(x._values, shape, strides))
