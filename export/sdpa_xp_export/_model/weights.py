"""The numbers of an initializer: the caller's array, until a model or a file holds a copy."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from sdpa_xp.errors import ArgumentValueError

COPIED_BELOW = 2**20
"""A smaller array, in bytes, is copied at once; a larger one is referred to, and must not be written to."""

CHUNK = 2**22
"""The count of numbers that are in memory twice while an array is written to a file."""


@dataclass(slots=True, eq=False)
class Weight:
    """An initializer: its name and its numbers, which must not change later."""

    name: str
    array: NDArray[Any]
    checksum: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.array.nbytes < COPIED_BELOW:
            self.array = self.array.copy()
        for chunk in self._read():
            self.checksum = zlib.crc32(chunk, self.checksum)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def chunks(self, function: str) -> Iterator[memoryview]:
        """Yield the numbers in order, little-endian; each part reuses the memory of the one before.

        Args:
            function: The function that messages name.

        Raises:
            ValueError: At the end, if the array was written to since this was made.
        """
        checksum = 0
        for chunk in self._read():
            checksum = zlib.crc32(chunk, checksum)
            yield chunk
        self._check(function, checksum)

    @property
    def kind(self) -> tuple[str, int, tuple[int, ...]]:
        """Return the name, the number that ONNX has for the dtype, and the shape."""
        data_type = helper.np_dtype_to_tensor_dtype(self.array.dtype.newbyteorder("="))
        return self.name, data_type, self.array.shape

    def fill(self, tensor: onnx.TensorProto, function: str) -> None:
        """Copy the name, the dtype, the shape and the numbers to `tensor`."""
        tensor.name, tensor.data_type, dims = self.kind
        tensor.dims.extend(dims)
        raw = self.array.astype(self._little, copy=False).tobytes()
        self._check(function, zlib.crc32(raw))
        tensor.raw_data = raw

    @property
    def _little(self) -> np.dtype[Any]:
        """The dtype with the byte order of ONNX, which is little-endian."""
        dtype = self.array.dtype
        return dtype if dtype.isnative else dtype.newbyteorder("<")

    def _check(self, function: str, checksum: int) -> None:
        if checksum != self.checksum:
            rule = f"`{self.name}` must not be written to before the model is saved"
            hint = "The model refers to the array, which is large; export it again."
            raise ArgumentValueError(function, rule, {"shape": self.array.shape}, hint)

    def _read(self) -> Iterator[memoryview]:
        """Yield the array in parts; each part reuses the memory of the one before."""
        with np.nditer(
            self.array,
            flags=["external_loop", "buffered", "zerosize_ok"],
            order="C",
            op_dtypes=[self._little],
            casting="equiv",
            buffersize=CHUNK,
        ) as chunks:
            for chunk in map(np.asarray, chunks):  # a chunk that is not copied may be long, and have gaps
                for start in range(0, chunk.size, CHUNK):
                    yield np.ascontiguousarray(chunk[start : start + CHUNK]).view(np.uint8).data
