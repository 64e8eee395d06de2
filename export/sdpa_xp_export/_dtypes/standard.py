"""The functions of the array API that concern dtypes alone."""

from __future__ import annotations

from typing import Any

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message
from sdpa_xp_export._dtypes.dtype import Dtype, dtype_name
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


class NamespaceInfo:
    """The dtypes that every runtime has."""

    @staticmethod
    def default_dtypes(*, device: object = None) -> dict[str, Dtype]:
        """Return the dtypes of Python scalars that are combined with no array."""
        del device
        integer = Dtype(DEFAULTS[int])
        return {"real floating": Dtype(DEFAULTS[float]), "integral": integer, "indexing": integer}

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
