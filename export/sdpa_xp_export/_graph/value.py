"""An edge of a graph that can be computed with: an array whose operators write nodes.

So a mask is lowered by the line that defines it, `key_index <= query_index + offset`, and a caller's function
of the indices becomes ONNX by being called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from sdpa_xp.checks import message
from sdpa_xp_export._array_api import arithmetic, division, powers
from sdpa_xp_export._array_api import elementwise as functions
from sdpa_xp_export._array_api.arithmetic import binary
from sdpa_xp_export._dtypes.promotion import FLOATING
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export.spec import Shape

if TYPE_CHECKING:
    from sdpa_xp_export._graph.graph import Graph


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An edge of the graph, with the operators of the array API."""

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
        from sdpa_xp_export._array_api import pieces

        return pieces.transpose(self)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATING

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        from sdpa_xp_export._array_api import namespace

        return namespace

    def __sdpa_xp__(self, function: str, inputs: Mapping[str, object], rules: Mapping[str, object]) -> Any:
        """A call of the library with this among its query, key and value -> nodes."""
        from sdpa_xp_export.forms.traced_attention import attend

        return attend(self.graph, function, inputs, rules)

    def astype(self, dtype: str) -> Value:
        """value -> Cast(value); the value itself where it has the dtype."""
        if self.dtype == dtype:
            return self
        return self.graph.add("Cast", self, dtype=dtype, shape=self.shape, to=self.graph.onnx_dtype(dtype))

    def __add__(self, other: object) -> Value:
        return binary("Add", "add", "numeric", self, other)

    def __radd__(self, other: object) -> Value:
        return binary("Add", "add", "numeric", other, self)

    def __sub__(self, other: object) -> Value:
        return binary("Sub", "subtract", "numeric", self, other)

    def __rsub__(self, other: object) -> Value:
        return binary("Sub", "subtract", "numeric", other, self)

    def __mul__(self, other: object) -> Value:
        return binary("Mul", "multiply", "numeric", self, other)

    def __rmul__(self, other: object) -> Value:
        return binary("Mul", "multiply", "numeric", other, self)

    def __truediv__(self, other: object) -> Value:
        return division.divide(self, other)

    def __rtruediv__(self, other: object) -> Value:
        return division.divide(other, self)

    def __mod__(self, other: object) -> Value:
        return division.remainder(self, other)

    def __rmod__(self, other: object) -> Value:
        return division.remainder(other, self)

    def __floordiv__(self, other: object) -> Value:
        return division.floor_divide(self, other)

    def __rfloordiv__(self, other: object) -> Value:
        return division.floor_divide(other, self)

    def __pow__(self, other: object) -> Value:
        return powers.power(self, other)

    def __rpow__(self, other: object) -> Value:
        return powers.power(other, self)

    def __lshift__(self, other: object) -> Value:
        return powers.left_shift(self, other)

    def __rlshift__(self, other: object) -> Value:
        return powers.left_shift(other, self)

    def __rshift__(self, other: object) -> Value:
        return powers.right_shift(self, other)

    def __rrshift__(self, other: object) -> Value:
        return powers.right_shift(other, self)

    def __matmul__(self, other: object) -> Value:
        from sdpa_xp_export._array_api import shaping

        return shaping.matmul(self, self.graph.operand(other))

    def __rmatmul__(self, other: object) -> Value:
        from sdpa_xp_export._array_api import shaping

        return shaping.matmul(self.graph.operand(other), self)

    def __getitem__(self, index: object) -> Value:
        from sdpa_xp_export._array_api import indexing

        return indexing.item(self, index)

    def __iter__(self) -> Iterator[Value]:
        from sdpa_xp_export._array_api import shaping

        return iter(shaping.unstack(self))

    def __neg__(self) -> Value:
        return arithmetic.negative(self)

    def __pos__(self) -> Value:
        return functions.positive(self)

    def __abs__(self) -> Value:
        return functions.absolute(self)

    def __le__(self, other: object) -> Value:
        return arithmetic.compared("LessOrEqual", "less_equal", self, other)

    def __lt__(self, other: object) -> Value:
        return arithmetic.compared("Less", "less", self, other)

    def __ge__(self, other: object) -> Value:
        return arithmetic.compared("GreaterOrEqual", "greater_equal", self, other)

    def __gt__(self, other: object) -> Value:
        return arithmetic.compared("Greater", "greater", self, other)

    # Python's own == answers with a bool; that of an array answers for each element.
    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return arithmetic.equal(self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return ~arithmetic.equal(self, other)

    def __and__(self, other: object) -> Value:
        return arithmetic.bitwise("And", "bitwise_and", self, other)

    __rand__ = __and__

    def __or__(self, other: object) -> Value:
        return arithmetic.bitwise("Or", "bitwise_or", self, other)

    __ror__ = __or__

    def __xor__(self, other: object) -> Value:
        return arithmetic.bitwise("Xor", "bitwise_xor", self, other)

    __rxor__ = __xor__

    def __invert__(self) -> Value:
        return arithmetic.invert(self)

    def __bool__(self) -> NoReturn:
        rule = "a value of a graph is neither true nor false while the graph is written"
        hint = "Combine conditions with `&`, `|` and `~`, and choose with `where`."
        raise TypeError(message(self.graph.function, rule, {"value": self}, hint))
