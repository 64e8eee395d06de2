"""Cubed: lazy arrays in chunks of Zarr, computed by tasks whose memory is projected before they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import array_api_compat as compat

from sdpa_xp._libraries.dask import LazyLibrary, own_copy
from sdpa_xp._libraries.protocols import Array, BlockStreams, Chunks, Dtype, Key


class Cubed(LazyLibrary):
    """Arrays of cubed."""

    name = "cubed"
    conversion = "cubed.from_array"

    def owns(self, array: object) -> bool:
        cubed: Any = sys.modules.get("cubed")
        return cubed is not None and isinstance(array, cubed.Array)

    def random_words(self, rng: Any, count: int, array: Array) -> Array:
        del array
        words: Array = rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return words

    def adopted(self, array: Any, like: Any) -> Any:
        if not compat.is_numpy_array(array):
            return array
        array = own_copy(array)
        lazy = CubedStreams(like.spec).in_chunks(array, tuple((n,) for n in array.shape))
        lazy.adopted_from = array
        return lazy

    def readable(self, array: Any) -> Any:
        return getattr(array, "adopted_from", array)

    def block_streams(self, like: Any) -> BlockStreams | None:
        return CubedStreams(like.spec)


class CubedStreams:
    """Arrays that are folded from blocks, by cubed's blockwise operation."""

    is_regular = True

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def chunks(self, array: Any) -> Chunks:
        return tuple(array.chunks)

    def name(self, array: Any) -> str:
        return str(array.name)

    def in_chunks(self, array: Any, chunks: Chunks) -> Any:
        cubed = import_module("cubed")
        if isinstance(array, cubed.Array):
            sizes = tuple(lengths[0] if lengths else 1 for lengths in chunks)
            return array if tuple(array.chunks) == chunks else cubed.rechunk(array, sizes)
        return cubed.from_array(array, chunks=chunks, spec=self.spec)

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
