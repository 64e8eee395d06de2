"""The rules of CuPy 14.2, held by NumPy arrays, for tests on a machine without a GPU. It is not CuPy.

What CuPy refuses is refused here: arrays of NumPy in an operation, operands without a type loop, an array as an
index of a slice, memory of the host, arrays of another device, arguments that a function does not have. What
CuPy lets through goes through: no array is read-only. It computes with NumPy, so that its numbers and times say
nothing about a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as _np

from cupy import _functions, _rules, cuda, random
from cupy._arrays import ndarray
from cupy._ufuncs import ufunc

__version__ = f"{_rules.VERSION}, its rules"
inf, nan, pi, e, newaxis = _np.inf, _np.nan, _np.pi, _np.e, None
dtype, finfo, iinfo = _np.dtype, _np.finfo, _np.iinfo
isdtype, issubdtype, promote_types, broadcast_shapes = (
    _np.isdtype,
    _np.issubdtype,
    _np.promote_types,
    _np.broadcast_shapes,
)
__all__ = ["cuda", "dtype", "finfo", "iinfo", "inf", "isdtype", "nan", "ndarray", "newaxis", "pi", "random"]
__all__ += ["ufunc"]
__all__ += ["broadcast_shapes", "e", "issubdtype", "promote_types"]

_DTYPES = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
for _name in f"{_DTYPES} intp number integer signedinteger unsignedinteger floating complexfloating".split():
    globals()[_name] = getattr(_np, _name)
    __all__ += [_name]
globals().update({name: ufunc(name, getattr(_np, name)) for name in _rules.LOOPS}, **_functions.FUNCTIONS)
__all__ += [*_rules.LOOPS, *_functions.FUNCTIONS]


def __getattr__(name: str) -> Any:
    """Return a function that says what is missing here, if CuPy has the name."""
    if name not in _rules.NAMES:
        raise AttributeError(f"module 'cupy' has no attribute {name!r}")

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"the rules of CuPy have no {name}")

    return missing
