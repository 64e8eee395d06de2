"""Runs a session on arrays of any library where they are, and returns arrays of the same library.

Arrays of the host are passed as arrays of NumPy in the same memory, and so are the results. DLPack passes what
NumPy has not: bfloat16 of other libraries, and arrays on a GPU. It was run on the CPU alone, since no GPU was
at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sdpa_xp._libraries import dtype_name, library_of

from .engine import OnnxruntimeSession

Run: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the outputs of a session, in order, from the arrays of a call."""
_HOST = 1
"""The type of the host in DLPack."""


def runner(session: OnnxruntimeSession, order: Sequence[int], examples: Sequence[Any]) -> Run:
    """Return what runs a session on arrays that differ from `examples` in their numbers alone.

    Args:
        session: A session.
        order: The number of the array that each input of the session gets.
        examples: Arrays of one library, and perhaps integers in arrays of NumPy.
    """
    of_caller = next((array for array in examples if not isinstance(array, np.ndarray)), examples[0])
    inner, has_bfloat16 = session.inner, session.has_bfloat16
    library, names = library_of(of_caller), [value.name for value in inner.get_inputs()]
    is_on_device = library.is_accelerator(library.device(of_caller))
    if (is_on_device or (has_bfloat16 and library_of(np.empty(0)) is not library)) and _takes_dlpack():
        return _by_dlpack(inner, dict(zip(names, order, strict=True)), of_caller)
    is_plain = all(type(array) is np.ndarray and array.dtype.isnative for array in examples)
    has_uint64 = any("uint64" in value.type for value in inner.get_outputs())
    if is_plain and not has_bfloat16 and not has_uint64 and [*order] == [*range(len(names))]:
        outputs = [value.name for value in inner.get_outputs()]
        # onnxruntime copies an array only if its elements do not lie side by side in order.
        return lambda arrays: inner.run(outputs, dict(zip(names, arrays, strict=True)))
    return _by_numpy(session, dict(zip(names, order, strict=True)), of_caller)


def _by_numpy(session: OnnxruntimeSession, order: dict[str, int], of_caller: Any) -> Run:
    """Return what runs a session on arrays in memory that NumPy reads."""
    inner = session.inner
    outputs = [value.name for value in inner.get_outputs()]
    library = library_of(of_caller)
    xp, device = library.namespace(of_caller), library.device(of_caller)

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        feeds = {name: _native(library_of(arrays[n]).to_numpy(arrays[n])) for name, n in order.items()}
        # onnxruntime itself reads no bfloat16 from NumPy; `session.run` also copies the outputs.
        results = session.run(feeds).values() if session.has_bfloat16 else inner.run(outputs, feeds)
        # onnxruntime's uint64 is `ulonglong` of NumPy, an equal dtype that torch refuses.
        return [library.from_numpy(result.view(np.dtype(result.dtype.name)), xp, device) for result in results]

    return run


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the byte order of the machine: onnxruntime reads any other as if it were that."""
    array = np.asarray(array)  # a memory map, too
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _takes_dlpack() -> bool:
    """Return whether the release of onnxruntime exchanges values by DLPack; 1.23 does not."""
    import onnxruntime

    return all(hasattr(onnxruntime.OrtValue, name) for name in ("from_dlpack", "__dlpack__"))


def _by_dlpack(inner: Any, order: dict[str, int], of_caller: Any) -> Run:
    """Return what runs a session on arrays on the device of one of them."""
    kind, index = of_caller.__dlpack_device__()
    place = ("cpu", 0) if int(kind) == _HOST else ("cuda", int(index))
    outputs = inner.get_outputs()
    library = library_of(of_caller)
    xp: Any = library.namespace(of_caller)

    def array_of(value: Any, name: str) -> Any:
        array = xp.from_dlpack(value)
        is_same = (dtype_name(array.dtype) == "bool") == (name == "tensor(bool)")
        return array if is_same else xp.astype(array, xp.bool)  # onnxruntime passes bool as uint8

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        binding = inner.io_binding()  # one for each run, since threads may run at once
        values = {name: _value_of(arrays[n]) for name, n in order.items()}  # no binding keeps memory alive
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for output in outputs:
            binding.bind_output(output.name, *place)
        if place[0] != "cpu":
            binding.synchronize_inputs()  # a GPU may still compute the arrays, in a queue of their library
        inner.run_with_iobinding(binding)
        return [array_of(value, out.type) for value, out in zip(binding.get_outputs(), outputs, strict=True)]

    return run


def _value_of(array: Any) -> Any:
    """Return a value of onnxruntime in the memory of an array, if its elements lie side by side in order."""
    from onnxruntime import OrtValue

    library = library_of(array)
    if isinstance(array, np.ndarray) or dtype_name(array.dtype) == "bool":  # DLPack's bool is refused
        return OrtValue.ortvalue_from_numpy(np.asarray(library.to_numpy(array), order="C"))
    if library.autograd is not None:
        array = library.autograd.detach(array)
    try:
        return OrtValue.from_dlpack(array)
    except RuntimeError:  # there are gaps between the elements, or they are in another order
        xp: Any = library.namespace(array)
        copied = xp.asarray(xp.reshape(array, (-1,)), copy=True)
        return OrtValue.from_dlpack(xp.reshape(copied, array.shape))
