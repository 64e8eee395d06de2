"""What a library has or has not: generators, autograd, rules of tangents, diagonals, chunks.

`loops.py` has the loops, and `meshes.py` the meshes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

from .protocols import Access, Array, Chunks, Device

T = TypeVar("T")
Compute: TypeAlias = Callable[..., Array]
"""Returns an output of arrays."""
Tangent: TypeAlias = Callable[[Sequence[Array], Array, Sequence[Array | None]], Array]
"""Returns how an output moves: of the arrays, the output, and how each array moves."""


class Generators:
    """Random generators: those of NumPy, for libraries that have none."""

    name: ClassVar[str] = "numpy.random.Generator"
    """The type of a generator, for messages."""

    def owns(self, rng: object) -> bool:
        """Return whether `rng` is a generator of random numbers for arrays of this library."""
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(rng, numpy.random.Generator)

    def refusing_compiler(self) -> str:
        """Return the compiler that traces the current call and refuses generators, or ""."""
        return ""

    def state(self, rng: Any) -> Any:
        """Return the state of a generator, or None if it has no readable state. A key has none."""
        return getattr(getattr(rng, "bit_generator", None), "state", None)

    def set_state(self, rng: Any, state: Any) -> None:
        rng.bit_generator.state = state

    def random_words(self, rng: Any, count: int, xp: Any, device: Device) -> Array:
        """Return `count` random int32 as an array of the namespace `xp`."""
        words = rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return cast(Array, xp.asarray(words.tolist(), dtype=xp.int32, device=device))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        """Return `count` random float32 from 0 to 1."""
        return cast(Array, rng.random(count, xp.float32))


class Autograd(Protocol):
    """What records the operations of arrays, and may change what they mean."""

    def is_transforming(self) -> bool:
        """Return whether something changes what calls mean now, such as a trace, so that each is checked."""

    def records(self, arrays: Sequence[Array]) -> bool:
        """Return whether operations of `arrays` are recorded, so that no array may be written to."""

    def differentiates(self, arrays: Sequence[Any]) -> bool:
        """Return whether derivatives of `arrays` are computed, by operations of ours."""

    def recomputed(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, whose operations are recorded, and computed again for their gradients."""

    def detach(self, array: Any) -> Any:
        """Return `array` without the operations that are recorded."""

    def attach_zero_gradient(
        self, output: Array, arrays: Callable[[], Iterable[Array]], sole: Array | None = None
    ) -> Array:
        """Connect an output to those of `arrays` that require a gradient, with gradients of zero.

        The output is a constant, or `sole` may be the sole array that it follows from.
        """


class TangentRules(Protocol):
    """What gives an operation derivatives of its own."""

    def may_record(self, access: Access, /) -> bool:
        """Return whether the operations of a call with arrays of this access may be differentiated."""

    def constant(self, array: Array) -> Array:
        """Return `array`, whose derivative is 0."""

    def define(self, compute: Compute, tangent: Tangent, *arrays: Array, of_pairs: bool = False) -> Array:
        """Return `compute(*arrays)`, whose derivative is `tangent(arrays, output, tangents)`.

        The tangent is a linear function of the tangents of the arrays, of which None is 0. Functions read no
        other arrays, since those may belong to another transformation. `of_pairs` says that the third array
        masks the elements of the output.
        """


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


class ChunkedArrays(Protocol):
    """Lazy arrays in chunks. How tasks compute them, each library says in its own way: see its file."""

    def chunks_of(self, array: Any) -> Chunks:
        return tuple(array.chunks)

    def name_of(self, array: Any) -> str:
        """Return the first part of the keys of an array's chunks."""
        return str(array.name)

    def in_chunks(self, array: Any, chunks: Chunks, like: Any) -> Any:
        """Return an array cut into other chunks. An array of NumPy becomes a lazy array, as `like` is one."""

    def as_lazy(self, array: Any, like: Any) -> Any:
        """Return a copy of an array of NumPy as a lazy array, since a call may have both; others unchanged."""
