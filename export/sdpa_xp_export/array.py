"""An edge of a graph that can be computed with: an array whose operators write nodes.

So a mask is lowered by the line that defines it, `key_index <= query_index + offset`, and a caller's function
of the indices becomes ONNX by being called.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from sdpa_xp.checks import message
from sdpa_xp_export.lengths import Length
from sdpa_xp_export.shapes import joint_shape
from sdpa_xp_export.spec import Shape

if TYPE_CHECKING:
    from sdpa_xp_export.graph import Graph

WIDER = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Of two dtypes the later one is that of the result."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An edge of the graph. Numbers beside it become constants of its dtype."""

    graph: Graph = field(repr=False)
    name: str
    dtype: str
    shape: Shape

    __array_ufunc__: ClassVar[None] = None  # so that NumPy's `number + value` asks the value

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", Length.of(self.graph, self.shape))

    @property
    def device(self) -> None:
        """Nowhere yet."""
        return

    @property
    def mT(self) -> Value:  # noqa: N802, the standard's name
        from sdpa_xp_export import pieces

        return pieces.transpose(self)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        return "float" in self.dtype

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        from sdpa_xp_export import namespace

        return namespace

    def __sdpa_xp__(self, function: str, inputs: Mapping[str, object], rules: Mapping[str, object]) -> Any:
        """A call of the library with this among its query, key and value -> nodes."""
        from sdpa_xp_export.attending import attend

        return attend(self.graph, function, inputs, rules)

    def astype(self, dtype: str) -> Value:
        """value -> Cast(value); the value itself where it has the dtype."""
        if self.dtype == dtype:
            return self
        return self.graph.add("Cast", self, dtype=dtype, shape=self.shape, to=self.graph.onnx_dtype(dtype))

    def with_other(self, op: str, other: object, dtype: str | None = None, *, swapped: bool = False) -> Value:
        """value, other -> op(value, other), elementwise with broadcasting, in the wider dtype of the two."""
        one, two = together(self, other)
        if swapped:
            one, two = two, one
        shape = joint_shape(one.shape, two.shape)
        return self.graph.add(op, one, two, dtype=dtype or one.dtype, shape=shape)

    def _arithmetic(self, op: str, other: object, *, swapped: bool = False) -> Value:
        if self.dtype == "bool":
            return self.astype("int64")._arithmetic(op, other, swapped=swapped)
        return self.with_other(op, other, swapped=swapped)

    def __add__(self, other: object) -> Value:
        return self._arithmetic("Add", other)

    def __radd__(self, other: object) -> Value:
        return self._arithmetic("Add", other, swapped=True)

    def __sub__(self, other: object) -> Value:
        return self._arithmetic("Sub", other)

    def __rsub__(self, other: object) -> Value:
        return self._arithmetic("Sub", other, swapped=True)

    def __mul__(self, other: object) -> Value:
        return self._arithmetic("Mul", other)

    def __rmul__(self, other: object) -> Value:
        return self._arithmetic("Mul", other, swapped=True)

    def __truediv__(self, other: object) -> Value:
        return self._as_real()._arithmetic("Div", other)

    def __rtruediv__(self, other: object) -> Value:
        return self._as_real()._arithmetic("Div", other, swapped=True)

    def __mod__(self, other: object) -> Value:
        return _remainder(*together(self, other))

    def __rmod__(self, other: object) -> Value:
        return _remainder(*reversed(together(self, other)))

    def __floordiv__(self, other: object) -> Value:
        return _quotient(*together(self, other))

    def __rfloordiv__(self, other: object) -> Value:
        return _quotient(*reversed(together(self, other)))

    def __pow__(self, other: object) -> Value:
        return self._as_real()._arithmetic("Pow", other)

    def __rpow__(self, other: object) -> Value:
        return self._as_real()._arithmetic("Pow", other, swapped=True)

    def __matmul__(self, other: object) -> Value:
        from sdpa_xp_export import shaping

        return shaping.matmul(self, self._beside(other))

    def __rmatmul__(self, other: object) -> Value:
        from sdpa_xp_export import shaping

        return shaping.matmul(self._beside(other), self)

    def __getitem__(self, index: object) -> Value:
        from sdpa_xp_export import shaping

        return shaping.item(self, index)

    def __iter__(self) -> Iterator[Value]:
        from sdpa_xp_export import shaping

        return iter(shaping.unstack(self))

    def _beside(self, other: object) -> Value:
        return other if isinstance(other, Value) else self.graph.from_array(other)

    def __neg__(self) -> Value:
        return self.graph.add("Neg", self, dtype=self.dtype, shape=self.shape)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self.graph.add("Abs", self, dtype=self.dtype, shape=self.shape)

    def __le__(self, other: object) -> Value:
        return self.with_other("LessOrEqual", other, "bool")

    def __lt__(self, other: object) -> Value:
        return self.with_other("Less", other, "bool")

    def __ge__(self, other: object) -> Value:
        return self.with_other("GreaterOrEqual", other, "bool")

    def __gt__(self, other: object) -> Value:
        return self.with_other("Greater", other, "bool")

    # Python's own == answers with a bool; that of an array answers for each element.
    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self.with_other("Equal", other, "bool")

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return ~(self == other)

    def __and__(self, other: object) -> Value:
        return self._logical("And", other)

    __rand__ = __and__

    def __or__(self, other: object) -> Value:
        return self._logical("Or", other)

    __ror__ = __or__

    def __xor__(self, other: object) -> Value:
        return self._logical("Xor", other)

    __rxor__ = __xor__

    def __invert__(self) -> Value:
        self._only_bool("~")
        return self.graph.add("Not", self, dtype="bool", shape=self.shape)

    def __bool__(self) -> NoReturn:
        rule = "a value of a graph is neither true nor false while the graph is written"
        hint = "Combine conditions with `&`, `|` and `~`, and choose with `where`."
        raise TypeError(message(self.graph.function, rule, {"value": self}, hint))

    def _logical(self, op: str, other: object) -> Value:
        self._only_bool(op)
        return self.with_other(op, other, "bool")

    def _only_bool(self, op: str) -> None:
        if self.dtype != "bool":
            rule = f"{op} in a function of the indices must be between conditions"
            raise TypeError(message(self.graph.function, rule, {"dtype": self.dtype}))

    def _as_real(self) -> Value:
        return self if self.floating else self.astype(self.graph.real)


def together(one: Value, other: object) -> tuple[Value, Value]:
    """Both as values of the wider dtype of the two."""
    if isinstance(other, numbers.Real):
        real = isinstance(other, float) or not isinstance(other, numbers.Integral)
        dtype = one.graph.real if real and not one.floating else one.dtype
        dtype = "int64" if dtype == "bool" and not isinstance(other, bool) else dtype
        other = one.graph.constant(other, dtype)
    elif not isinstance(other, Value):
        other = one.graph.from_array(other)
    dtype = max(one.dtype, other.dtype, key=WIDER.index)
    return one.astype(dtype), other.astype(dtype)


def _remainder(one: Value, other: Value) -> Value:
    """The remainder, with the sign of the divisor, as in Python."""
    if one.floating:
        return one - _quotient(one, other) * other
    return one.with_other("Mod", other)


def _quotient(one: Value, other: Value) -> Value:
    """The quotient rounded down, also of integers, whose Div rounds towards 0."""
    if one.floating:
        return unary("Floor", one / other)
    return (one - _remainder(one, other)).with_other("Div", other)


def unary(op: str, value: Value, **attributes: Any) -> Value:
    """value -> op(value), of its dtype and shape."""
    return value.graph.add(op, value, dtype=value.dtype, shape=value.shape, **attributes)
