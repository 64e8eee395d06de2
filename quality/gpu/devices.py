"""The CUDA devices of a library, for tests that need one."""

from __future__ import annotations

import pytest
from internals import Backend, backends


def on_cuda(name: str) -> list[Backend]:
    """The library on each CUDA device here."""
    try:
        installed = backends.find_backends([name])
    except ValueError as error:
        pytest.skip(str(error))
    devices = [backend for backend in installed if backend.device.startswith("cuda")]
    return devices or pytest.skip(f"{name} has no CUDA device here")
