"""Arrays in a file, as one process of the tests hands them to another; bfloat16 among them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray


def save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The arrays by their names, in `path`."""
    path.write_bytes(pickle.dumps(dict(arrays), protocol=5))


def load(path: Path) -> dict[str, NDArray[Any]]:
    """What `save` wrote."""
    return cast("dict[str, NDArray[Any]]", pickle.loads(path.read_bytes()))
