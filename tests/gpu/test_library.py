"""The library on a CUDA device, held against the reference. tests/gpu/run.py runs it."""

from __future__ import annotations

import numpy as np
import pytest

from sdpa_xp_export import agree, backends
from sdpa_xp_export.backends import Backend


def on_cuda(name: str) -> list[Backend]:
    """The library on each CUDA device here."""
    try:
        found = backends.find([name])
    except ValueError as error:
        pytest.skip(str(error))
    devices = [backend for backend in found if backend.device.startswith("cuda")]
    return devices or pytest.skip(f"{name} has no CUDA device here")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_library_on_the_device_agrees(name: str, dtype: str) -> None:
    rows = [*agree.compare(agree.feature_jobs(dtype), dtype, on_cuda(name), [])]
    assert rows
    for row in rows:
        assert row.agrees, row
        assert np.isfinite(row.worst.absolute)
