"""What is known only when the graph runs: lengths, which are names until then, and the device."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import numpy as np

from sdpa_xp._checks.arrays import broadcast
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._packages import LIBRARIES
from sdpa_xp_export.spec import SymbolicShape, addends, as_lengths

HINT = (
    "Compute with +, -, *, //, %, / and **, such as x.shape[1] ** 0.5 for math.sqrt; `reshape` takes -1. "
    "Write xp = x.__array_namespace__(), then xp.arange(x.shape[1]), xp.zeros(x.shape), "
    "xp.asarray(x.shape[1]) for its value, or xp.take(table, xp.arange(x.shape[1]), axis=0) "
    "for table[: x.shape[1]]."
)
COMPARISON_HINT = (
    "Write a number in the spec if the length is fixed. Otherwise choose in the graph: write "
    "xp = x.__array_namespace__(), then xp.where(xp.asarray(x.shape[1]) == 1, a, b)."
)
KEY_HINT = "As a key, use str(x.shape[1]), the name of the length. " + COMPARISON_HINT


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


class LengthOwner(Protocol):
    """The graph of a length: the name for messages, and the nodes of computed lengths."""

    @property
    def function(self) -> str: ...

    def computed_length(self, name: str, operation: str, *operands: int | str) -> str: ...

    def float_of(self, operation: str, *operands: Any) -> Any: ...


_Operator: TypeAlias = Callable[[Any, Any], Any]


def _beside_floats(operation: str, *, reflected: bool = False) -> Callable[[_Operator], _Operator]:
    """Leave an operator of lengths to an array or a `FloatOfLengths` beside it; a float gives a float."""

    def decorator(of_integers: _Operator) -> _Operator:
        def combine(length: Any, other: Any) -> Any:
            if isinstance(other, FloatOfLengths) or hasattr(type(other), "__sdpa_xp__"):
                return NotImplemented
            if isinstance(other, float):
                operands = (other, length) if reflected else (length, other)
                return length.graph.float_of(operation, *operands)
            return of_integers(length, other)

        return combine

    return decorator


class Length:
    """The name of a length, or of an integer computed from lengths. It stands in shapes, but is no number.

    `past + new` is the length of both, and `past + new - new` is `past` again. A cache needs no more to say
    where its tokens stand. Other integer arithmetic gives a name of its own, which the graph computes. A
    division or a power is a `FloatOfLengths`. A length is equal to itself. Any other comparison is refused,
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

    def _sum(self, parts: list[str]) -> int | Length:
        if all(part.isdecimal() for part in parts):
            return sum(map(int, parts))
        return Length(self.graph, "+".join(parts))

    @_beside_floats("add")
    def __add__(self, other: object) -> Any:
        return self._sum([*addends(self.name), *self._parts(other)])

    @_beside_floats("add", reflected=True)
    def __radd__(self, other: object) -> Any:
        return self._sum([*self._parts(other), *addends(self.name)])

    @_beside_floats("subtract")
    def __sub__(self, other: object) -> Any:
        left, parts = addends(self.name), self._parts(other)
        if any(parts.count(part) > left.count(part) for part in parts):
            return self._computed(joined_name(self, "less", other), "subtract", self, other)
        for part in parts:
            left.remove(part)
        return self._sum(left)

    @_beside_floats("subtract", reflected=True)
    def __rsub__(self, other: object) -> Any:
        self._parts(other)
        return self._computed(joined_name(other, "less", self), "subtract", other, self)

    @_beside_floats("multiply")
    def __mul__(self, other: object) -> Any:
        self._parts(other)
        if isinstance(other, int) and other < 2:
            return self if other else 0
        names, factor = ([self.name], other) if isinstance(other, int) else ([self.name, str(other)], 1)
        return self._computed(quotient_name(names, factor, [], 1), "multiply", self, other)

    __rmul__ = __mul__

    @_beside_floats("floor_divide")
    def __floordiv__(self, other: object) -> Any:
        divisor = self._divisor(other)
        name = quotient_name([self.name], 1, [], divisor)
        return self if divisor == 1 else self._computed(name, "floor_divide", self, divisor)

    @_beside_floats("remainder")
    def __mod__(self, other: object) -> Any:
        divisor = self._divisor(other)
        return self._computed(joined_name(self, "modulo", divisor), "remainder", self, divisor)

    @_beside_floats("pow")
    def __pow__(self, other: object) -> Any:
        if not isinstance(other, int) or other < 0:
            return self.graph.float_of("pow", self, other)
        return reduce(operator.mul, [self] * other, 1)

    @_beside_floats("divide")
    def __truediv__(self, other: object) -> Any:
        self._parts(other)
        return self.graph.float_of("divide", self, other)

    @_beside_floats("divide", reflected=True)
    def __rtruediv__(self, other: object) -> Any:
        self._parts(other)
        return self.graph.float_of("divide", other, self)

    def _computed(self, name: str, operation: str, *operands: Any) -> Length:
        return Length(self.graph, self.graph.computed_length(name, operation, *map(plain, operands)))

    def _divisor(self, other: object) -> int:
        if isinstance(other, bool) or not isinstance(other, int) or other < 1:
            self._refuse()
        return other

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

    def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> Any:
        """Refuse the functions of NumPy but the square root, also those that its numbers on the left call."""
        if ufunc in _COMPARISONS:
            self._refuse_comparison()
        return self**0.5 if ufunc is np.sqrt else self._refuse()

    # Each operator is refused by name: without one, Python's own error would not say what to write instead.
    __array__: Any = _refuse
    __array_function__ = __index__ = __int__ = __float__ = __complex__ = __round__ = __neg__ = __array__
    __abs__ = __rmod__ = __divmod__ = __rdivmod__ = __rfloordiv__ = __rpow__ = __array__
    __and__ = __rand__ = __lshift__ = __rshift__ = __array__
    __bool__: Any = _refuse_comparison
    __lt__ = __le__ = __gt__ = __ge__ = __bool__


def _float_operator(operation: str, *, reflected: bool = False) -> _Operator:
    def combine(one: Any, other: Any) -> Any:
        if isinstance(other, bool) or not isinstance(other, int | float | Length | FloatOfLengths):
            return NotImplemented
        return one.graph.float_of(operation, *((other, one) if reflected else (one, other)))

    return combine


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

    __add__, __radd__ = _float_operator("add"), _float_operator("add", reflected=True)
    __sub__, __rsub__ = _float_operator("subtract"), _float_operator("subtract", reflected=True)
    __mul__, __rmul__ = _float_operator("multiply"), _float_operator("multiply", reflected=True)
    __truediv__, __rtruediv__ = _float_operator("divide"), _float_operator("divide", reflected=True)
    __floordiv__, __rfloordiv__ = (
        _float_operator("floor_divide"),
        _float_operator("floor_divide", reflected=True),
    )
    __mod__, __rmod__ = _float_operator("remainder"), _float_operator("remainder", reflected=True)
    __pow__, __rpow__ = _float_operator("pow"), _float_operator("pow", reflected=True)

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


def quotient_name(names: Sequence[str], factor: int, divisors: Sequence[str], divisor: int) -> str:
    """Return a name for a product of lengths and a number, divided by others."""
    return joined_name("times", *sorted(names), factor, "over", *divisors, divisor)


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
