"""The dtype of a value of a graph, which stands beside the dtypes of other libraries."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import numpy as np

from sdpa_xp._libraries.dtypes import dtype_name as any_dtype_name
from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp_export._dtypes.conversion import numpy_dtype
from sdpa_xp_export._dtypes.promotion import DTYPES

_OF_ONE_SIZE = re.compile(r"(bfloat|complex|float|int|uint)\d\w*")
"""Names of dtypes, also of those that no value of a graph has."""


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
