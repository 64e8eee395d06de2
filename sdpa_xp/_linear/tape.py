"""Gradients of a program on any arrays: its operations are recorded, and read backwards.

The program uses operators, `split`, and the functions of the `Tape`, which is its namespace. Nothing else is
recorded, so a program that needs more fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._checks.arrays import slice_of_axis
from .._libraries.protocols import Shape

Pull = Callable[..., Sequence[Any]]
"""Returns the cotangents of the inputs of an operation, from those of its results."""


class Recorded:
    """An array whose operations are recorded."""

    def __init__(self, tape: Tape, value: Any) -> None:
        self.tape, self.value, self.cotangent = tape, value, None

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    def add_cotangent(self, more: Any) -> None:
        more = summed_to(self.tape.of_values, more, self.shape)
        self.cotangent = more if self.cotangent is None else self.cotangent + more

    def __add__(self, other: Recorded) -> Recorded:
        return self.tape.record(self.value + other.value, [self, other], lambda d: (d, d))

    def __sub__(self, other: Recorded) -> Recorded:
        return self.tape.record(self.value - other.value, [self, other], lambda d: (d, -d))

    def __mul__(self, other: Recorded) -> Recorded:
        a, b = self.value, other.value
        return self.tape.record(a * b, [self, other], lambda d: (d * b, d * a))

    def __matmul__(self, other: Recorded) -> Recorded:
        a, b, transpose = self.value, other.value, self.tape.of_values.matrix_transpose
        return self.tape.record(a @ b, [self, other], lambda d: (d @ transpose(b), transpose(a) @ d))


class Tape:
    """The operations of a program, and the namespace of its arrays."""

    def __init__(self, xp: Any) -> None:
        self.of_values = xp
        self._steps: list[tuple[list[Recorded], Sequence[Recorded], Pull]] = []

    def record(self, value: Any, inputs: Sequence[Recorded], pull: Pull) -> Recorded:
        return self.record_all([value], inputs, pull)[0]

    def record_all(self, values: Sequence[Any], inputs: Sequence[Recorded], pull: Pull) -> list[Recorded]:
        results = [Recorded(self, value) for value in values]
        self._steps.append((results, inputs, pull))
        return results

    def pull_back(self) -> None:
        """Give each recorded array its cotangent, from those of the results. The tape is empty then."""
        while self._steps:
            results, inputs, pull = self._steps.pop()
            if any(result.cotangent is not None for result in results):
                zeros = self.of_values.zeros_like
                moved = [zeros(x.value) if x.cotangent is None else x.cotangent for x in results]
                for array, cotangent in zip(inputs, pull(*moved), strict=True):
                    array.add_cotangent(cotangent)

    # The functions of the array API

    def exp(self, x: Recorded, /) -> Recorded:
        y = self.of_values.exp(x.value)
        return self.record(y, [x], lambda d: [d * y])

    def sum(self, x: Recorded, /, *, axis: int, keepdims: bool) -> Recorded:
        xp = self.of_values
        total = xp.sum(x.value, axis=axis, keepdims=keepdims)
        return self.record(total, [x], lambda d: [xp.broadcast_to(d, x.shape)])

    def reshape(self, x: Recorded, /, shape: Shape) -> Recorded:
        xp = self.of_values
        return self.record(xp.reshape(x.value, shape), [x], lambda d: [xp.reshape(d, x.shape)])

    def matrix_transpose(self, x: Recorded, /) -> Recorded:
        transpose = self.of_values.matrix_transpose
        return self.record(transpose(x.value), [x], lambda d: [transpose(d)])

    def concat(self, arrays: Sequence[Recorded], /, *, axis: int) -> Recorded:
        lengths = [array.shape[axis] for array in arrays]
        joined = self.of_values.concat([array.value for array in arrays], axis=axis)
        return self.record(joined, arrays, lambda d: split(d, lengths, axis))

    def ones_like(self, x: Recorded, /) -> Recorded:
        return Recorded(self, self.of_values.ones_like(x.value))


def split(array: Any, lengths: Sequence[int], axis: int) -> list[Any]:
    """Cut an array along an axis, counted from the last (-1), into parts of these lengths."""
    if isinstance(array, Recorded):
        xp, parts = array.tape.of_values, split(array.value, lengths, axis)
        return array.tape.record_all(parts, [array], lambda *moved: [xp.concat(moved, axis=axis)])
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return [array[slice_of_axis(axis, end - length, end)] for length, end in zip(lengths, ends, strict=True)]


def summed_to(xp: Any, array: Any, shape: Shape) -> Any:
    """Return a gradient of what was broadcast from `shape`, summed over the axes along which it was."""
    while array.ndim > len(shape):
        array = xp.sum(array, axis=0)
    for axis, length in enumerate(shape):
        if array.shape[axis] != length:
            array = xp.sum(array, axis=axis, keepdims=True)
    return array
