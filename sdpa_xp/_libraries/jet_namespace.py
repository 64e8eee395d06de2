"""The namespace of a kind of jets: the functions of another namespace, which also compute derivatives.

The rules are in the docstring of `jets.py`; functions that need no more than one of them are in `jet_rules.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from . import FLOATING, JETS, dtype_name, is_number, namespace_of
from .jet_rules import RULES, Part, linear
from .jets import Jet


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
            hint = "use other functions of the array API, or arrays without derivatives"
            text = f"{self.__name__}: the derivative of `{name}` is not known: {hint}"
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
        # A compiler that knows a length by its symbol alone does not compare two of them.
        is_matmul = min(a.ndim, b.ndim) > 1 and all(map(self.library.is_known, (a.shape[-1], b.shape[-1])))
        # Not the operator, if there is a function: torch.compile traces none of two jets.
        function = getattr(self.of_values, "matmul", operator.matmul)
        return self.bilinear(function, a, b, out, is_matmul=is_matmul)

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
        x, axis, shape = self.with_one_axis(x, axis, keepdims)
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
        return largest if largest.shape == shape else self.reshape(largest, shape)

    def with_one_axis(self, x: Jet, axis: Any, keepdims: bool) -> tuple[Any, int, tuple[int, ...]]:
        """Return an array with some axes as one, the number of that, and the shape without these axes."""
        axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else [axis]
        axes = [range(x.ndim)[n] for n in axes]  # an IndexError if there is no such axis
        rest = [n for n in range(x.ndim) if n not in axes]
        kept = [1 if n in axes else length for n, length in enumerate(x.shape) if keepdims or n in rest]
        if len(axes) == 1:
            return x, axes[0], tuple(kept)
        merged = *(x.shape[n] for n in rest), math.prod(x.shape[n] for n in axes)
        return self.reshape(self.permute_dims(x, (*rest, *axes)), merged), -1, tuple(kept)

    def clip(self, x: Any, /, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
        del out  # a result in other memory is right as well
        x = x if min is None else self.where(self.value(x) < min, min, x)
        return x if max is None else self.where(self.value(x) > max, max, x)
