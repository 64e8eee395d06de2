"""What an exported call has instead of arrays: inputs, numbers that the graph holds, and outputs by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import ModuleType
from typing import Any, TypeAlias

import array_api_compat
from numpy.typing import NDArray

from sdpa_xp import AttentionStatistics
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp.typing import TopKeys

from .. import _dtypes
from .._dtypes.dtype import to_numpy
from ..spec import SymbolicShape, TensorSpec

AXES: dict[str, tuple[str, ...]] = {
    "output": ("L", "Ev"),
    "lse": ("L",),
    "weights": ("L", "S"),
    "scores": ("L", "S"),
    "row_max": ("L",),
    "entropy": ("L",),
    "key_sums": ("S",),
    "top_weights": ("L", "K"),
    "top_indices": ("L", "K"),
    "block_sums": ("M", "N"),
}
"""The outputs that a graph may have, and the axes of each behind (..., Hq)."""
OUTPUTS = tuple(name for name, axes in AXES.items() if {*axes} <= {"L", "S", "Ev"})
"""Those that take no argument of their own: only `attention_statistics` in a traced function has the others."""
SUMS_OF_QUERIES = ("key_sums", "block_sums")
IN_DTYPE_OF_QUERY = ("output", "weights", "scores")
"""The others have the accumulation dtype."""
OF_TOP_KEYS = {"top_weights": "weights", "top_indices": "indices"}


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


def argument_of(name: str) -> str:
    """Return the argument that an operand of that name is for: `OperandNamer` numbers those that come again."""
    return name.rstrip("_0123456789")


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


def outputs_of(statistics: str | Iterable[str]) -> tuple[str, ...]:
    """Return the outputs for the names in `of`, which the library has checked."""
    names = {statistics} if isinstance(statistics, str) else {*statistics}
    if "top_keys" in names:
        names |= {*OF_TOP_KEYS}
    return tuple(name for name in AXES if name in names)


def by_name(statistics: AttentionStatistics[Any]) -> dict[str, Any]:
    """Return the statistics that were asked for."""
    named = {name: value for name, value in statistics._asdict().items() if value is not None}
    top = named.pop("top_keys", None)
    return named if top is None else named | {name: getattr(top, field) for name, field in OF_TOP_KEYS.items()}


def as_statistics(arrays: Mapping[str, Any]) -> AttentionStatistics[Any]:
    """Return what the library returns from arrays with the names of `by_name`."""
    others = {name: array for name, array in arrays.items() if name not in OF_TOP_KEYS}
    top = {field: arrays[name] for name, field in OF_TOP_KEYS.items() if name in arrays}
    return AttentionStatistics(**others, top_keys=TopKeys(**top) if top else None)


def row_axis(name: str) -> int | None:
    """Return the axis of the queries in an output of that name; None if it is a sum over them."""
    return None if name in SUMS_OF_QUERIES else -len(AXES[name])
