"""What sdpa_xp needs to know of an array library, with the answers for a library that follows the standard."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

import array_api_compat as compat

from .protocols import Access, AnyArray, Array, Chunks, Device, Dtype, Namespace

if TYPE_CHECKING:
    from .loops import Loops
    from .meshes import Meshes

A = TypeVar("A")
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


MASKED = {"lse", "row_max", "scores"}
"""The results that are -inf where no pair may attend."""
CUDA = (2, 10, 13)
"""Types of devices in DLPack: CUDA's, ROCm's, whose libraries call it CUDA, and memory that CUDA manages."""


class Library:
    """An array library. The subclass for a library overrides what it does differently from the standard."""

    name: ClassVar[str] = "other"
    """Its name in messages and in the table of kernels; "other" has no kernels."""
    multiplies_halves: ClassVar[bool] = False
    """Whether it computes products of float16 and of bfloat16."""
    flattens_products: ClassVar[bool] = False
    """Whether arrays of more than two axes get two to be multiplied by a matrix."""
    writes_in_place: ClassVar[bool] = False
    """Whether computed arrays can be written to, unless `autograd` records."""
    has_ufuncs: ClassVar[bool] = False
    """Whether its namespace has the functions of `Ufuncs`, as NumPy's own module has."""
    uses_our_threads: ClassVar[bool] = False
    """Whether it computes in the calling thread: see `Access`."""
    keeps_buffers: ClassVar[bool] = False
    """Whether any call may write to memory that an earlier call made. Torch refuses that after its inference
    mode."""
    conversion: ClassVar[str] = ""
    """What makes one of its arrays of an array of another library; "" is `from_dlpack`."""
    cast_code: ClassVar[tuple[str, str]] = ("xp.astype({array}, {dtype})", "xp.{name}")
    """The code that converts an array to a dtype, and the code of a dtype, for hints."""
    needs_context: ClassVar[bool] = False
    """Whether contexts change copies of arrays, and not only warnings. JAX may be set to refuse NaN, and
    numbers that an operation moves to the device; and CuPy computes on the current device alone. Torch's
    autocast changes only what computes with the numbers."""
    has_settings: ClassVar[bool] = False
    """Whether a user may have set what is refused: see `refuses_unlike_axes` and `find_nonfinite`."""
    tile_share: int = 1
    """A tile has the scores of other libraries divided by this: jets with bends hold more arrays of each."""
    has_free_shift: ClassVar[bool] = True
    """Whether a softmax without a maximum loses no digits; derivatives may be large where it has none."""
    compiles_shapes: ClassVar[bool] = False
    """Whether an operation is compiled for each shape of its operands."""
    copies_open_views: ClassVar[bool] = False
    """Whether its compiler asks of a view that merges axes what it cannot decide if lengths are one symbol."""
    sets_elements: ClassVar[bool] = False
    """Whether one assignment sets the elements at arrays of indices, which the standard does not have."""
    chunks: ClassVar[ChunkedArrays | None] = None
    """How its arrays are cut into chunks, if they are lazy: their values are computed later, by tasks."""
    loops: ClassVar[Loops | None] = None
    """The loops that its compiler keeps. Other compilers write each pass into the graph."""
    meshes: ClassVar[Meshes | None] = None
    """Its meshes of devices, if devices run one program and send each other arrays."""
    diagonals: ClassVar[Diagonals | None] = None
    """Its views of one number for each diagonal, if arrays may have negative strides."""
    generators: Generators = Generators()
    """Its random generators."""
    autograd: ClassVar[Autograd | None] = None
    """What records operations for gradients, if arrays themselves are recorded."""
    tangent_rules: ClassVar[TangentRules | None] = None
    """Its operations with derivatives of their own, which it transposes and differentiates again."""
    module: ClassVar[str] = ""
    """The module that makes its arrays, where that module is needed: its generators, its `out` functions."""

    @property
    def functions(self) -> Any:
        """The functions that take `out`: see `InPlaceFunctions`."""
        return sys.modules[self.module]

    # Which arrays are its own, and what is refused

    def owns(self, array: object) -> bool:
        """Return whether `array` is an array of this library."""
        raise NotImplementedError

    def namespace(self, array: AnyArray) -> Namespace:
        """Return the array-API namespace of `array`, made compatible if the library itself is not."""
        return cast(Namespace, compat.array_namespace(array))

    def device(self, array: Any) -> Device:
        """Return the device of `array`, or None if the library names no single device."""
        return compat.device(array)

    def has_dtype(self, function: str, xp: Namespace, device: Device, name: str) -> bool:
        """Return whether `device` has a dtype of the standard, for the public function `function`."""
        if not hasattr(xp, "__array_namespace_info__"):
            rule = f"the namespace {xp.__name__} must have __array_namespace_info__()"
            raise TypeError(f"{function}: {rule}, which names the dtypes of a device (array API 2023.12).")
        return name in xp.__array_namespace_info__().dtypes(device=device)

    def unsupported_reason(self, _array: Any) -> str:
        """Return why `array` is refused: it lacks elements, or the standard's arithmetic; or ""."""
        return ""

    def base_form(self, array: A) -> A:
        """Return `array` in the form that the library computes with: not of a subclass with other operators."""
        return array

    def array_signature(self, _array: Any) -> object:
        """Return a key of all that checks read except the numbers, or None if a check may read numbers."""
        return None

    # Arrays that carry derivatives: see `jets.py`

    def adopted(self, _array: Any) -> Any:
        """Return an array of the library beneath as one of its own; None if there is no such library."""
        return None

    def values(self, array: Any) -> Any:
        """Return an array without the derivatives that it carries."""
        return array

    def with_derivatives(self, array: Any, like: Any) -> Any:
        """Return an array plus the derivatives that `like` carries."""
        del like
        return array

    def bilinear(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Return what a function that is linear in both arguments returns; it is called without jets."""
        return function(left, right)

    def spread(self, xp: Any, array: Any, like: Any) -> Any:
        """Return an array as numbers of the shape and the dtype of `like`."""
        if self.is_traced(like):  # on its devices, which a trace may ask for
            return xp.astype(array, like.dtype) + xp.zeros_like(like)
        return xp.astype(xp.broadcast_to(array, like.shape), like.dtype)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `xp`, arrays and a `size`, compiled if each operation would be compiled."""
        return function

    # What may be done with values, and what that costs

    def is_traced(self, array: Any) -> bool:
        """Return whether values cannot be read now, as in a lazy graph, a jit or an export."""
        return bool(compat.is_lazy_array(array))

    def bounds(self, integers: Any) -> Sequence[int] | None:
        """Return the least and the most; None if there are no elements, or if they cannot be read now."""
        if self.is_traced(integers) or 0 in integers.shape:
            return None
        xp = self.namespace(integers)
        ends = [xp.min(integers), xp.max(integers)]
        if self.is_accelerator(self.device(integers)):  # it is waited for once
            return cast(Sequence[int], self.to_list(xp.stack(ends, axis=0)))
        return int(ends[0]), int(ends[1])

    def is_known(self, length: object) -> bool:
        """Return whether a length, or a comparison of some, is known: a compiler may know symbols alone."""
        return isinstance(length, int | numbers.Integral)

    def values_at_hand(self, array: Any) -> Any:
        """Return an array of the values of `array`, or None if reading them would wait for a device."""
        known = self.known_values(array)
        is_here = "cpu" in str(self.device(array)).lower() and not self.is_traced(array)
        return known if is_here or known is not array else None

    def known_values(self, array: Any) -> Any:
        """Return an array of NumPy of the values, if they are known without computing; else `array` itself."""
        return array

    def is_accelerator(self, _device: Device) -> bool:
        """Return whether each operation on `device` is a launch, which costs more than some work does."""
        return False

    def is_writeable(self, array: Any) -> bool:
        """Return whether each element of `array` can be set without setting another."""
        return hasattr(array, "__setitem__") and bool(compat.is_writeable_array(array))

    def frozen(self, array: A) -> A:
        """Return a copy of an array that may be written to, for an owner that does not change."""
        # Asked in this order: a spec of an export cannot be written to, and a length may be a name there.
        if not self.is_writeable(array) or self.is_traced(array):
            return array
        source = cast(Array, array)  # `A` is the type that the caller gets back
        return cast(A, self.namespace(source).astype(source, source.dtype, copy=True))

    def frozen_key(self, array: Any) -> object:
        """Return a key that equal frozen arrays share: their values, if reading them costs nothing."""
        return id(array)

    def addresses(self, _array: Any) -> Any:
        """Return a NumPy array at the addresses of `array`, to be compared and never read; or None."""

    # Copies, to NumPy and back, and of rows

    def to_numpy(self, array: Any) -> Any:
        """Return the values as an array of NumPy, in the same memory if NumPy can read that.

        NumPy has no bfloat16: it becomes float32, which has all of its numbers.
        """
        if "bfloat16" in str(array.dtype):
            xp = self.namespace(array)
            array = xp.astype(array, xp.float32)
        numpy, array = import_module("numpy"), self.to_cpu(array)
        if hasattr(array, "__dlpack__") and not isinstance(array, numpy.ndarray):
            array = numpy.from_dlpack(array)
        return numpy.asarray(array)

    def from_numpy(self, array: Any, xp: Any, device: Device) -> Any:
        """Return an array of NumPy as one of this library, whose namespace is `xp`, perhaps in the same memory.

        The dtype stays if the library has it. A `device` of None is the default one.
        """
        if "bfloat16" not in str(array.dtype):
            # torch takes no negative strides, and warns of memory that is read-only.
            rows = import_module("numpy").require(array, requirements=("C_CONTIGUOUS", "WRITEABLE"))
            return xp.asarray(rows, device=device)
        if (dtype := self.bfloat16(xp)) is None:
            raise TypeError(f"{xp.__name__} has no bfloat16")
        return xp.astype(self.from_numpy(array.astype("float32"), xp, device), dtype)

    def to_cpu(self, array: Any) -> Any:
        """Return an array that NumPy can read."""
        return array

    def in_rows(self, array: A, axis: int) -> A:
        """Return an array whose rows along an axis lie in memory as a product reads them; a copy if needed."""
        del axis
        return array

    def halves_of_bytes(self, array: Any) -> Any:
        """Return the halves of each byte of uint8 (..., n), the lower one first, as uint8 (..., 2 n)."""
        (*leading, width), xp = array.shape, self.namespace(array)
        return xp.reshape(xp.stack([array & 15, array >> 4], axis=-1), (*leading, 2 * width))

    def take_rows(self, array: Any, indices: Sequence[int]) -> Any:
        """Return a copy of some elements of the first axis, by the functions of the standard."""
        xp = self.namespace(array)
        return xp.take(array, xp.asarray([*indices], dtype=xp.int32, device=self.device(array)), axis=0)

    def take_tokens(self, array: Any, tokens: Any) -> Any:
        """Return a copy of some tokens of an array (..., S, width)."""
        return self.namespace(array).take(array, tokens, axis=-2)

    def in_blocks(self, pool: Any, tables: Any) -> Any:
        """Return a row of blocks for each n out of a pool (P, H, size, width), as (n, H, rows, width).

        The tables are lists of numbers, or int32 (n, blocks) on the device of the pool.
        """
        (heads, size, width), xp = pool.shape[1:], self.namespace(pool)
        if isinstance(tables, Sequence):
            sequences, blocks = len(tables), len(tables[0])
            copied = self.take_rows(pool, [block for table in tables for block in table])
        else:
            sequences, blocks = tables.shape
            copied = xp.take(pool, xp.reshape(tables, (-1,)), axis=0)
        copied = xp.reshape(copied, (sequences, blocks, heads, size, width))
        return xp.reshape(xp.permute_dims(copied, (0, 2, 1, 3, 4)), (sequences, heads, blocks * size, width))

    def to_list(self, array: Any) -> Any:
        """Return the elements as Python numbers in nested lists. A lazy array is computed."""
        if hasattr(array, "tolist"):  # for a constant inside a jit too, where indexing would be traced
            return array.tolist()
        if array.ndim == 0:
            kind = str(array.dtype)
            return bool(array) if "bool" in kind else float(array) if "float" in kind else int(array)
        return [self.to_list(array[index, ...]) for index in range(array.shape[0])]

    def bfloat16(self, xp: Any) -> Dtype | None:
        """Return the dtype bfloat16 of the library, or None if it has none. The standard has none."""
        return getattr(xp, "bfloat16", None)

    def takes_cuda(self) -> bool:
        """Return whether `from_dlpack` takes arrays of `CUDA` where they are."""
        return False

    def register_trees(self) -> None:
        """Have the library's compiler take apart objects of the classes in `trees.WAITING`."""

    # What a user may have set for all operations

    def refuses_unlike_axes(self) -> bool:
        """Return whether operations of arrays with unlike numbers of axes are refused."""
        return False

    def find_nonfinite(self, _function: str, _name: str, _array: Any) -> None:
        """Refuse a result with NaN or inf if the library is set to look for them in each result.

        One whose name is in `MASKED` may be -inf.
        """

    # Contexts

    def context_maker(self, _array: Array) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that makes contexts on the device of `array`, without warnings and autocast.

        NumPy would warn of intended results: exp underflows, and NaN under a mask is ignored. Torch's autocast
        would round float32 products to a half dtype. Only CuPy has a current device.
        """
        numpy = sys.modules.get("numpy")
        return nullcontext if numpy is None else partial(numpy.errstate, all="ignore")

    def sharing(self) -> tuple[object, AbstractContextManager[object]] | None:
        """Return a key of the calls that may share arrays which are made now, and a context to make them in.

        Any later call may use them then. None if no other call may: arrays have no values in a mode that only
        computes shapes. And only the queue in which a device makes an array knows when it is complete.
        """
        return (), nullcontext()


ASTYPE = ("{array}.astype({dtype})", "{name!r}")
"""The `cast_code` of libraries whose arrays have NumPy's method."""


def at_addresses(first: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    """Return a NumPy array at the addresses of another array's elements. Its elements must not be read."""
    interface = {"data": (first, False), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}"}
    return import_module("numpy").asarray(SimpleNamespace(__array_interface__=interface | {"version": 3}))


def has_repeats(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether several elements may have one address, as in a broadcast view or a sliding window.

    They have not if each axis steps over all elements of the axes with smaller steps.
    """
    end = itemsize
    for step, length in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True) if n > 1):
        if step < end:
            return 0 not in shape
        end += step * (length - 1)
    return False


def is_compiling() -> bool:
    """Return whether torch.compile or torch.export traces the current call."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())
