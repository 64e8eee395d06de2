"""The functions of the array API that have derivatives, and how these follow: see `jets.py`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

JetNamespace: TypeAlias = Any
"""The class of `jet_namespace.py`, which imports this file."""
Part: TypeAlias = Any
"""An array of the other library, or None, which is 0."""
SLOPES: dict[str, Callable[[Any, Any, Any], tuple[Any, Callable[[], Any]]]] = {
    "exp": lambda _xp, _x, y: (y, lambda: y),
    "expm1": lambda _xp, _x, y: (y + 1.0, lambda: y + 1.0),
    "log": lambda _xp, x, _y: (1.0 / x, lambda: -1.0 / (x * x)),
    "log1p": lambda _xp, x, _y: (1.0 / (x + 1.0), lambda: -1.0 / ((x + 1.0) * (x + 1.0))),
    "sqrt": lambda _xp, x, y: (0.5 / y, lambda: -0.25 / (x * y)),
    "square": lambda _xp, x, _y: (2.0 * x, lambda: 2.0),
    "abs": lambda xp, x, _y: (xp.sign(x), lambda: 0.0),
    "sin": lambda xp, x, y: (xp.cos(x), lambda: -y),
    "cos": lambda xp, x, y: (-xp.sin(x), lambda: -y),
    "tanh": lambda _xp, _x, y: (-(y * y) + 1.0, lambda: (y * y - 1.0) * y * 2.0),
    "sinh": lambda xp, x, y: (xp.cosh(x), lambda: y),
    "cosh": lambda xp, x, y: (xp.sinh(x), lambda: y),
    "tan": lambda _xp, _x, y: (y * y + 1.0, lambda: (y * y + 1.0) * y * 2.0),
    "atan": lambda _xp, x, _y: (1.0 / (x * x + 1.0), lambda: -2.0 * x / ((x * x + 1.0) * (x * x + 1.0))),
    "asin": lambda xp, x, _y: (s := 1.0 / xp.sqrt((1.0 - x) * (1.0 + x)), lambda: x * s * s * s),
    "acos": lambda xp, x, _y: (s := -1.0 / xp.sqrt((1.0 - x) * (1.0 + x)), lambda: x * s * s * s),
    "asinh": lambda xp, x, _y: (s := 1.0 / xp.sqrt(x * x + 1.0), lambda: -x * s * s * s),
    "acosh": lambda xp, x, _y: (s := 1.0 / xp.sqrt((x - 1.0) * (x + 1.0)), lambda: -x * s * s * s),
    "atanh": lambda _xp, x, _y: (s := 1.0 / ((1.0 - x) * (1.0 + x)), lambda: 2.0 * x * s * s),
}
"""For each function y of one number x: its derivative, and what computes its second derivative."""


def _angle(kind: JetNamespace, a: Any, b: Any, /) -> Any:
    """Return the angle of a and b, up to a constant in each quadrant."""
    is_flat = kind.abs(kind.value(a)) < kind.abs(kind.value(b))
    flat, steep = kind.divide(a, kind.where(is_flat, b, 1.0)), kind.divide(b, kind.where(is_flat, 1.0, a))
    return kind.where(is_flat, kind.atan(flat), -kind.atan(steep))


def _logaddexp(kind: JetNamespace, a: Any, b: Any, /) -> Any:
    largest = kind.maximum(kind.value(a), kind.value(b))
    return kind.log(kind.add(kind.exp(kind.subtract(a, largest)), kind.exp(kind.subtract(b, largest))))


def _product(kind: JetNamespace, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
    x, axis, shape = kind.with_one_axis(x, axis, keepdims)
    factors = kind.unstack(x, axis=axis) or [kind.ones_like(kind.sum(x, axis=axis))]  # without any, it is 1
    return kind.reshape(reduce(operator.mul, factors), shape)


def _variance(
    kind: JetNamespace, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False
) -> Any:
    x, axis, shape = kind.with_one_axis(x, axis, keepdims)
    squares = kind.square(x - kind.mean(x, axis=axis, keepdims=True))
    degrees = x.shape[axis] - correction  # a length of a graph may be a name
    factor = math.nan if isinstance(degrees, int | float) and degrees <= 0 else 1 / degrees
    return kind.reshape(kind.sum(squares, axis=axis), shape) * factor


FORMULAS: dict[str, Callable[..., Any]] = {
    "maximum": lambda kind, a, b: kind.where(kind.value(a) >= kind.value(b), a, b),
    "minimum": lambda kind, a, b: kind.where(kind.value(a) <= kind.value(b), a, b),
    "min": lambda kind, x, **more: -kind.max(-x, **more),
    "remainder": lambda kind, a, b: kind.subtract(a, kind.multiply(b, kind.floor_divide(a, b))),
    "reciprocal": lambda kind, x: kind.divide(1.0, x),
    "log2": lambda kind, x: kind.log(x) / math.log(2),
    "log10": lambda kind, x: kind.log(x) / math.log(10),
    "hypot": lambda kind, a, b: kind.sqrt(kind.add(kind.square(a), kind.square(b))),
    "sort": lambda kind, x, *, axis=-1, **more: kind.take_along_axis(
        x, kind.argsort(x, axis=axis, **{"stable": True, **more}), axis=axis
    ),
    "logaddexp": _logaddexp,
    "atan2": _angle,
    "prod": _product,
    "var": _variance,
    "std": lambda kind, x, **more: kind.sqrt(kind.var(x, **more)),
}
"""Functions with the derivatives of formulas of other functions, which may have another value."""


NOT_LINEAR = {"append", "fill_value", "initial", "mode", "out", "prepend", "where"}
"""Arguments beyond the standard, or with numbers of their own, with which a function is not linear."""


def linear(kind: JetNamespace, f: Any, x: Any, /, *others: Any, **more: Any) -> Any:
    """Return f(x, ...), which is linear in x; the others are no jets."""
    if NOT_LINEAR & more.keys():
        raise TypeError(f"the derivative with {', '.join(NOT_LINEAR & more.keys())} is not known")
    others = tuple(map(kind.value, others))
    return x.linear(lambda part: f(part, *others, **more)) if kind.owns(x) else f(x, *others, **more)


def _bilinear(kind: JetNamespace, f: Any, a: Any, b: Any, /, **more: Any) -> Any:
    return kind.bilinear(partial(f, **more), a, b)


def _by_formula(
    formula: Callable[..., Any], kind: JetNamespace, f: Any, /, *arguments: Any, **more: Any
) -> Any:
    """Return f(...), with the derivatives of a formula: the value of a NaN, for one, is that of f."""
    value = f(*map(kind.value, arguments), **more)
    if not any(map(kind.owns, arguments)):
        return value
    result = formula(kind, *arguments, **more)
    result.parts[0] = value
    return result


def on_values(kind: JetNamespace, f: Any, /, *arguments: Any, **more: Any) -> Any:
    """Return f(...), which is no floating array."""
    return f(*map(kind.value, arguments), **more)


def _constant(kind: JetNamespace, f: Any, x: Any, /, **more: Any) -> Any:
    """Return f(x), whose derivative is 0."""
    return kind.constant(f(kind.value(x), **more)) if kind.owns(x) else f(x, **more)


def _of_numbers(name: str, kind: JetNamespace, f: Any, /, *numbers: Any, **more: Any) -> Any:
    """Return an array of numbers, as a jet, since some libraries refuse other arrays beside jets."""
    like, first = (map(kind.value, numbers[:1]), 1) if name == "full_like" else ((), 0)
    if any(map(kind.owns, (*numbers[first:], *more.values()))):
        raise TypeError(f"`{name}` takes numbers, and none with derivatives: multiply the array that it makes")
    return kind.constant(f(*like, *numbers[first:], **more))


def _elementwise(slopes: Any, kind: JetNamespace, f: Any, x: Any, /, *, out: Any = None) -> Any:
    """Return f(x), in the memory of x if that is `out`."""
    if not kind.owns(x):
        return f(x)
    in_place = out is x and x.is_memory
    y = f(x.value, out=x.value) if in_place else f(x.value)
    return kind.elementwise(x, y, *slopes(kind.of_values, x.value, y), in_place)


def _joined(kind: JetNamespace, f: Any, arrays: Sequence[Any], /, *, out: Any = None, **more: Any) -> Any:
    """Return f(arrays), which is linear in all of them together."""
    del out  # a result in other memory is right as well
    arrays = [*arrays]  # it may be an iterator
    values, *others = zip(*map(kind.parts, arrays), strict=True)
    joined = f(values, **more)
    if not any(map(kind.owns, arrays)):
        return joined
    zeros = [kind.of_values.zeros_like(x) for x in values]

    def join(parts: Sequence[Part]) -> Part:
        if all(part is None for part in parts):
            return None
        return f([zero if part is None else part for zero, part in zip(zeros, parts, strict=True)], **more)

    return kind.make([joined, *map(join, others)])


def _unstack(kind: JetNamespace, f: Any, x: Any, /, *, axis: int = 0) -> Any:
    if not kind.owns(x):
        return f(x, axis=axis)
    before = (slice(None),) * (axis % x.ndim)
    return tuple(x[(*before, n, ...)] for n in range(x.shape[axis]))


def _broadcast_arrays(kind: JetNamespace, f: Any, /, *arrays: Any) -> Any:
    shape = f(*map(kind.value, arrays))[0].shape
    return tuple(kind.broadcast_to(x, shape) for x in arrays)


NAMES: dict[Callable[..., Any], str] = {
    linear: """sum mean cumulative_sum reshape matrix_transpose permute_dims moveaxis broadcast_to expand_dims
        squeeze flip roll tile tril triu diff repeat take take_along_axis real conj positive negative
        isfinite""",
    _joined: "concat stack",
    _bilinear: "vecdot tensordot",
    _constant: "empty_like ones_like zeros_like sign floor ceil round trunc",
    _unstack: "unstack",
    _broadcast_arrays: "broadcast_arrays",
    on_values: """any all argmax argmin argsort nonzero count_nonzero searchsorted isnan isinf signbit isdtype
        logical_and logical_or logical_xor logical_not isin equal not_equal less less_equal greater
        greater_equal finfo iinfo result_type can_cast broadcast_shapes __array_namespace_info__""",
}
"""The functions of each rule. `isfinite` returns a boolean for each part, which `where` and `bool` read."""
RULES: dict[str, Callable[..., Any]] = {
    **{name: rule for rule, names in NAMES.items() for name in names.split()},
    **{name: partial(_elementwise, slopes) for name, slopes in SLOPES.items()},
    **{name: partial(_by_formula, formula) for name, formula in FORMULAS.items()},
    **{name: partial(_of_numbers, name) for name in ("arange", "eye", "full", "full_like", "linspace", "ones")},
}
"""What a function does with jets: a rule gets the kind of jets, the function, and the arguments."""
