"""What a library has or has not: generators, views of diagonals, chunks; and what calls may do with arrays.

The loops and the meshes of JAX are in `programs`.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NamedTuple, cast

from sdpa_xp._libraries.protocols import Array, Chunks, Device


class Access(NamedTuple):
    """What a call may do with its arrays, and what that costs."""

    is_traced: bool = False
    """Whether values cannot be read now: a compiler or a scheduler computes later."""
    is_writeable: bool = False
    """Whether computed arrays can be written to."""
    waits: bool = False
    """Whether to read a value is to wait for a device, as on a GPU."""
    uses_our_threads: bool = False
    """Whether the library computes in the calling thread, but for products, for which BLAS has threads. Others
    compute every operation in threads of their own."""


TRACED = Access(is_traced=True)
READ_ONLY = Access()


class Generators:
    """Random generators: those of NumPy, for libraries that have none."""

    name: ClassVar[str] = "numpy.random.Generator"
    """The type of a generator, for messages."""

    def owns(self, rng: object) -> bool:
        """Return whether `rng` is a generator of random numbers for arrays of this library."""
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(rng, numpy.random.Generator)

    def can_draw(self) -> bool:
        """Return whether generators can be used now."""
        return True

    def state(self, rng: Any) -> Any:
        """Return the state of a generator, or None if it has no readable state. A key has none."""
        return getattr(getattr(rng, "bit_generator", None), "state", None)

    def restore(self, rng: Any, state: Any) -> None:
        """Restore a state of a generator."""
        rng.bit_generator.state = state

    def random_words(self, rng: Any, count: int, xp: Any, device: Device) -> Array:
        """Return `count` random int32 as an array of the namespace `xp`."""
        words = rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return cast(Array, xp.asarray(words.tolist(), dtype=xp.int32, device=device))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        """Return `count` random float32 from 0 to 1."""
        return cast(Array, rng.random(count, xp.float32))


class Diagonals:
    """Views of arrays of NumPy in which all elements of a diagonal are one number."""

    def view(self, numbers: Any, columns: int) -> Any:
        """Return a view (..., rows, columns) of numbers (..., 1, rows + columns - 1).

        The first number is that of the lower left corner, the last that of the upper right one.
        """
        *leading, _, count = numbers.shape
        *strides, _, step = numbers.strides
        rows = count + 1 - columns
        as_strided = sys.modules["numpy"].lib.stride_tricks.as_strided
        return as_strided(numbers[..., 0, rows - 1 :], (*leading, rows, columns), (*strides, -step, step))


class ChunkedArrays:
    """Lazy arrays in chunks. How tasks compute them, each library says in its own way: see its file."""

    is_regular: ClassVar[bool]
    """Whether all chunks along an axis but the last must be equally long."""

    def chunks_of(self, array: Any) -> Chunks:
        """Return the chunks of an array."""
        return tuple(array.chunks)

    def name_of(self, array: Any) -> str:
        """Return the first part of the keys of an array's chunks."""
        return str(array.name)

    def in_chunks(self, array: Any, chunks: Chunks, like: Any) -> Any:
        """Return an array cut into other chunks. An array of NumPy becomes a lazy array, as `like` is one."""
        raise NotImplementedError

    def as_lazy(self, array: Any, like: Any) -> Any:
        """Return a copy of an array of NumPy as a lazy array, since a call may have both; others unchanged."""
        raise NotImplementedError
