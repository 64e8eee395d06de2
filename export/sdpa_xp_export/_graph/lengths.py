"""What is known only when the graph runs: lengths, which are names until then, and the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from sdpa_xp._checks.arrays import broadcast
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export.spec import SymbolicShape, addends, as_lengths

HINT = (
    "Lengths add up, and `reshape` takes -1. Write xp = x.__array_namespace__(), then xp.arange(x.shape[1]), "
    "xp.zeros(x.shape), xp.asarray(x.shape[1]) for its value, or xp.take(table, xp.arange(x.shape[1]), axis=0) "
    "for table[: x.shape[1]]."
)
COMPARISON_HINT = (
    "Write a number in the spec if the length is fixed. Otherwise choose in the graph: write "
    "xp = x.__array_namespace__(), then xp.where(xp.asarray(x.shape[1]) == 1, a, b)."
)
KEY_HINT = "As a key, use str(x.shape[1]), the name of the length. " + COMPARISON_HINT


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


class LengthOwner(Protocol):
    """The graph of a length, of which a length itself asks only the name for messages."""

    @property
    def function(self) -> str: ...


class Length:
    """The name of a length, or a sum of names. It stands in shapes, but it is not a number.

    `past + new` is the length of both, and `past + new - new` is `past` again. A cache needs no more to say
    where its tokens stand. A length is equal to itself. Any other comparison is refused, because a run decides
    it, and Python would take one branch for all runs.
    """

    __slots__ = ("graph", "name")

    def __init__(self, graph: LengthOwner, name: str) -> None:
        self.graph = graph
        self.name = name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)

    @classmethod
    def in_shape(cls, graph: LengthOwner, shape: SymbolicShape) -> tuple[int | Length, ...]:
        """Return a shape as the caller sees it: its names know their graph."""
        return tuple(length if isinstance(length, int) else cls(graph, length) for length in shape)

    def _sum(self, parts: list[str]) -> int | Length:
        if all(part.isdecimal() for part in parts):
            return sum(map(int, parts))
        return Length(self.graph, "+".join(parts))

    def __add__(self, other: object) -> Any:
        return self._sum([*addends(self.name), *self._parts(other)])

    def __radd__(self, other: object) -> Any:
        return self._sum([*self._parts(other), *addends(self.name)])

    def __sub__(self, other: object) -> Any:
        left = addends(self.name)
        for part in self._parts(other):
            if part not in left:
                self._refuse()
            left.remove(part)
        return self._sum(left)

    def _parts(self, other: object) -> list[str]:
        """Return the names and numbers that a length or a number is the sum of; 0 has none."""
        if isinstance(other, Length):
            return addends(other.name)
        if isinstance(other, bool) or not isinstance(other, int) or other < 0:
            self._refuse()
        return [str(other)] if other else []

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise length_error(self.graph.function, {"length": self})

    def _refuse_comparison(self, *_: object) -> NoReturn:
        raise length_error(self.graph.function, {"length": self}, COMPARISON_HINT)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | Length) and sorted(addends(self.name)) == sorted(addends(str(other))):
            return True
        # A value of the graph compares itself, in the graph. None and a tuple are no lengths.
        if other is None or isinstance(other, tuple | list) or hasattr(type(other), "__sdpa_xp__"):
            return NotImplemented
        return self._refuse_comparison()

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __hash__(self) -> NoReturn:
        # With a hash, a dict with numbers as keys would miss each length without a comparison.
        raise length_error(self.graph.function, {"length": self}, KEY_HINT)

    def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> NoReturn:
        """Refuse the functions of NumPy, also those that a number of NumPy on the left calls."""
        if ufunc in _COMPARISONS:
            self._refuse_comparison()
        self._refuse()

    # Each operator is refused by name: without one, Python's own error would not say what to write instead.
    __array__: Any = _refuse
    __array_function__ = __index__ = __int__ = __float__ = __complex__ = __round__ = __neg__ = __array__
    __abs__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __array__
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __array__
    __and__ = __rand__ = __lshift__ = __rshift__ = __array__
    __bool__: Any = _refuse_comparison
    __lt__ = __le__ = __gt__ = __ge__ = __bool__


def length_error(function: str, got: Mapping[str, object], hint: str = HINT) -> TypeError:
    """Return the error for a length that is used as a number, in Python or in NumPy."""
    rule = "a length that is known only when the graph runs cannot be used as a Python number"
    return ArgumentTypeError(function, rule, got, hint)


def plain(length: Any) -> Any:
    """Return the name of a length, which the exporter compares with other names; other objects unchanged."""
    return length.name if isinstance(length, Length) else length


def has_names(shape: Sequence[Any]) -> bool:
    """Return whether one of the lengths is known only when the graph runs."""
    return any(isinstance(length, str) for length in shape)


def joined_name(*parts: object) -> str:
    """Return a name for a new length, made of what it follows from; equal parts give equal names."""
    return "_".join(str(part).replace("+", "_and_").replace("-", "minus_") for part in parts)


def joint_shape(*shapes: SymbolicShape) -> SymbolicShape:
    """Return the shape that `shapes` broadcast to."""
    joint = broadcast(*map(as_lengths, shapes))
    if joint is None:
        rule = "shapes must broadcast; a name broadcasts only with itself and with 1"
        raise ArgumentValueError("to_onnx", rule, {"shapes": ", ".join(map(str, shapes))})
    return joint


def broadcasts_to(shape: SymbolicShape, target: SymbolicShape) -> bool:
    """Return whether an array of `shape` broadcasts to `target` without making it larger."""
    return broadcast(as_lengths(shape), as_lengths(target)) == target


class Device:
    """The one device of all values, which the session of a run decides. Any other comparison is refused."""

    def __repr__(self) -> str:
        return "the device of a graph"

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, Device):
            return other is not None
        return self._refuse()

    def __hash__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        rule = "a value of a graph has no device to be compared, since a run chooses it"
        hint = "Write the graph for each device: `runtime` names the provider, as in 'onnxruntime>=1.28;cuda'."
        raise ArgumentTypeError("to_onnx", rule, {"x.device": self}, hint)


DEVICE = Device()
