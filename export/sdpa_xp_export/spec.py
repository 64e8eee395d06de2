"""A dtype and a shape, which stand in a call for an array."""

from __future__ import annotations

import numbers
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, cast

from sdpa_xp._checks import Immutable, nearest_hint
from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp._libraries import dtype_name
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from . import _dtypes
from ._dtypes.dtype import FLOATING, INTEGERS

SymbolicShape: TypeAlias = tuple[int | str, ...]
"""A shape whose axes are integers, or names of lengths that are known when the graph runs."""

DTYPES = (*FLOATING, *INTEGERS, "bool")
_OTHER_NAMES = {
    **dict.fromkeys(("float", "single", "fp32", "f32"), "float32"),
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("double", "fp64", "f64"), "float64"),
    "bf16": "bfloat16",
    **dict.fromkeys(("int", "long"), "int64"),
}
"""Names of other libraries -> names of ONNX. Among names that are equally near, difflib would take any."""
_OPEN = "Write a name, such as 'L', for an open length."
_SPEC = re.compile(r"(?P<dtype>\w+) *\[(?P<shape>[^\]]*)\]")
_LARGEST = 2**63 - 1
"""The largest length that ONNX has room for."""


@explains_keywords
@dataclass(frozen=True, init=False, slots=True)
class TensorSpec(Immutable):
    """The dtype and the shape of an input of the graph. Pass it wherever the library takes an array.

    Args:
        dtype: "float16", "bfloat16", "float32", "float64", "int8" to "int64", "uint8" to
            "uint64", or "bool"; or a dtype of an array library that has one of these names.
        shape: A length is an integer, or a name for a length that is known only when the graph runs. The same
            name stands for the same length everywhere in the call. "P+L" is a sum of names.

    Raises:
        TypeError: A length is neither an integer nor a name.
        ValueError: The dtype is unknown, a length is below 0 or above 2**63 - 1, or a name is neither an
            identifier nor a sum of identifiers.

    Examples:
        >>> spec = TensorSpec("float32", ("B", 8, "L", 64))
        >>> spec == TensorSpec.parse("float32[B,8,L,64]")
        True
    """

    dtype: str
    shape: SymbolicShape

    def __init__(self, dtype: Any, shape: Sequence[int | str]) -> None:
        name = dtype if isinstance(dtype, str) else dtype_name(dtype)
        if name not in DTYPES:
            rule = f"`dtype` must be one of {', '.join(DTYPES)}"
            raise ArgumentValueError("TensorSpec", rule, {"dtype": repr(dtype)}, dtype_hint(dtype, DTYPES))
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            rule = "`shape` must be a tuple of integers and names"
            raise ArgumentTypeError("TensorSpec", rule, {"shape": repr(shape)})
        object.__setattr__(self, "dtype", name)  # frozen, so that specs can be shared and compared
        object.__setattr__(self, "shape", tuple(_checked_length(length, shape) for length in shape))

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Return the spec that is written as `float32[B,8,L,64]`, as on the command line.

        Args:
            text: A dtype, and the shape in brackets.

        Raises:
            ValueError: `text` has another form, or is not a valid spec.
        """
        match = _SPEC.fullmatch(text.strip()) if isinstance(text, str) else None
        # Spaces may stand around the signs. Within a name or a number they are a comma that was forgotten.
        shape_text = re.sub(r" *([,+]) *", r"\1", match["shape"].strip()) if match else ""
        lengths = shape_text.split(",") if shape_text else []
        if match is None or "" in lengths:
            rule = "`text` must be a dtype, and its lengths in brackets"
            raise ArgumentValueError("TensorSpec", rule, {"text": repr(text)}, "As in float32[B,8,L,64].")
        shape = tuple(int(part) if re.fullmatch(r"-?[0-9]+", part) else part for part in lengths)
        return cls(match["dtype"], shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def floating(self) -> bool:
        """Whether the dtype is a floating dtype."""
        return self.dtype in FLOATING

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        """Return the dtypes. The method makes a spec an array to masks and biases, which look at its dtype."""
        return _dtypes


def dtype_hint(name: object, names: Collection[str]) -> str:
    """Return the hint that names the dtype, of `names`, that was probably meant; empty if none is near."""
    meant = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    return nearest_hint(meant, names, likeness=0.75)


def spec_hint(value: object) -> str:
    """Return which spec to write instead of a value: of an array, of a shape, or of the text of a spec."""
    if isinstance(value, str):
        return f"Write TensorSpec.parse({value!r})."
    if isinstance(value, tuple | list) and value and all(isinstance(length, int | str) for length in value):
        return f"Write TensorSpec('float32', {tuple(value)})."
    return array_spec_hint(value)


def array_spec_hint(*values: object) -> str:
    """Return the spec of the first array among values, also in tuples, lists and mappings; "" without one."""
    for value in values:
        if isinstance(value, tuple | list | Mapping):
            nested = value.values() if isinstance(value, Mapping) else value
            if hint := array_spec_hint(*nested):
                return hint
            continue
        try:
            spec = TensorSpec(value.dtype, tuple(value.shape))  # type: ignore[attr-defined]  # of any library
        except (AttributeError, TypeError, ValueError):  # no array, or of a dtype that no spec has
            continue
        return f"Describe the array: TensorSpec({spec.dtype!r}, {spec.shape}). {_OPEN}"
    return ""


def _checked_length(length: Any, shape: Sequence[Any]) -> int | str:
    """Return a length as an int, or as a name."""
    got = {"shape": tuple(shape)}
    if isinstance(length, str):
        parts = length.split("+")
        are_addends = (part.isidentifier() or (part.isdecimal() and int(part) <= _LARGEST) for part in parts)
        if not any(map(str.isidentifier, parts)) or not all(are_addends):
            rule = "a name in `shape` must be an identifier, or a sum of them"
            hint = "A comma separates lengths." if " " in length else ""
            raise ArgumentValueError("TensorSpec", rule, got, hint)
        return length
    if isinstance(length, bool) or not isinstance(length, numbers.Integral):
        raise ArgumentTypeError("TensorSpec", "`shape` must hold integers and names", got, _OPEN)
    number = int(length)
    if not 0 <= number <= _LARGEST:
        rule = "a length in `shape` must be " + ("at least 0" if number < 0 else "at most 2**63 - 1")
        raise ArgumentValueError("TensorSpec", rule, got, _OPEN)
    return number


def addends(length: str) -> list[str]:
    """Return the names and numbers that a length is the sum of."""
    return length.split("+")


def names_in(specs: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Return the names of lengths in specs, in order of appearance."""
    parts = (part for spec in specs for length in spec.shape for part in addends(str(length)))
    return tuple(dict.fromkeys(part for part in parts if not part.isdecimal()))


