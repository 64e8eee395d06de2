"""What sdpa_xp asks of an array library, with the answers of one that does what the standard says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast

import array_api_compat as compat

from sdpa_xp._libraries.dtypes import FLOATING, dtype_name
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Namespace

A = TypeVar("A")
T = TypeVar("T")

ExecutionKind: TypeAlias = Literal["traced", "blas_threaded", "threaded", "device"]
"""How a library computes.

- traced: a compiler or a scheduler computes later, so that no value can be read now.
- blas_threaded: in the calling thread, and products in as many threads as the BLAS takes; arrays are writeable.
- threaded: every operation in as many threads as the library takes; arrays are writeable.
- device: anywhere else, such as a GPU; arrays are not written to.
"""


class Library:
    """An array library. A file of this folder overrides what its library does differently."""

    name: ClassVar[str] = "other"
    """How kernels and messages call it."""
    rng_name: ClassVar[str] = "numpy.random.Generator"
    """The type of generator that its random numbers come from."""
    multiplies_halves: ClassVar[bool] = False
    """Whether it computes products of float16 and bfloat16 itself."""
    exchanges_memory: ClassVar[bool] = False
    """Whether its arrays pass to others by DLPack on their device, bfloat16 too."""
    reads_cpu_memory: ClassVar[bool] = False
    """Whether it takes an array of NumPy by DLPack."""
    computes_on_demand: ClassVar[bool] = False
    """Whether the values of a traced array can be computed now."""
    module: ClassVar[str] = ""
    """The module that makes its arrays, if it has a generator of its own."""

    def owns(self, array: object) -> bool:
        """Return whether `array` is an array of this library."""
        raise NotImplementedError

    def namespace(self, array: AnyArray) -> Namespace:
        """Return the array-API namespace of `array`, made compatible if the library itself is not."""
        return cast(Namespace, compat.array_namespace(array))

    def device(self, array: Any) -> Device:
        """Return the device of `array`, or None if the library names no single one."""
        return compat.device(array)

    def on_device(self, array: Array, device: Device) -> Array:
        """Return `array` on `device`."""
        return cast(Array, compat.to_device(array, device))

    def detached(self, array: Any) -> Any:
        """Return `array` without what autograd records."""
        return array

    def to_cpu(self, array: Any) -> Any:
        """Return an array that NumPy can look at."""
        return array

    def to_list(self, array: Any) -> Any:
        """Return the elements as Python numbers in nested lists; a lazy array is computed."""
        if array.ndim == 0:
            kind = dtype_name(array.dtype)
            return bool(array) if kind == "bool" else float(array) if kind in FLOATING else int(array)
        return [self.to_list(array[index, ...]) for index in range(array.shape[0])]

    def real_dtypes(self, xp: Namespace, device: Device) -> Collection[str]:
        """Return the names of the standard's real floating dtypes that `device` has."""
        info = cast(Any, xp).__array_namespace_info__()
        return cast(Collection[str], info.dtypes(device=device, kind="real floating"))

    def has_int64(self, xp: Namespace, device: Device) -> bool:
        """Return whether `device` has int64."""
        info = cast(Any, xp).__array_namespace_info__()
        return "int64" in info.dtypes(device=device, kind="signed integer")

    def is_traced(self, array: Any) -> bool:
        """Return whether values cannot be read now: a lazy graph, or an array inside a jit or an export."""
        return bool(compat.is_lazy_array(array))

    def execution_kind(self, arrays: Sequence[Array]) -> ExecutionKind:
        """Return how the library computes with `arrays`, none of which is traced."""
        del arrays
        return "device"

    def array_signature(self, array: Any) -> object:
        """Return what tells arrays apart except their numbers, or None if a number may matter to a check."""
        del array
        return None

    def is_writeable(self, array: Any) -> bool:
        """Return whether each element of `array` can be set, and by itself."""
        return hasattr(array, "__setitem__") and bool(compat.is_writeable_array(array))

    def unsupported_reason(self, array: Any) -> str:
        """Return why `array` has other arithmetic than the standard's, or no elements; "" if it is plain."""
        del array
        return ""

    def plain(self, array: A) -> A:
        """Return `array` in the class that the library's functions return; a subclass as a view."""
        return array

    def addresses(self, array: Any) -> Any:
        """Return a NumPy array at the addresses of `array`, which are compared and never followed, or None."""
        del array

    def quiet(self, array: Array) -> Callable[[], AbstractContextManager[object]]:
        """Return a maker of contexts without NumPy's floating-point warnings, and without torch's autocast.

        The warnings would tell of what is meant here: exp underflows, and NaN under a mask is put aside.
        Autocast would round float32 products to a half.
        """
        del array
        numpy = sys.modules.get("numpy")
        return nullcontext if numpy is None else partial(numpy.errstate, all="ignore")

    def attach_zero_gradient(self, output: Array, inputs: Iterable[Array]) -> Array:
        """Connect a constant output to the inputs that require a gradient, with gradients of zero."""
        del inputs
        return output

    def example(self) -> Array | None:
        """Return an empty array, or None if the library is not in use or has no generator of its own."""
        made: Any = sys.modules.get(self.module)
        return None if made is None else cast(Array, made.zeros((0,), dtype=made.float32))

    def rng_state(self, rng: Any) -> Any:
        """Return the state of a generator, or None if it has none that can be read, as a key."""
        return getattr(getattr(rng, "bit_generator", None), "state", None)

    def restore_rng(self, rng: Any, state: Any) -> None:
        """Give a generator back a state that it had."""
        rng.bit_generator.state = state

    def is_rng(self, rng: object) -> bool:
        """Return whether `rng` is a generator of random numbers for arrays of this library."""
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(rng, numpy.random.Generator)

    def can_draw(self) -> bool:
        """Return whether a generator can be drawn from now."""
        return True

    def random_words(self, rng: Any, count: int, array: Array) -> Array:
        """Return `count` random int32 from `rng`, as an array like `array`."""
        xp, words = self.namespace(array), rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return xp.asarray(words.tolist(), dtype=xp.int32, device=self.device(array))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        """Return `count` random float32 from 0 to 1."""
        return cast(Array, rng.random(count, xp.float32))

    def has_loops(self) -> bool:
        """Return whether the library's compiler keeps loops; others write each pass into the graph."""
        return False

    def rolled(self, body: Callable[[Array], T], starts: Array) -> T:
        """Return `body` of each of `starts`, computed in a loop that the compiler keeps.

        Its arrays are stacked on a new first axis.
        """
        raise NotImplementedError

    def rows_from(self, array: Array, start: Array, count: int) -> Array:
        """Return `count` rows of an array (..., L, width) from `start` on, which only the loop knows."""
        raise NotImplementedError
