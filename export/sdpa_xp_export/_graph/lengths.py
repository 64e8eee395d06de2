"""What is known only when the graph runs: lengths, which are names until then, and the device."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import numpy as np

from sdpa_xp._checks.arrays import broadcast
from sdpa_xp.errors import ArgumentTypeError

from .._packages import LIBRARIES
from ..spec import SymbolicShape, as_lengths
from .length_names import NamedLengths, Terms, added, length_error, multiplied

COMPARISON_HINT = (
    "Write a number in the spec if the length is fixed. Otherwise choose in the graph: write "
    "xp = x.__array_namespace__(), then xp.where(xp.asarray(x.shape[1]) == 1, a, b)."
)
KEY_HINT = "As a key, use str(x.shape[1]), the name of the length. " + COMPARISON_HINT


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


class LengthOwner(Protocol):
    """The graph of a length: the name for messages, and the names of lengths."""

    @property
    def function(self) -> str: ...

    @property
    def lengths(self) -> NamedLengths: ...  # a field of it

    def float_of(self, operation: str, *operands: Any) -> Any: ...


_Operator: TypeAlias = Callable[[Any, Any], Any]


def _both_sides(combine: Callable[..., Any]) -> tuple[_Operator, _Operator]:
    """Return an operator and its reflection: `combine` gets the value, the other, and both in their order."""
    return lambda one, other: combine(one, other, one, other), lambda one, other: combine(
        one, other, other, one
    )


def _operators(operation: str, of_terms: Callable[[Terms, Terms], Terms] | None = None) -> Any:
    """Return an operator of lengths and its reflection, which give floats beside floats, or without `of_terms`.

    Arrays and a `FloatOfLengths` compute it themselves.
    """

    def combine(length: Any, other: Any, *operands: Any) -> Any:
        if isinstance(other, FloatOfLengths) or hasattr(type(other), "__sdpa_xp__"):
            return NotImplemented
        terms = [] if isinstance(other, float) else [*map(length.terms, operands)]
        if of_terms is None or not terms:
            return length.graph.float_of(operation, *operands)
        return length.from_terms(of_terms(*terms))

    return _both_sides(combine)


class Length:
    """The name of a length, or of an integer computed from lengths. It stands in shapes, but is no number.

    Integer arithmetic gives a sum of products, and the graph has one name for all ways to the same sum:
    `past + new - new` is `past` again, and 2 L // 2 is L. The graph computes it from the lengths of its inputs.
    A division or a power is a `FloatOfLengths`. A length is equal to itself. Any other comparison is refused,
    because a run decides it, and Python would take one branch for all runs.
    """

    __slots__ = ("graph", "name")

    def __init__(self, graph: LengthOwner, name: str) -> None:
        self.graph = graph
        self.name = name

    if not TYPE_CHECKING:  # a type checker knows the attribute of each object as one that can be written

        @property
        def __class__(self) -> type:
            """What `isinstance` asks: an int for the code of a layer, which would see one in a run."""
            return int if _asks_as_layer(sys._getframe(1)) else Length

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)

    @classmethod
    def in_shape(cls, graph: LengthOwner, shape: SymbolicShape) -> tuple[int | Length, ...]:
        """Return a shape as the caller sees it: its names know their graph."""
        return tuple(length if isinstance(length, int) else cls(graph, length) for length in shape)

    __add__, __radd__ = _operators("add", added)
    __sub__, __rsub__ = _operators("subtract", lambda one, other: added(one, other, -1))
    __mul__, __rmul__ = _operators("multiply", multiplied)
    __truediv__, __rtruediv__ = _operators("divide")
    _float_power, _float_quotient, _float_rest = (
        _operators(name)[0] for name in ("pow", "floor_divide", "remainder")
    )

    def __neg__(self) -> Any:
        return 0 - self

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, bool | Length) or (isinstance(other, int) and other < 1):
            self._refuse()
        if not isinstance(other, int):
            return self._float_quotient(other)
        return self.from_terms(self.graph.lengths.quotient(self.terms(self), other))

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other if isinstance(other, int | Length) else self._float_rest(other)

    def __pow__(self, other: Any) -> Any:
        is_count = isinstance(other, int) and other >= 0
        return reduce(operator.mul, [self] * other, 1) if is_count else self._float_power(other)

    def from_terms(self, terms: Terms) -> int | Length:
        """Return the number or the length that is a sum."""
        name = self.graph.lengths.name_of(terms)
        return name if isinstance(name, int) else Length(self.graph, name)

    def terms(self, other: object) -> Terms:
        """Return the terms of a length or a number."""
        if isinstance(other, Length):
            return self.graph.lengths.terms(other.name)
        if isinstance(other, bool) or not isinstance(other, int):
            self._refuse()
        return added({}, {(): other})

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise length_error(self.graph.function, {"length": self})

    def _refuse_comparison(self, *_: object) -> NoReturn:
        raise length_error(self.graph.function, {"length": self}, COMPARISON_HINT)

    def __eq__(self, other: object) -> Any:
        return self._is_equal(other, sys._getframe(1))

    def __ne__(self, other: object) -> Any:
        equal = self._is_equal(other, sys._getframe(1))
        return equal if equal is NotImplemented else not equal

    def _is_equal(self, other: object, frame: types.FrameType) -> Any:
        """Return whether this is the other length, for the code in a frame."""
        if isinstance(other, str | Length) and self.name == str(other):
            return True
        # A value of the graph compares itself, in the graph. None and a tuple are no lengths.
        if other is None or isinstance(other, tuple | list) or hasattr(type(other), "__sdpa_xp__"):
            return NotImplemented
        # The library's own code reads a name as shapes do: such an axis is like no other, and is not broadcast.
        return self._refuse_comparison() if _asks_as_layer(frame) else False

    def __hash__(self) -> NoReturn:
        # With a hash, a dict with numbers as keys would miss each length without a comparison.
        raise length_error(self.graph.function, {"length": self}, KEY_HINT)

    def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> Any:
        """Refuse the functions of NumPy but the square root, also those that its numbers on the left call."""
        if ufunc in _COMPARISONS:
            self._refuse_comparison()
        return self**0.5 if ufunc is np.sqrt else self._refuse()

    # Each operator is refused by name: without one, Python's own error would not say what to write instead.
    __array__: Any = _refuse
    __array_function__ = __index__ = __int__ = __float__ = __complex__ = __round__ = __array__
    __abs__ = __rmod__ = __divmod__ = __rdivmod__ = __rfloordiv__ = __rpow__ = __array__
    __and__ = __rand__ = __lshift__ = __rshift__ = __array__
    __bool__: Any = _refuse_comparison
    __lt__ = __le__ = __gt__ = __ge__ = __bool__


def _float_operators(operation: str) -> tuple[_Operator, _Operator]:
    def combine(value: Any, other: Any, *operands: Any) -> Any:
        if isinstance(other, bool) or not isinstance(other, int | float | Length | FloatOfLengths):
            return NotImplemented
        return value.graph.float_of(operation, *operands)

    return _both_sides(combine)


class FloatOfLengths:
    """A float that follows from lengths, such as L / 2 or L ** 0.5.

    It is computed in float64, and takes the dtype of the array beside it, as a Python float does.
    """

    __slots__ = ("graph", "value")

    def __init__(self, graph: LengthOwner, value: Any) -> None:
        self.graph = graph
        self.value = value

    if not TYPE_CHECKING:  # a type checker knows the attribute of each object as one that can be written

        @property
        def __class__(self) -> type:
            """What `isinstance` asks: a float for the code of a layer, which would see one in a run."""
            return float if _asks_as_layer(sys._getframe(1)) else FloatOfLengths

    __add__, __radd__ = _float_operators("add")
    __sub__, __rsub__ = _float_operators("subtract")
    __mul__, __rmul__ = _float_operators("multiply")
    __truediv__, __rtruediv__ = _float_operators("divide")
    __floordiv__, __rfloordiv__ = _float_operators("floor_divide")
    __mod__, __rmod__ = _float_operators("remainder")
    __pow__, __rpow__ = _float_operators("pow")

    def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> Any:
        return self**0.5 if ufunc is np.sqrt else self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise length_error(self.graph.function, {"value": "a float that follows from lengths"})

    __float__: Any = _refuse
    __int__ = __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __array__ = __float__


def _asks_as_layer(frame: types.FrameType | None) -> bool:
    """Return whether the code in a frame, or what it asked `abc` to look at, belongs to the caller."""
    while frame is not None and frame.f_globals.get("__name__") == "abc":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES


def plain(length: Any) -> Any:
    """Return the name of a length, which the exporter compares with other names; other objects unchanged."""
    return length.name if isinstance(length, Length) else length


def has_names(shape: Sequence[Any]) -> bool:
    """Return whether one of the lengths is known only when the graph runs."""
    return any(isinstance(length, str) for length in shape)


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
