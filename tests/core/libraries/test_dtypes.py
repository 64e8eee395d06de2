"""The name of a dtype in the classes of any library, and the widest dtype that a device has."""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat
import numpy as np
import pytest
from internals import dtype_name, library_of, widest_dtype


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("toy.float32", "float32"),
        ("Float32", "float32"),
        ("<DType bfloat16>", "bfloat16"),
        ("toy.Dtype('float16')", "float16"),
        ("Bool", "bool"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("datetime64[s]", "datetime64[s]"),
    ],
)
def test_name_of_a_dtype_that_prints_it(printed: str, name: str) -> None:
    class Dtype:
        def __str__(self) -> str:
            return printed

    assert dtype_name(Dtype()) == name


@pytest.mark.needs("torch")
def test_of_torch() -> None:
    """Apple's devices have no float64; torch itself says that they have."""
    import torch

    tensor = torch.zeros(1)
    xp: Any = array_api_compat.array_namespace(tensor)
    for device, names in (
        ("cpu", ["float32", "float64"]),
        ("cuda", ["float32", "float64"]),
        ("mps", ["float32"]),
    ):
        has = partial(library_of(tensor).has_dtype, "explain", xp, torch.device(device))
        assert [name for name in ("float32", "float64") if has(name)] == names
    assert widest_dtype("to_array", tensor) == torch.float64


def test_of_numpy() -> None:
    array = np.zeros(1, np.float32)
    xp: Any = array_api_compat.array_namespace(array)
    assert all(library_of(array).has_dtype("explain", xp, "cpu", name) for name in ("float32", "float64"))
    assert widest_dtype("to_array", array) == np.float64


@pytest.mark.needs("array_api_strict")
def test_of_a_library_that_says_what_it_has() -> None:
    import array_api_strict as strict

    for device, widest in (("no_x64", strict.float32), ("CPU_DEVICE", strict.float64)):
        array = strict.zeros(1, dtype=strict.float32, device=strict.Device(device))
        assert widest_dtype("to_array", array) == widest
