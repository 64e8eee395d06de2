"""Dtypes in the namespace of values, where they are names: what they promote to, and which there are."""

from __future__ import annotations

from typing import Any

from sdpa_xp.checks import message
from sdpa_xp_export._dtypes.promotion import (
    DEFAULTS,
    DTYPES,
    FLOATING,
    INTEGERS,
    NUMERIC,
    SIGNED,
    UNSIGNED,
    holds,
    joint,
    of_scalar,
)

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


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library."""
    found = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(found).rpartition(".")[2]
    if name not in DTYPES:
        rule = f"`dtype` must be one of {', '.join(DTYPES)}"
        raise TypeError(message("to_onnx", rule, {"dtype": repr(dtype)}))
    return name


def result_type(*arrays_and_dtypes: Any) -> str:
    """Return the dtype that arrays, dtypes and Python scalars promote to."""
    scalars = [each for each in arrays_and_dtypes if isinstance(each, bool | int | float)]
    dtypes = [
        dtype_name(getattr(each, "dtype", each))
        for each in arrays_and_dtypes
        if not isinstance(each, bool | int | float)
    ]
    if not dtypes:
        rule = "there must be an array or a dtype"
        raise ValueError(message("result_type", rule, {"arguments": arrays_and_dtypes}))
    found: str | None = dtypes[0]
    for dtype in dtypes[1:]:
        found = joint(found, dtype) if found else None
    if found is None or any(found not in of_scalar(each) for each in scalars):
        rule = "the arguments must have dtypes that the array API promotes to one"
        raise TypeError(message("result_type", rule, {"dtypes": ", ".join(dtypes), "scalars": scalars}))
    for each in scalars:
        if found in INTEGERS and not holds(found, int(each)):
            rule = "a Python integer must be within the dtype of the arrays"
            raise OverflowError(message("result_type", rule, {"integer": each, "dtype": found}))
    return found


class Info:
    """The dtypes that every runtime has."""

    @staticmethod
    def default_dtypes(*, device: object = None) -> dict[str, str]:
        """Return the dtypes of Python scalars that stand beside no array."""
        del device
        integer = DEFAULTS[int]
        return {"real floating": DEFAULTS[float], "integral": integer, "indexing": integer}

    @staticmethod
    def dtypes(*, device: object = None, kind: Any = None) -> dict[str, str]:
        """Return dtypes by name, of all kinds or of some."""
        del device
        kinds = KINDS if kind is None else (kind,) if isinstance(kind, str) else kind
        named = {name for each in kinds for name in KINDS[each]}
        return {name: name for name in EVERYWHERE if name in named}


def __array_namespace_info__() -> Info:  # noqa: N807, the standard's name
    """Return what there is to know of the dtypes."""
    return Info()
