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

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from . import FLOATING, JETS, dtype_name, is_number, library_of, namespace_of
from .jet_rules import RULES, Part, linear


class Jet:
    """An array with its derivatives.

    The parts are the value, the tangents and, if the kind has bends, the bend. They may be written to if the
    jet was made as memory: then they belong to it alone.
    """

    __slots__ = ("is_memory", "kind", "parts")
    __array_ufunc__: ClassVar[None] = None  # so that in `array * jet` the jet decides, not the array of NumPy

    def __init__(self, kind: JetNamespace, parts: Iterable[Part], is_memory: bool = False) -> None:
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

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("functions of NumPy take no array with derivatives: use `x.__array_namespace__()`")

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


class JetNamespace:
    """Jets of one kind: the functions of another namespace, for its own arrays and with their derivatives.

    A function whose derivative is not known here is missing: a derivative that is silently 0 would be wrong.
    The `level` is 1, or more for jets of jets: the jet of the highest level decides what an operator means.
    `of_caller` is what the caller's function sees of jets that it gets, and None for those of our programs.
    """

    def __init__(self, xp: Any, count: int, has_bend: bool, of_caller: Any = None) -> None:
        self.of_values, self.count, self.has_bend, self.of_caller = xp, count, has_bend, of_caller
        self.library: Any = None
        self.writes = False
        self.level = 1 + getattr(xp, "level", 0)
        self.root = getattr(xp, "root", xp)
        self.zeros_of_parts = (None,) * (count + has_bend)
        self.__name__ = f"{JETS} of {xp.__name__}"

    def __getattr__(self, name: str) -> Any:
        known, rule = getattr(self.of_values, name), RULES.get(name)
        is_function = callable(known) and not isinstance(known, type)
        if rule is None and (is_function or isinstance(known, ModuleType)):
            text = f"{self.__name__}: the derivative of `{name}` is not known"
            raise AttributeError(text, name=name, obj=self)
        function = known if rule is None else partial(rule, self, known)
        setattr(self, name, function)  # the next look-up does not come here
        return function

    # Arrays and their parts

    def owns(self, x: Any) -> bool:
        return isinstance(x, Jet) and x.kind is self

    def parts(self, x: Any) -> Sequence[Part]:
        if isinstance(x, Jet):
            if x.kind is self:
                return x.parts
            if x.kind.level >= self.level:
                raise TypeError("arrays with derivatives along different directions cannot meet")
        return (x, *self.zeros_of_parts)

    def part(self, x: Any, n: int) -> Any:
        """Return the value, a tangent or the bend, as an array."""
        value, part = self.value(x), self.parts(x)[n]
        return namespace_of(value).zeros_like(value) if part is None else part

    def value(self, x: Any) -> Any:
        return x.value if self.owns(x) else x

    def checked(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts of a caller's jet: real, and arrays where NumPy has made scalars of them."""
        checked = [self.library.base_form(x) if is_number(x) else x for x in parts]
        if dtype_name(checked[0].dtype).startswith("complex"):
            raise TypeError("the derivatives of complex numbers are not known")
        return checked

    def constant(self, x: Any, is_memory: bool = True) -> Any:
        """Return a new array as a jet if it is floating."""
        is_floating = dtype_name(x.dtype) in FLOATING
        return Jet(self, (x, *self.zeros_of_parts), is_memory) if is_floating else x

    def make(self, parts: Iterable[Part], is_memory: bool = False) -> Jet:
        """Return a jet whose derivatives get the shape and dtype of the value.

        It may be memory only if no derivative was broadcast.
        """
        value, *others = parts
        fit, astype = self.of_values.broadcast_to, self.of_values.astype
        whole = [x if x is None or x.shape == value.shape else fit(x, value.shape) for x in others]
        whole = [x if x is None or x.dtype == value.dtype else astype(x, value.dtype) for x in whole]
        return Jet(self, (value, *whole), is_memory and all(map(operator.is_, whole, others)))

    # The rules

    def elementwise(
        self, x: Jet, value: Any, slope: Any, curve: Callable[[], Any], in_place: bool = False
    ) -> Jet:
        """Return g(x), with its derivative at the value, and what returns the second derivative."""
        squares = [t * t for t in x.parts[1 : 1 + self.count] if t is not None] if self.has_bend else []
        times: Callable[[Any, Any], Any] = operator.imul if in_place else operator.mul
        parts = [value, *(None if part is None else times(part, slope) for part in x.parts[1:])]
        if squares:
            parts[-1] = self._total([curve() * self._total(squares), parts[-1]])
        return self.make(parts, is_memory=True)

    def bilinear(
        self, f: Callable[..., Any], a: Any, b: Any, out: Any = None, *, is_matmul: bool = False
    ) -> Any:
        """Return f(a, b), which is linear in both and gets no jets, in the memory of `out` if there is one.

        That may be `a` itself, if f is elementwise.
        """
        if not (self.owns(a) or self.owns(b)):
            return f(a, b)
        if b is out:  # each derivative reads both arguments
            out = None
        (x, *of_x), (y, *of_y) = self.parts(a), self.parts(b)
        memory = [None] * (1 + len(of_x)) if out is None else out.parts
        parts: list[Part] = []
        for n, s, t in zip(range(len(of_x), 0, -1), of_x[::-1], of_y[::-1], strict=True):
            of_part = f if memory[n] is None else partial(f, out=memory[n])
            if s is None or t is None or not is_matmul or x.shape[-1] >= t.shape[-1]:
                terms = [None if s is None else of_part(s, y)]
                terms += [None if t is None else (of_part if s is None else f)(x, t)]
            else:  # one product is faster than two and a sum as large as it
                concat = self.of_values.concat
                terms = [of_part(concat([s, x], axis=-1), concat([y, t], axis=-2))]
            if n > self.count:
                pairs = zip(of_x[: self.count], of_y, strict=False)
                terms += [2.0 * f(c, d) for c, d in pairs if not (c is None or d is None)]
            parts.append(self._total(terms))
        value = f(x, y) if out is None else f(x, y, out=memory[0])
        return self.make([value, *parts[::-1]], is_memory=True)

    def _total(self, new: Iterable[Part]) -> Part:
        """Return the sum of new arrays, in the memory of the first one if the library writes in our threads."""
        first, *others = [x for x in new if x is not None] or [None]
        for other in others:
            is_own = self.library.uses_our_threads and not isinstance(first, Jet)
            if is_own and first.shape == other.shape:
                first += other
            else:
                first = first + other
        return first

    def add(self, a: Any, b: Any, /, f: Callable[[Any, Any], Any] = operator.add) -> Any:
        """Return a + b, or f(a, b), which is a - b."""
        if not (self.owns(a) or self.owns(b)):
            return f(a, b)

        def add_parts(s: Part, t: Part) -> Part:
            if s is not None and t is not None:
                return f(s, t)
            return s if t is None else -t if f is operator.sub else t

        return self.make(map(add_parts, self.parts(a), self.parts(b)))

    def subtract(self, a: Any, b: Any, /) -> Any:
        return self.add(a, b, operator.sub)

    def change(self, f: Callable[[Any, Any], Any], a: Jet, b: Any) -> Jet:
        """Return a + b or a - b, f(a, b), in the memory of a."""
        for n, part in enumerate(self.parts(b)):
            if part is not None:
                a.parts[n] = f(self.of_values.zeros_like(a.value) if a.parts[n] is None else a.parts[n], part)
        return a

    def divide(self, a: Any, b: Any, /) -> Any:
        """Return q = a / b: q' = (a' - q b') / b, and q'' = (a'' - q b'' - 2 sum_n q'_n b'_n) / b."""
        if not self.owns(b):
            return a.linear(lambda x: x / b) if self.owns(a) else a / b
        q = self.value(a) / b.value
        difference = self.subtract(a, b.linear(lambda x: q * x))
        quotient = self.make([q, *difference.linear(lambda x: x / b.value).parts[1:]])
        if self.has_bend:
            pairs = zip(quotient.parts[1:-1], b.parts[1:-1], strict=True)
            mixed = [-2.0 * s * t / b.value for s, t in pairs if s is not None and t is not None]
            quotient.parts[-1] = self._total([*mixed, quotient.parts[-1]])
        return quotient

    def pow(self, a: Any, b: Any, /) -> Any:
        """Return a^b. Where its derivative is 0, so is the tangent: 0^0 has no NaN of 0 log 0 and of 0 / 0."""
        x, n, where = self.value(a), self.value(b), self.of_values.where
        value = x**n

        def term(factor: Any, m: Any) -> Any:
            if not hasattr(n, "dtype"):
                return factor * x**m if factor else 0.0
            return factor * x ** where(factor == 0, 0 * m, m)

        result = self.make([value, *self.zeros_of_parts]) if self.owns(a) or self.owns(b) else value
        if self.owns(a):
            result = self.elementwise(a, value, term(n, n - 1), lambda: term(n * (n - 1), n - 2))
        if any(part is not None for part in self.parts(b)[1:]):
            if self.has_bend:
                raise TypeError("the second derivative of `pow` by the exponent is not known")
            base = self.of_values.zeros_like(value) + x
            slope = self.of_values.log(where(base == 0, 1.0, base)) * value
            of_exponent = self.elementwise(b, value, slope, lambda: None)
            result = self.make([value, *self.add(result, of_exponent).parts[1:]])
        return result

    def multiply(self, a: Any, b: Any, /, *, out: Any = None) -> Any:
        return self.bilinear(operator.mul if out is None else self.of_values.multiply, a, b, out)

    def matmul(self, a: Any, b: Any, /, *, out: Any = None) -> Any:
        f = operator.matmul if out is None else self.of_values.matmul
        return self.bilinear(f, a, b, out, is_matmul=min(a.ndim, b.ndim) > 1)

    def floor_divide(self, a: Any, b: Any, /) -> Any:
        return self.constant(self.value(a) // self.value(b))

    def unlifted(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return f, which gets no jets and may make constants, with arrays as results."""
        return lambda *arrays, **more: self.value(f(*arrays, **more))

    # Functions that need more than one of these rules

    def asarray(self, x: Any, /, **more: Any) -> Any:
        if self.owns(x):
            return linear(self, self.of_values.asarray, x, **more)
        return self.constant(self.of_values.asarray(x, **more), is_memory=False)

    def zeros(self, shape: Any, /, **more: Any) -> Any:
        """Return zeros; as memory that several threads can write to, with all their derivatives."""
        if not self.writes:
            return self.constant(self.of_values.zeros(shape, **more))
        new = [self.of_values.zeros(shape, **more) for _ in (None, *self.zeros_of_parts)]
        return Jet(self, new, is_memory=True) if dtype_name(new[0].dtype) in FLOATING else new[0]

    empty = zeros

    def astype(self, x: Any, dtype: Any, /, **more: Any) -> Any:
        astype = self.of_values.astype
        if self.owns(x) and dtype_name(dtype) in FLOATING:
            return x.linear(lambda part: astype(part, dtype, **more))
        if self.owns(x) and dtype_name(dtype).startswith("complex"):
            raise TypeError("the derivatives of complex numbers are not known")
        return self.constant(astype(self.value(x), dtype, **more))

    def where(self, condition: Any, a: Any, b: Any, /) -> Any:
        (c, *conditions), (x, *of_x), (y, *of_y) = map(self.parts, (condition, a, b))
        where = self.of_values.where

        def choose(flags: Part, s: Part, t: Part) -> Part:
            if s is None and t is None:
                return None
            return where(c if flags is None else flags, 0.0 if s is None else s, 0.0 if t is None else t)

        parts = [where(c, x, y), *map(choose, conditions, of_x, of_y)]
        return self.make(parts, is_memory=True) if self.owns(a) or self.owns(b) else parts[0]

    def max(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """Return the maximum. Where several elements are the largest, the derivative is that of the first."""
        xp = self.of_values
        if not self.owns(x):
            return xp.max(x, axis=axis, keepdims=keepdims)
        axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else [axis]
        axes = [range(x.ndim)[n] for n in axes]  # an IndexError if there is no such axis
        shape = [1 if n in axes else length for n, length in enumerate(x.shape)]
        if len(axes) == 1:
            axis = axes[0]
        else:
            rest = [n for n in range(x.ndim) if n not in axes]
            merged = *(x.shape[n] for n in rest), math.prod(x.shape[n] for n in axes)
            x, axis = self.reshape(self.permute_dims(x, (*rest, *axes)), merged), -1
        library, info = self.library, hasattr(xp, "__array_namespace_info__")
        if not info or library.has_dtype("jvp", xp, library.device(x), "int64"):  # as `argmax` returns
            first = xp.expand_dims(xp.argmax(x.value, axis=axis), axis=axis)
            largest = self.take_along_axis(x, first, axis=axis)
        else:
            value, int32 = xp.max(x.value, axis=axis, keepdims=True), xp.int32
            places = xp.cumulative_sum(xp.ones_like(x.value, dtype=int32), axis=axis, dtype=int32)
            first = xp.min(xp.where(x.value < value, x.shape[axis] + 1, places), axis=axis, keepdims=True)
            largest = self.sum(self.where(places == first, x, 0.0), axis=axis, keepdims=True)
            largest.parts[0] = value
        if not keepdims:
            shape = [length for n, length in enumerate(shape) if n not in axes]
        return largest if largest.shape == tuple(shape) else self.reshape(largest, tuple(shape))

    def min(self, x: Any, /, **more: Any) -> Any:
        return -self.max(-x, **more) if self.owns(x) else self.of_values.min(x, **more)

    def maximum(self, a: Any, b: Any, /) -> Any:
        if not (self.owns(a) or self.owns(b)):
            return self.of_values.maximum(a, b)
        chosen = self.where(self.value(a) >= self.value(b), a, b)
        if self.owns(chosen):  # a NaN shows in the value, whichever of both it is
            chosen.parts[0] = self.of_values.maximum(self.value(a), self.value(b))
        return chosen

    def minimum(self, a: Any, b: Any, /) -> Any:
        if not (self.owns(a) or self.owns(b)):
            return self.of_values.minimum(a, b)
        return -self.maximum(-a, -b)

    def clip(self, x: Any, /, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
        del out  # a result in other memory is right as well
        x = x if min is None else self.where(self.value(x) < min, min, x)
        return x if max is None else self.where(self.value(x) > max, max, x)


def _define(name: str, rule: Callable[[JetNamespace, Any, Any], Any], *, is_reflected: bool = True) -> None:
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


def _define_in_place(name: str, rule: Callable[[JetNamespace, Any, Any], Any] | None = None) -> None:
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


def _of_values(f: Callable[[Any, Any], Any]) -> Callable[[JetNamespace, Any, Any], Any]:
    return lambda kind, a, b: f(kind.value(a), kind.value(b))


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_"):
    _define(_name.strip("_"), _of_values(getattr(operator, _name)), is_reflected=_name in ("and_", "or_"))
_define("add", JetNamespace.add)
_define("sub", JetNamespace.subtract)
_define("truediv", JetNamespace.divide)
_define("floordiv", JetNamespace.floor_divide)
_define("pow", JetNamespace.pow)
_define("mul", lambda kind, a, b: kind.multiply(a, b))
_define("matmul", lambda kind, a, b: kind.matmul(a, b))
_define_in_place("add", lambda kind, a, b: kind.change(operator.iadd, a, b))
_define_in_place("sub", lambda kind, a, b: kind.change(operator.isub, a, b))
_define_in_place("mul", lambda kind, a, b: kind.multiply(a, b, out=a))
for _name in ("truediv", "floordiv", "pow", "matmul"):
    _define_in_place(_name)
