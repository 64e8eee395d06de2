"""Messages between two processes: JSON and the bytes of arrays. Neither side runs what the other sends."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LENGTH = struct.Struct("<Q")
LONGEST = 2**26
"""Bytes of the text of a message."""
DTYPES = {
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{name: np.dtype(name) for name in ("bool", "float16", "float32", "float64")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of arrays that travel."""


class TooLargeError(ValueError):
    """The arrays of a message take more bytes than the reader wants."""


class Frame(NamedTuple):
    """A message: what it says, and arrays by name."""

    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def send(file: IO[bytes], facts: Mapping[str, object], arrays: Mapping[str, Any] | None = None) -> None:
    """Write a message.

    Raises:
        TypeError: An array holds something else than numbers, such as texts; nothing was written then.
    """
    whole = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    for name, array in whole.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"{name} must be an array of numbers, got {array.dtype}")
    stated = [(name, array.dtype.name, array.shape) for name, array in whole.items()]
    text = json.dumps({"facts": facts, "arrays": stated}).encode()
    file.write(LENGTH.pack(len(text)) + text)
    for array in whole.values():
        file.write(array.reshape(-1).view(np.uint8).data)  # a view: NumPy has no buffer of bfloat16
    file.flush()


def receive(file: IO[bytes], most: float = math.inf) -> Frame:
    """Read a message whose arrays take at most `most` bytes.

    Raises:
        EOFError: The other process closed its side, or has ended.
        TooLargeError: The arrays take more.
        ValueError: What came is no message.
    """
    (length,) = LENGTH.unpack(_bytes(file, LENGTH.size))
    if length > LONGEST:
        raise ValueError("the text of a message is too long")
    head = json.loads(_bytes(file, length).tobytes())
    arrays, left = {}, most
    for name, dtype, shape in head["arrays"]:
        if dtype not in DTYPES:
            raise ValueError(f"no dtype of numbers: {dtype}")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if min(shape, default=0) < 0:
            raise ValueError("no array has a negative length")
        if size > left:
            raise TooLargeError
        left -= size
        arrays[name] = _bytes(file, size).view(DTYPES[dtype]).reshape(shape)
    return Frame(head["facts"], arrays)


def _bytes(file: IO[bytes], count: int) -> Any:
    """Return the next bytes as an array that may be written to."""
    data = np.empty(count, np.uint8)
    read = 0
    while read < count:
        more = file.readinto(data.data[read:])  # type: ignore[attr-defined]  # a pipe has it, `IO` not
        if not more:
            raise EOFError("the other process has ended")
        read += more
    return data
