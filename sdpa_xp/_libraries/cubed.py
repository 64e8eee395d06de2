"""Cubed: lazy arrays in chunks of Zarr, computed by tasks whose memory is projected before they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import array_api_compat as compat

from .capabilities import ChunkedArrays, Generators
from .dask import LazyLibrary, own_copy
from .protocols import Array, Chunks, Device, Dtype, Key


class CubedStreams(ChunkedArrays):
    """Arrays that are folded from blocks, by cubed's blockwise operation."""

    is_regular = True

    def in_chunks(self, array: Any, chunks: Chunks, like: Any) -> Any:
        cubed = import_module("cubed")
        if isinstance(array, cubed.Array):
            sizes = tuple(lengths[0] if lengths else 1 for lengths in chunks)
            return array if tuple(array.chunks) == chunks else cubed.rechunk(array, sizes)
        return cubed.from_array(array, chunks=chunks, spec=like.spec)

    def as_lazy(self, array: Any, like: Any) -> Any:
        if not compat.is_numpy_array(array):
            return array
        array = own_copy(array)
        lazy = self.in_chunks(array, tuple((n,) for n in array.shape), like)
        lazy.made_of = array  # for `known_values`: cubed would read them from a file
        return lazy

    def array(
        self,
        name: str,
        function: Callable[..., Any],
        keys: Callable[[tuple[int, ...]], Sequence[Key | list[Key]]],
        inputs: Sequence[Any],
        chunks: Chunks,
        dtype: Dtype,
        extra_memory: int,
    ) -> Any:
        """Return an array; `function` gets the blocks of `keys` of a chunk's numbers, and these as `block_id`.

        A list of keys arrives as an iterator, which reads one block at a time. `extra_memory` is what
        `function` needs in addition to one block of each input and its result, in bytes.
        """
        primitive = import_module("cubed.primitive.blockwise")

        def key_of(key: Key) -> Any:
            return primitive.ChunkKey(key[0], tuple(key[1:]))

        def back_key_function(out_key: Any) -> Any:
            arguments = (
                iter([key_of(key) for key in part]) if isinstance(part, list) else key_of(part)
                for part in keys(out_key.coords)
            )
            return primitive.FunctionArgs(*arguments, output_name=out_key.name)

        unique = {array.name: array for array in inputs}
        return import_module("cubed.core.ops").general_blockwise(
            function,
            back_key_function,
            *unique.values(),
            shapes=[tuple(map(sum, chunks))],
            dtypes=[import_module("numpy").dtype(dtype)],
            chunkss=[chunks],
            extra_projected_mem=extra_memory,
            op_name=name,
        )


class EagerWords(Generators):
    """Generators of NumPy, whose numbers stay arrays of NumPy: the tasks of a call are given their values."""

    def random_words(self, rng: Any, count: int, _xp: Any, _device: Device) -> Array:
        words: Array = rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return words


class Cubed(LazyLibrary):
    name = "cubed"
    conversion = "cubed.from_array"
    chunks = CubedStreams()
    generators = EagerWords()

    def owns(self, array: object) -> bool:
        cubed: Any = sys.modules.get("cubed")
        return cubed is not None and isinstance(array, cubed.Array)

    def known_values(self, array: Any) -> Any:
        return getattr(array, "made_of", array)
