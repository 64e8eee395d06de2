"""What the models compute as they are exported, and whether others compute the same."""

from __future__ import annotations

from functools import cache

import numpy as np
from tools.models import MODELS, run

CLOSE = 4e-6
"""What errors may be, over the largest number of an output: a few roundings of float32."""


@cache
def expected(name: str, size: int) -> list[np.ndarray]:
    return run(MODELS[name].model, MODELS[name].feeds(size))


def assert_equal(got: list[np.ndarray], right: list[np.ndarray], close: float = CLOSE) -> None:
    assert [array.shape for array in got] == [array.shape for array in right]
    for one, other in zip(got, right, strict=True):
        finite = np.isfinite(other)
        assert (np.isfinite(one) == finite).all()
        most = np.abs(other[finite]).max()
        assert most > 0.1
        assert np.abs(one - other)[finite].max() <= close * most
