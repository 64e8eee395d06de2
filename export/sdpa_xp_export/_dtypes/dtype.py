"""The dtypes of the values of a graph: their kinds and names, what two of them promote to, and arrays in them.

Promotion follows the array API standard 2024.12. It has no half precision; float16 and bfloat16 are as in NumPy
with ml_dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sdpa_xp._libraries import dtype_name as any_dtype_name
from sdpa_xp._libraries import library_of
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = (*SIGNED, *UNSIGNED)
FLOATING = ("float16", "bfloat16", "float32", "float64")
NUMERIC = (*INTEGERS, *FLOATING)
DTYPES = ("bool", *NUMERIC)

CATEGORIES = {
    "boolean": ("bool",),
    "integer": INTEGERS,
    "integer or boolean": ("bool", *INTEGERS),
    "floating": FLOATING,
    "numeric": NUMERIC,
    "any": DTYPES,
}
"""The dtypes that a function takes, by the names that the standard has for these sets."""

_DEFAULTS: ContextVar[tuple[str, str]] = ContextVar("defaults", default=("float32", "int64"))

KINDS = {
    "bool": ("bool",),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": INTEGERS,
    "real floating": FLOATING,
    "complex floating": (),
    "numeric": NUMERIC,
}
"""The dtypes of each kind, by the names that the standard has for kinds."""

EVERYWHERE = tuple(dtype for dtype in DTYPES if dtype not in ("float16", "bfloat16"))
"""The dtypes that every runtime has."""
_OF_ONE_SIZE = re.compile(r"(bfloat|complex|float|int|uint)\d\w*")
"""Names of dtypes, also of those that no value of a graph has."""


def default_dtype(kind: type) -> str:
    """Return the dtype of numbers that are combined with no array: of bool, int or float."""
    of_floats, of_integers = _DEFAULTS.get()
    return {bool: "bool", int: of_integers, float: of_floats}[kind]


@contextmanager
def default_dtypes(of_floats: str, of_integers: str) -> Iterator[None]:
    """Let the numbers that a layer itself makes have these dtypes, if it names none."""
    token = _DEFAULTS.set((of_floats, of_integers))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


class Dtype:
    """The dtype of a value of a graph. It equals the dtype of its name of any library."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy reads this where it is asked for a dtype: `numpy.finfo(x.dtype)`."""
        return numpy_dtype(self.name)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        name = any_dtype_name(other)
        if name not in DTYPES and not _OF_ONE_SIZE.fullmatch(name):
            rule = "a dtype of a graph must be compared with a dtype"
            hint = f"Write one of {', '.join(DTYPES)}, as text or as a dtype of a library."
            raise ArgumentTypeError("to_onnx", rule, {"compared with": repr(other)}, hint)
        return self.name == name

    if not TYPE_CHECKING:  # a type checker would allow any attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # Python asks for some of a dtype that is not made yet
                raise AttributeError(name)
            rule = f"a dtype of a graph has no attribute {name!r}"
            hint = "Write xp.isdtype(x.dtype, 'integral') for its kind, and xp.iinfo or xp.finfo(x.dtype).bits."
            raise AttributeError(Message("to_onnx", rule, {"dtype": self}, hint))

    def __hash__(self) -> NoReturn:
        # Equal objects need one hash, and the dtypes of other libraries have others: a dict would miss them.
        rule = "a dtype of a graph cannot be a key, or be in a set"
        hint = "Compare with `==`, or with the dtypes of a tuple; as a key, use str(x.dtype)."
        raise ArgumentTypeError("to_onnx", rule, {"dtype": self.name}, hint)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library."""
    name = any_dtype_name(dtype)
    if name not in DTYPES:
        rule = f"`dtype` must be one of {', '.join(DTYPES)}"
        raise ArgumentTypeError("to_onnx", rule, {"dtype": repr(dtype)})
    return name


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


_IN_ORDER = "float32 uint8 int8 uint16 int16 int32 int64 - bool float16 float64 uint32 uint64 - - bfloat16"
ONNX_DTYPE = {name: number for number, name in enumerate(_IN_ORDER.split(), 1) if name != "-"}
"""The number that ONNX has for each dtype, by name. onnx is not asked: `_backends` does without it."""


def to_numpy(function: str, name: str, array: Any) -> NDArray[Any]:
    """Return the numbers of an array of any library; they share its memory if that is the host's.

    Args:
        function: The function that messages name.
        name: The argument that messages name.
        array: The array; its dtype must be one that a graph holds.
    """
    numbers: NDArray[Any] = library_of(array).to_numpy(array)
    if any_dtype_name(array.dtype) == "bfloat16":
        # NumPy has no bfloat16, so the library gives float32, which has all of its numbers.
        numbers = numbers.astype(ml_dtypes.bfloat16, copy=False)
    dtypes = (*FLOATING, *INTEGERS, "bool")
    if numbers.dtype.name not in dtypes:
        rule = f"`{name}` must be of a dtype that a graph holds, {', '.join(dtypes)}"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": numbers.dtype})
    return numbers


def bits(dtype: str) -> int:
    """Return the number of bits of one element."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # bool


def joint(one: str, other: str) -> str | None:
    """Return the dtype that two dtypes promote to, or None if the standard leaves it undefined."""
    if one == other:
        return one
    for kind in (SIGNED, UNSIGNED):
        if one in kind and other in kind:
            return max(one, other, key=bits)
    if one in INTEGERS and other in INTEGERS:
        signed, unsigned = (one, other) if one in SIGNED else (other, one)
        size = max(bits(signed), 2 * bits(unsigned))
        return f"int{size}" if size <= 64 else None
    if one in FLOATING and other in FLOATING:
        return None if bits(one) == bits(other) else max(one, other, key=bits)  # float16 and bfloat16: neither
    return None


