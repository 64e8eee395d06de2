"""The library on a CUDA device, held against the reference. tests/gpu/run.py runs it."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.devices import on_cuda

from sdpa_xp_export._agree import comparison as agree


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_library_on_the_device_agrees(name: str, dtype: str) -> None:
    rows = [*agree.compare(agree.feature_jobs(dtype), dtype, on_cuda(name), [])]
    assert rows
    for row in rows:
        assert row.agrees, row
        assert np.isfinite(row.worst.absolute)
