"""Everything that sdpa_xp needs of arrays and of their namespace, as protocols.

Everything in `Array` and `Namespace` but `__name__` is in the Python array API standard 2024.12. A library that
has these names runs the portable implementation. `out` and `reduce` are not in the standard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Dtype: TypeAlias = Any
"""A dtype of the arrays' library. Each library has its own class, and the standard names no common base."""
Device: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]
Chunks: TypeAlias = tuple[tuple[int, ...], ...]
"""The lengths of the chunks of an array, on each axis."""
Key: TypeAlias = tuple[str | int, ...]
"""The key of a task or of a chunk: (name, number, ...)."""
Tasks: TypeAlias = Mapping[Key, tuple[Any, ...]]
"""Tasks by their keys: a function and its arguments, which are keys or lists of keys."""


class AnyArray(Protocol):
    """An array as a caller passes it, of any library that follows the standard."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Dtype: ...


class NumPyGenerator(Protocol):
    """A numpy.random.Generator or a cupy.random.Generator."""

    def random(self, size: Any = ..., dtype: Any = ...) -> Any: ...


class TorchGenerator(Protocol):
    """A torch.Generator."""

    def get_state(self) -> Any: ...
    def set_state(self, state: Any, /) -> Any: ...


Rng: TypeAlias = NumPyGenerator | TorchGenerator | AnyArray
"""A generator of NumPy, CuPy or torch; or a key of JAX or MLX, which is an array."""


class Array(Protocol):
    """An array that has passed the checks; the implementation computes with it."""

    @property
    def shape(self) -> Shape: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Dtype: ...

    def __getitem__(self, index: Any, /) -> Array: ...
    def __setitem__(self, index: Any, value: Array | float, /) -> None: ...
    def __add__(self, other: Array | float, /) -> Array: ...
    def __sub__(self, other: Array | float, /) -> Array: ...
    def __mul__(self, other: Array | float, /) -> Array: ...
    def __truediv__(self, other: Array | float, /) -> Array: ...
    def __matmul__(self, other: Array, /) -> Array: ...
    def __and__(self, other: Array | int, /) -> Array: ...
    def __or__(self, other: Array, /) -> Array: ...
    def __xor__(self, other: Array, /) -> Array: ...
    def __rshift__(self, other: int, /) -> Array: ...
    def __floordiv__(self, other: int, /) -> Array: ...
    def __mod__(self, other: int, /) -> Array: ...
    def __neg__(self) -> Array: ...
    def __radd__(self, other: float, /) -> Array: ...
    def __invert__(self) -> Array: ...
    def __le__(self, other: Array | float, /) -> Array: ...
    def __ge__(self, other: Array | float, /) -> Array: ...
    def __gt__(self, other: Array | float, /) -> Array: ...
    def __lt__(self, other: Array | float, /) -> Array: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __float__(self) -> float: ...


class Namespace(Protocol):
    """The functions of the standard that the implementation calls."""

    __name__: str

    def __hash__(self) -> int: ...

    float32: Dtype
    float64: Dtype
    int32: Dtype

    bool: Dtype

    def abs(self, x: Array, /) -> Array: ...
    def all(self, x: Array, /, *, axis: Shape | None = ...) -> Array: ...
    def any(self, x: Array, /, *, axis: int | Shape | None = ..., keepdims: bool = ...) -> Array: ...
    def arange(self, start: int, stop: int, /, *, dtype: Dtype, device: Device) -> Array: ...
    def asarray(self, obj: object, /, *, dtype: Dtype, device: Device) -> Array: ...
    def astype(self, x: Array, dtype: Dtype, /, *, copy: bool = ...) -> Array: ...
    def broadcast_to(self, x: Array, /, shape: Shape) -> Array: ...
    def clip(self, x: Array, /, min: int, max: int) -> Array: ...
    def concat(self, arrays: Sequence[Array], /, *, axis: int) -> Array: ...
    def cos(self, x: Array, /) -> Array: ...
    def empty(self, shape: Shape, /, *, dtype: Dtype, device: Device) -> Array: ...
    def exp(self, x: Array, /) -> Array: ...
    def expand_dims(self, x: Array, /, *, axis: int) -> Array: ...
    def full(self, shape: Shape, fill_value: object, /, *, dtype: Dtype, device: Device) -> Array: ...
    def isfinite(self, x: Array, /) -> Array: ...
    def isnan(self, x: Array, /) -> Array: ...
    def log(self, x: Array, /) -> Array: ...
    def matrix_transpose(self, x: Array, /) -> Array: ...
    def max(self, x: Array, /, *, axis: int | Shape | None = ..., keepdims: bool = ...) -> Array: ...
    def maximum(self, x: Array, y: Array, /) -> Array: ...
    def min(self, x: Array, /, *, axis: Shape | None = ...) -> Array: ...
    def permute_dims(self, x: Array, /, axes: Shape) -> Array: ...
    def reshape(self, x: Array, /, shape: Shape) -> Array: ...
    def sin(self, x: Array, /) -> Array: ...
    def stack(self, arrays: Sequence[Array], /, *, axis: int) -> Array: ...
    def sum(self, x: Array, /, *, axis: int | None = ..., keepdims: bool = ...) -> Array: ...
    def take(self, x: Array, indices: Array, /, *, axis: int) -> Array: ...
    def tanh(self, x: Array, /) -> Array: ...
    def where(self, condition: Array, x: Array | float, y: Array | float, /) -> Array: ...
    def zeros(self, shape: Shape, /, *, dtype: Dtype, device: Device) -> Array: ...
    def zeros_like(self, x: Array, /) -> Array: ...


class InPlaceFunctions(Protocol):
    """The functions of a library's own module that take `out`, as NumPy's and torch's do."""

    def abs(self, x: Array, /, *, out: Array) -> Array: ...
    def exp(self, x: Array, /, *, out: Array) -> Array: ...
    def matmul(self, x: Array, y: Array, /, *, out: Array) -> Array: ...
    def multiply(self, x: Array, y: Array | float, /, *, out: Array) -> Array: ...
    def stack(self, arrays: Sequence[Array], /, *, out: Array) -> Array: ...
    def tanh(self, x: Array, /, *, out: Array) -> Array: ...


