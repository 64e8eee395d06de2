"""The widest dtype that a device has."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np
import pytest

from sdpa_xp.namespace import real_dtypes, widest_dtype


@pytest.mark.needs("torch")
def test_of_torch() -> None:
    """Apple's devices have no float64; torch itself says that they have."""
    import torch

    xp: Any = array_api_compat.array_namespace(torch.zeros(1))
    for device, names in (
        ("cpu", ["float32", "float64"]),
        ("cuda", ["float32", "float64"]),
        ("mps", ["float32"]),
    ):
        assert list(real_dtypes(xp, torch.device(device))) == names
        assert widest_dtype(xp, torch.device(device)) == getattr(torch, names[-1])


def test_of_numpy() -> None:
    xp: Any = array_api_compat.array_namespace(np.zeros(1))
    assert list(real_dtypes(xp, "cpu")) == ["float32", "float64"]
    assert widest_dtype(xp, "cpu") == np.float64


@pytest.mark.needs("array_api_strict")
def test_of_a_library_that_says_what_it_has() -> None:
    import array_api_strict as strict

    assert widest_dtype(strict, strict.Device("no_x64")) == strict.float32
    assert widest_dtype(strict, strict.Device("CPU_DEVICE")) == strict.float64