def joint_of_kinds(one: str, other: str) -> str | None:
    """Promote dtypes of different kinds too: a bool becomes a number, and an integer becomes a float."""
    if one == "bool" or (one in INTEGERS and other in FLOATING):
        return other
    if other == "bool" or (other in INTEGERS and one in FLOATING):
        return one
    return joint(one, other)


def of_scalar(scalar: object) -> tuple[str, ...]:
    """Return the dtypes of the arrays that a Python scalar may be combined with."""
    if isinstance(scalar, bool):
        return ("bool",)
    return FLOATING if isinstance(scalar, float) else NUMERIC


def holds(dtype: str, number: int) -> bool:
    """Return whether an integer dtype can represent `number`."""
    size = bits(dtype)
    least, most = (0, 2**size - 1) if dtype in UNSIGNED else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
    return bool(least <= number <= most)


def result_type(*arrays_and_dtypes: Any) -> Dtype:
    """Return the dtype that arrays, dtypes and Python scalars promote to."""
    scalars = [argument for argument in arrays_and_dtypes if isinstance(argument, bool | int | float)]
    dtypes = [
        dtype_name(getattr(argument, "dtype", argument))
        for argument in arrays_and_dtypes
        if not isinstance(argument, bool | int | float)
    ]
    if not dtypes:
        rule = "there must be an array or a dtype"
        raise ArgumentValueError("result_type", rule, {"arguments": arrays_and_dtypes})
    promoted: str | None = dtypes[0]
    for dtype in dtypes[1:]:
        promoted = joint(promoted, dtype) if promoted else None
    if promoted is None or any(promoted not in of_scalar(scalar) for scalar in scalars):
        rule = "the arguments must have dtypes that the array API promotes to one"
        raise ArgumentTypeError("result_type", rule, {"dtypes": ", ".join(dtypes), "scalars": scalars})
    for scalar in scalars:
        if promoted in INTEGERS and not holds(promoted, int(scalar)):
            rule = "a Python integer must be within the range of the dtype of the arrays"
            raise OverflowError(Message("result_type", rule, {"integer": scalar, "dtype": promoted}))
    return Dtype(promoted)


def can_cast(from_: Any, to: Any, /) -> bool:
    """Return whether an array or a dtype promotes to a dtype."""
    return joint(dtype_name(getattr(from_, "dtype", from_)), dtype_name(to)) == dtype_name(to)


def isdtype(dtype: Any, kind: Any) -> bool:
    """Return whether a dtype is of a kind, or of one of several: names of kinds, and dtypes."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str) and kind not in KINDS:
        rule = f"`kind` must be one of {', '.join(KINDS)}, or a dtype"
        raise ArgumentValueError("isdtype", rule, {"kind": kind})
    name = dtype_name(dtype)
    return name in KINDS[kind] if isinstance(kind, str) else name == dtype_name(kind)


@dataclass(frozen=True)
class FloatInfo:
    """The limits of a floating dtype."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: Dtype


@dataclass(frozen=True)
class IntegerInfo:
    """The limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: Dtype


def finfo(type: Any, /) -> FloatInfo:
    """Return the limits of the floating dtype of an array, or of a dtype."""
    name = _name_of_kind("finfo", type, FLOATING)
    info: Any = cast(Any, ml_dtypes).finfo(numpy_dtype(name))  # which has no types
    eps, most, least, normal = (float(x) for x in (info.eps, info.max, info.min, info.smallest_normal))
    return FloatInfo(info.bits, eps, most, least, normal, Dtype(name))


def iinfo(type: Any, /) -> IntegerInfo:
    """Return the limits of the integer dtype of an array, or of a dtype."""
    name = _name_of_kind("iinfo", type, INTEGERS)
    info = np.iinfo(name)
    return IntegerInfo(info.bits, int(info.max), int(info.min), Dtype(name))


def _name_of_kind(function: str, type: Any, dtypes: tuple[str, ...]) -> str:
    dtype = type if isinstance(type, Dtype | str | np.dtype) else getattr(type, "dtype", type)
    name = dtype_name(dtype)
    if name not in dtypes:
        rule = f"the dtype must be one of {', '.join(dtypes)}"
        raise ArgumentTypeError(function, rule, {"dtype": name})
    return name


class NamespaceInfo:
    """The dtypes that every runtime has, and what a graph can do."""

    @staticmethod
    def capabilities() -> dict[str, Any]:
        """Return whether masks index, whether shapes may follow from data, and how many axes there may be."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": None}

    @staticmethod
    def default_device() -> None:
        """Return None: a run chooses the device."""

    @staticmethod
    def devices() -> tuple[None]:
        """Return the one device that there is while the graph is written."""
        return (None,)

    @staticmethod
    def default_dtypes(*, device: object = None) -> dict[str, Dtype]:
        """Return the dtypes of Python scalars that are combined with no array."""
        del device
        integer = Dtype(default_dtype(int))
        return {"real floating": Dtype(default_dtype(float)), "integral": integer, "indexing": integer}

    @staticmethod
    def dtypes(*, device: object = None, kind: Any = None) -> dict[str, Dtype]:
        """Return the dtypes of all kinds, or of one or several, by name."""
        del device
        kinds = KINDS if kind is None else (kind,) if isinstance(kind, str) else kind
        wanted = {name for kind in kinds for name in KINDS[kind]}
        return {name: Dtype(name) for name in EVERYWHERE if name in wanted}


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807, the standard's name
    """Return the object that describes the dtypes."""
    return NamespaceInfo()
