r"""Jets: arrays that carry their derivatives, as an array library over the arrays of any other library.

A jet is a value x, its derivatives x'_n along some directions n, and, if its kind says so, its bend x'', the
sum of its second derivatives along these directions. What is computed from jets by functions of the array API
has the derivatives of what is computed from their values. With g', g'' the derivatives of a function of one
number, and f linear in both arguments, the rules are

    g(x)     value g(x)       tangents g'(x) x'_n                      bend g'(x) x'' + g''(x) sum_n x'_n^2
    f(x, y)  value f(x, y)    tangents f(x'_n, y) + f(x, y'_n)         bend f(x'', y) + f(x, y'')
                                                                            + 2 sum_n f(x'_n, y'_n)

A derivative that is None is 0, and costs nothing. An array of another class is a constant.

There are jets of two sorts. Those of the library's own programs may be memory, which is written in place as the
memory of NumPy is. Those that a caller's function gets and makes never change: where `x *= y` would change
what has another name, too, it raises an error, and else it makes another jet.

Wengert, "A simple automatic derivative evaluation program", CACM 7, 1964, for forward mode; Griewank and
Walther, "Evaluating Derivatives", 2nd edition, 2008, chapter 13, for jets; Li et al., arXiv 2307.08214, for
the sum of second derivatives in one pass. Lu and Song, arXiv 2410.11081, appendix F, write forward mode of
attention by hand, which is what these rules make of its formula.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn, TypeAlias

import array_api_compat as compat

from . import dtype_name, library_of
from .jet_rules import Part

Kind: TypeAlias = Any
"""The class `JetNamespace` of `jet_namespace.py`, which imports this file."""


TORCH = "add sub mul div __floordiv__ remainder pow matmul lt le gt ge eq ne __and__ __or__ __xor__"
REFLECTED = "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul gt ge lt le eq ne rand ror rxor"
OF_TORCH = dict(zip(TORCH.split(), REFLECTED.split(), strict=True))
"""The operators of torch, and those of a jet on their right."""


class Jet:
    """An array with its derivatives.

    The parts are the value, the tangents and, if the kind has bends, the bend. They may be written to if the
    jet was made as memory: then they belong to it alone.
    """

    __slots__ = ("is_memory", "kind", "parts")
    __array_ufunc__: ClassVar[None] = None  # so that in `array * jet` the jet decides, not the array of NumPy

    def __init__(self, kind: Kind, parts: Iterable[Part], is_memory: bool = False) -> None:
        self.kind, self.is_memory = kind, is_memory and kind.writes
        self.parts = [*parts] if kind.of_caller is None else kind.checked(parts)

    value = property(lambda self: self.parts[0])
    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    mT = property(lambda self: self.kind.matrix_transpose(self))  # noqa: N815 (the name of the standard)
    __sdpa_xp_library__ = property(lambda self: self.kind.library)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        del api_version
        return self.kind if self.kind.of_caller is None else self.kind.of_caller

    @property
    def T(self) -> Any:  # noqa: N802
        if self.ndim != 2:
            raise ValueError(f"`T` needs an array of two axes, not {self.ndim}: use `mT` or `permute_dims`")
        return self.mT

    def to_device(self, device: Any, /, **more: Any) -> Jet:
        return self.linear(lambda x: compat.to_device(x, device, **more))

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("functions of NumPy take no array with derivatives: use `x.__array_namespace__()`")

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: object, arguments: Any = (), _more: object = None
    ) -> Any:
        """Compute an operator with a tensor of torch on the left; a compiler does not ask the jet itself."""
        name = function.__name__
        if name in OF_TORCH and isinstance(arguments[1], Jet):
            return getattr(arguments[1], f"__{OF_TORCH[name]}__")(arguments[0])
        # For a TypeError of `tensor += jet`, torch would make a new tensor, which other names do not see.
        raise RuntimeError(f"`{name}` of torch takes no Jet")

    def __float__(self) -> NoReturn:
        raise TypeError("a number has no derivatives: keep the array with derivatives as it is")

    __int__ = __complex__ = __float__

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("an array without axes has no length")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Jet]:
        return (self[n, ...] for n in range(len(self)))

    def __repr__(self) -> str:
        return f"Jet({', '.join(map(repr, self.parts))})"

    def linear(self, f: Callable[[Any], Any]) -> Jet:
        """Return f(self), which is linear."""
        return Jet(self.kind, [None if x is None else f(x) for x in self.parts], self.is_memory)

    def __getitem__(self, index: Any) -> Jet:
        return self.linear(operator.itemgetter(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.is_memory:
            raise TypeError("an array with derivatives cannot be written to: use `where`, `concat` or `stack`")
        pairs = [*zip(self.parts, self.kind.parts(value), strict=True)]
        if any(old is None and new is not None for old, new in pairs):  # another view would not see the new one
            raise TypeError("memory for derivatives must be made by `zeros`")
        for old, new in pairs:
            if old is not None:
                old[index] = 0.0 if new is None else new

    def __pos__(self) -> Jet:
        return self

    def __neg__(self) -> Jet:
        return self.linear(operator.neg)

    def __invert__(self) -> Jet:
        return self.linear(operator.invert)

    def __abs__(self) -> Any:
        return self.kind.abs(self)

    def __bool__(self) -> bool:
        """Return whether `isfinite` is true of the value and of all derivatives."""
        if dtype_name(self.dtype) != "bool":
            raise TypeError("a truth has no derivatives: compare the array first, such as `x != 0`")
        return all(bool(x) for x in self.parts if x is not None)

    __hash__ = object.__hash__


def _define(name: str, rule: Callable[[Kind, Any, Any], Any], *, is_reflected: bool = True) -> None:
    """Give `Jet` an operator, and if it is reflected, also for a jet on the right."""

    def left(self: Jet, other: Any) -> Any:
        # Python does not ask the right one of two jets, since both have one class.
        is_lower = isinstance(other, Jet) and other.kind.level > self.kind.level
        return rule(other.kind if is_lower else self.kind, self, other)

    def right(self: Jet, other: Any) -> Any:
        return rule(self.kind, other, self)

    setattr(Jet, f"__{name}__", left)
    if is_reflected:
        setattr(Jet, f"__r{name}__", right)


def _define_in_place(name: str, rule: Callable[[Kind, Any, Any], Any] | None = None) -> None:
    """Give `Jet` an operator that writes to the jet if it is memory, and else returns NotImplemented."""

    def change(self: Jet, other: Any) -> Any:
        if self.is_memory and rule is not None:
            return rule(self.kind, self, other)
        value = self
        while isinstance(value, Jet):
            value = value.value
        # Another name of the array, or a view of it, would have changed too.
        if self.kind.of_caller is not None and library_of(value).writes_in_place:
            raise TypeError("an array with derivatives cannot be written to: assign a new one, `x = x * y`")
        return NotImplemented

    setattr(Jet, f"__i{name}__", change)


def _of_values(f: Callable[[Any, Any], Any]) -> Callable[[Kind, Any, Any], Any]:
    return lambda kind, a, b: f(kind.value(a), kind.value(b))


def _of_kind(function: str) -> Callable[[Kind, Any, Any], Any]:
    return lambda kind, a, b: getattr(kind, function)(a, b)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, _of_values(getattr(operator, _name)), is_reflected=False)
for _name in ("and", "or", "xor"):
    _define(_name, _of_values(getattr(operator, f"__{_name}__")))
for _name, _function in zip(
    ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    ("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "pow", "matmul"),
    strict=True,
):
    _define(_name, _of_kind(_function))
_define_in_place("add", lambda kind, a, b: kind.change(operator.iadd, a, b))
_define_in_place("sub", lambda kind, a, b: kind.change(operator.isub, a, b))
_define_in_place("mul", lambda kind, a, b: kind.multiply(a, b, out=a))
for _name in ("truediv", "floordiv", "mod", "pow", "matmul"):
    _define_in_place(_name)
