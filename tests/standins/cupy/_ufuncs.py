"""Ufuncs: the choice of a type loop, as in cupy/_core/_kernel.pyx of CuPy 14.2. NumPy computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from cupy import _rules
from cupy._arrays import ndarray, on_device, wrapped

Loop: TypeAlias = tuple[tuple[np.dtype[Any], ...], tuple[np.dtype[Any], ...]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WEAK: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
"""Python's numbers. All but bool take the dtype of the arrays that they meet, if these are of their kind."""


class ufunc:  # noqa: N801
    """A function of each element of its operands, which are arrays of CuPy or numbers."""

    def __init__(self, name: str, compute: Any) -> None:
        self.__name__ = self.name = name
        self.types = _rules.LOOPS[name]
        self._compute = compute
        self._loops = [_parsed(loop) for loop in self.types]
        self.nin, self.nout = (len(dtypes) for dtypes in self._loops[0])
        self.nargs = self.nin + self.nout
        self._loop_of = functools.cache(self._find_loop)

    def __repr__(self) -> str:
        return f"<ufunc 'cupy_{self.name}'>"

    def __call__(self, *arguments: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind") -> Any:
        if not self.nin <= len(arguments) <= self.nargs or (out is not None and len(arguments) > self.nin):
            raise TypeError(f"Wrong number of arguments for {self.name!r}; got {len(arguments)}")
        operands, (target,) = arguments[: self.nin], arguments[self.nin :] or (out,)
        for operand in operands:
            if not isinstance(operand, ndarray | np.generic) and type(operand) not in WEAK:
                raise TypeError(f"Unsupported type {type(operand)}")
        if target is not None and not isinstance(target, ndarray):
            raise TypeError("return arrays must be of ArrayType")
        if dtype is None:
            kinds = tuple(type(x) if type(x) in WEAK and type(x) is not bool else None for x in operands)
            dtypes = tuple(x.dtype if hasattr(x, "dtype") else WEAK[type(x)] for x in operands)
            loop = self._loop_of(dtypes, kinds)
        else:
            loop = next((loop for loop in self._loops if loop[1][0] == np.dtype(dtype)), None)
            dtypes = (np.dtype(dtype),)
        if loop is None:
            raise TypeError(f"Wrong type ({dtypes}) of arguments for cupy_{self.name}")
        return self._launch(operands, loop, target, casting)

    def _launch(self, operands: Sequence[Any], loop: Loop, target: ndarray | None, casting: str) -> Any:
        arrays = [x for x in (*operands, target) if isinstance(x, ndarray)]
        on_device(f"cupy_{self.name}", *arrays)
        with np.errstate(all="ignore"):
            values = [
                np.asarray(getattr(x, "_values", x)).astype(t) for x, t in zip(operands, loop[0], strict=True)
            ]
            result = np.asarray(self._compute(*values)).astype(loop[1][0], copy=False)
            if target is None:
                return wrapped(result)
            if not np.can_cast(result.dtype, target.dtype, casting):  # type: ignore[arg-type]
                raise TypeError(
                    f"output (typecode {result.dtype.char!r}) could not be coerced to {target.dtype}"
                )
            target._values[...] = result
        return target

    def _find_loop(self, dtypes: tuple[np.dtype[Any], ...], kinds: tuple[type | None, ...]) -> Loop | None:
        """Return the first loop whose operands the dtypes can be cast to; numbers are weak only if they may."""
        weak = [_score(kind) for kind in kinds if kind is not None]
        strong = [_score(dtype.type) for dtype, kind in zip(dtypes, kinds, strict=True) if kind is None]
        if not (weak and strong and max(strong) >= max(weak)):
            kinds = (None,) * len(kinds)
        for loop in self._loops:
            if all(map(_fits, dtypes, kinds, loop[0])):
                return loop
        return None


def _parsed(loop: str) -> Loop:
    operands, _, results = loop.partition("->")
    return tuple(map(_dtype, operands)), tuple(map(_dtype, results))


def _dtype(character: str) -> np.dtype[Any]:
    return BFLOAT16 if character == "E" else np.dtype(character)


def _score(kind: type) -> int:
    for score, kinds in enumerate((np.bool_, (np.integer, int), (np.inexact, float, complex))):
        if issubclass(kind, kinds):
            return score
    return 3  # bfloat16


def _fits(dtype: np.dtype[Any], kind: type | None, target: np.dtype[Any]) -> bool:
    if np.can_cast(dtype, target):
        return True
    if kind is None:
        return False
    try:
        return bool(np.result_type(kind(0), target) == target)
    except TypeError:
        return False