def evaluated(length: int | str, lengths: Mapping[str, int]) -> int:
    """Return a length as a number, when its names have these lengths."""
    if isinstance(length, int):
        return length
    return sum(int(part) if part.isdecimal() else lengths[part] for part in addends(length))


def shared(
    length: int | str,
    total: int,
    chosen: Mapping[str, int],
    names: Collection[str],
    may_be_0: Collection[str] = (),
) -> dict[str, int]:
    """Return lengths for `names` that are not chosen yet, so that their sum `length` is `total`.

    The first name takes what the others leave, and is at least 1 unless it is in `may_be_0`.
    """
    parts = addends(str(length))
    free = [part for part in parts if part in names and part not in chosen]
    rest = total - sum(int(part) if part.isdecimal() else chosen.get(part, 0) for part in parts)
    first = {name: max(rest - len(free) + 1, 0 if name in may_be_0 else 1) for name in free[:1]}
    return first | dict.fromkeys(free[1:], 1)


def as_lengths(shape: SymbolicShape) -> tuple[int, ...]:
    """Return a shape as the library's checks type it: they compare lengths, so names may stand among them."""
    return cast(tuple[int, ...], shape)


def total(one: int | str, other: int | str) -> int | str:
    """Return the length of two arrays that are joined."""
    return one + other if isinstance(one, int) and isinstance(other, int) else f"{one}+{other}"