class Ufunc(Protocol):
    """A function that also reduces an axis."""

    def reduce(self, x: Array, /, *, axis: int | None, keepdims: bool = ..., initial: float = ...) -> Any: ...


class Ufuncs(InPlaceFunctions, Protocol):
    """The functions of NumPy's own module. `reduce` takes a third of the time of `max` and `sum`."""

    @property
    def add(self) -> Ufunc: ...
    @property
    def maximum(self) -> Ufunc: ...
    def swapaxes(self, x: Array, first: int, second: int, /) -> Array: ...


class ChunkedArrays(Protocol):
    """How a library cuts lazy arrays into chunks."""

    is_regular: bool
    """Whether all chunks along an axis but the last must be equally long."""

    def chunks(self, array: Any, /) -> Chunks:
        """Return the chunks of an array."""

    def name(self, array: Any, /) -> str:
        """Return the first part of the keys of an array's chunks."""

    def in_chunks(self, array: Any, chunks: Chunks, /) -> Any:
        """Return an array cut into other chunks; an array of NumPy becomes lazy."""


class TaskGraphs(ChunkedArrays, Protocol):
    """How a library makes lazy arrays out of tasks."""

    def token(self, *values: object) -> str:
        """Return a text that differs if a value does."""

    def merged_at_once(self) -> int:
        """Return how many results a task of a tree reduction merges."""

    def array(
        self, stages: Mapping[str, Tasks], inputs: Sequence[Any], chunks: Chunks, dtype: Dtype, like: Any
    ) -> Any:
        """Return the array whose chunks the last of `stages` computes, each from earlier ones and `inputs`."""


class BlockStreams(ChunkedArrays, Protocol):
    """How a library makes lazy arrays whose chunks are folded, each from a stream of blocks of other arrays."""

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


class Part(NamedTuple):
    """A part of an axis of an array, where only the device that has it knows the start."""

    axis: int
    start: Array
    length: int


class DeviceRing(Protocol):
    """Devices in a ring that run one program, each with its part of the arrays."""

    size: int
    """The number of devices."""

    def run(
        self, body: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], ndim: int, /
    ) -> Any:
        """Return `body(*arrays)`, computed by all devices.

        Each gets its part of an array along one of its axes, counted from the last, -1, or all of it for None.
        The result has `ndim` axes, and each device has a part of axis -2.
        """

    def number(self) -> Array:
        """Return the number of the device that computes this."""

    def sent(self, arrays: T, by: int, /) -> T:
        """Return the arrays of the device that is `by` places before this one."""

    def permuted(self, arrays: T, destinations: Sequence[int], /) -> T:
        """Return the arrays of the device whose destination this one is."""

    def repeated(self, body: Callable[[T, Array], T], state: T, numbers: Iterable[int], /) -> T:
        """Return `state` after `state = body(state, number)` for each number, in a compiled loop."""

    def only_if(self, condition: Array, change: Callable[[T], T], state: T, /) -> T:
        """Return `change(state)`, or `state` on devices where the condition is False, which compute nothing."""

    def differentiable(
        self,
        compute: Callable[..., T],
        gradients: Callable[[tuple[Array, ...], T, T], tuple[Array | None, ...]],
        /,
    ) -> Callable[..., T]:
        """Return `compute`, differentiated by `gradients(arrays, results, cotangents of the results)`."""

    def pullback(
        self, compute: Callable[..., T], /, *arrays: Array
    ) -> tuple[T, Callable[[T], tuple[Array, ...]]]:
        """Return `compute(*arrays)`, and the function from its cotangents to the gradients of the arrays."""

    def part(self, array: Array, parts: Sequence[Part], /) -> Array:
        """Return a part of an array."""

    def with_part(self, array: Array, part: Array, parts: Sequence[Part], /) -> Array:
        """Return an array with another part."""


Override: TypeAlias = Callable[[str, Mapping[str, object], Mapping[str, object]], Any]
"""The method `__sdpa_xp__(function, inputs, options)` of a type of array that answers calls itself.

Like NumPy's `__array_function__`: the values of a graph that is being written have one. It gets the name of the
public function, the arguments query, key and value by name, and the other arguments by name, not validated. Its
return value is the result of the call. If that is NotImplemented, the next type is asked, and sdpa_xp computes
the call if no type is left."""
