"""Arrays in a file, bfloat16 among them, which NumPy's files do not know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BFLOAT16 = "bfloat16:"  # before the name of an array whose bits are kept


def save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The arrays by their names, in `path`."""
    kept = {}
    for name, array in arrays.items():
        if array.dtype == ml_dtypes.bfloat16:
            name, array = BFLOAT16 + name, array.view(np.uint16)
        kept[name] = array
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **kept)


def load(path: Path) -> dict[str, NDArray[Any]]:
    """What `save` wrote."""
    found = {}
    with np.load(path) as kept:
        for name, array in kept.items():
            if name.startswith(BFLOAT16):
                found[name.removeprefix(BFLOAT16)] = array.view(ml_dtypes.bfloat16)
            else:
                found[name] = array
    return found
