"""The operands of an exported call instead of arrays: inputs of the graph, and numbers that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from types import ModuleType
from typing import Any, TypeAlias

import array_api_compat
from numpy.typing import NDArray

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from .. import _dtypes
from .._dtypes.dtype import to_numpy
from ..spec import SymbolicShape, TensorSpec


@dataclass(frozen=True, slots=True)
class Input(TensorSpec):
    """An input of the graph, by its name. Like each spec, it is an array to the library's masks and biases."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Initializer:
    """Numbers that the graph holds under a name; an array to masks and biases, as a spec is."""

    name: str
    numbers: NDArray[Any]

    @property
    def dtype(self) -> str:
        return str(self.numbers.dtype.name)

    @property
    def shape(self) -> SymbolicShape:
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        return self.numbers.ndim

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        return _dtypes

    def __str__(self) -> str:
        return f"initializer({self.name!r})"


GraphOperand: TypeAlias = Input | Initializer


@dataclass(slots=True)
class OperandNamer:
    """Gives each spec and each array of a call a unique name: the name of its argument, if that is free."""

    function: str
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    initializers: dict[str, Initializer] = field(default_factory=dict)

    def operand(self, name: str, value: object) -> Any:
        """Return `value` with inputs and initializers instead of the specs and arrays that it is or holds."""
        if isinstance(value, TensorSpec):
            free = self._free(name)
            self.inputs[free] = value
            return Input(value.dtype, value.shape, free)
        if isinstance(value, Mask | Bias):
            return with_operands(
                value, lambda argument, operand: self.operand(getattr(value, "argument", argument), operand)
            )
        if isinstance(value, Initializer):  # read back from a model
            self.initializers[value.name] = value
            return value
        if array_api_compat.is_array_api_obj(value):
            free = self._free(name)
            self.initializers[free] = Initializer(free, to_numpy(self.function, name, value))
            return self.initializers[free]
        return value

    def _free(self, name: str) -> str:
        names = (name if n == 1 else f"{name}_{n}" for n in count(1))
        return next(free for free in names if free not in self.inputs and free not in self.initializers)


def with_operands(value: Any, operand: Callable[[str, Any], Any]) -> Any:
    """Return a mask or a bias with `operand(name, argument)` instead of each argument or joined part."""
    changed = {
        name: (
            tuple(operand(name, part) for part in value.parts)
            if value.parts and isinstance(argument, tuple)
            else operand(name, argument)
        )
        for name, argument in value.arguments.items()
    }
    # A class of the caller may take other arguments than its fields: it is made anew only if it holds arrays.
    is_same = all(argument is changed[name] for name, argument in value.arguments.items())
    return value if is_same else replace(value, **changed)


def kind_of(value: Mask | Bias) -> str:
    """Return the name of a mask or a bias of the library, and "" for a class of the caller.

    A subclass of a mask of the library has its name, but may have another formula.
    """
    return value.name if type(value).__module__.startswith("sdpa_xp.") else ""
