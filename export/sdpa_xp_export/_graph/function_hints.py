"""Where a function or a method of NumPy or torch is found in the array API of the values of a graph."""

from __future__ import annotations

from types import ModuleType

_TWO = "x, y"
ARGUMENTS = {
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "pow"), _TWO),
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"), _TWO),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), _TWO),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), _TWO),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _TWO),
    **dict.fromkeys(("matmul", "maximum", "minimum", "result_type"), _TWO),
    **dict.fromkeys(("reshape", "broadcast_to"), "x, shape"),
    **dict.fromkeys(("zeros", "ones"), "shape"),
    **dict.fromkeys(("concat", "stack"), "[x, y], axis=0"),
    **dict.fromkeys(("expand_dims", "squeeze", "unstack"), "x, axis=0"),
    "arange": "length",
    "astype": "x, dtype",
    "clip": "x, min, max",
    "full": "shape, number",
    "moveaxis": "x, source, destination",
    "permute_dims": "x, axes",
    "take": "x, indices, axis=0",
    "where": "condition, x, y",
}
"""What a function of the namespace takes, if it is not `x` alone."""

OTHER_NAMES = {
    **dict.fromkeys(("T", "transpose", "permute", "swapaxes", "swapdims"), "permute_dims"),
    **dict.fromkeys(("t", "adjoint"), "matrix_transpose"),
    **dict.fromkeys(("concatenate", "cat"), "concat"),
    **dict.fromkeys(("dot", "mm", "bmm", "mv"), "matmul"),
    **dict.fromkeys(("view", "flatten", "ravel", "unflatten"), "reshape"),
    **dict.fromkeys(("expand", "expand_as", "broadcast_arrays"), "broadcast_to"),
    **dict.fromkeys(("absolute", "fabs"), "abs"),
    **dict.fromkeys(("power", "float_power"), "pow"),
    **dict.fromkeys(("div", "true_divide"), "divide"),
    "mod": "remainder",
    **dict.fromkeys(("invert", "bitwise_not"), "bitwise_invert"),
    "amax": "max",
    "amin": "min",
    **dict.fromkeys(("to", "type", "float", "half", "double", "bfloat16", "int", "long", "bool"), "astype"),
    "average": "mean",
    "clamp": "clip",
    "eq": "equal",
    "ge": "greater_equal",
    "gt": "greater",
    "index_select": "take",
    "le": "less_equal",
    "left_shift": "bitwise_left_shift",
    "lt": "less",
    "masked_fill": "where",
    "movedim": "moveaxis",
    "mul": "multiply",
    "ne": "not_equal",
    "neg": "negative",
    "right_shift": "bitwise_right_shift",
    "rollaxis": "moveaxis",
    "sub": "subtract",
    "unbind": "unstack",
    "unsqueeze": "expand_dims",
}
"""The function of the namespace that does what these functions and methods of NumPy and torch do."""

EXPRESSIONS = {
    **dict.fromkeys(("silu", "swish"), "x / (1.0 + xp.exp(-x))"),
    **dict.fromkeys(("copy", "clone", "contiguous", "detach"), "x"),
    "ceil": "-xp.floor(-x)",
    "dim": "x.ndim",
    "gelu": "0.5 * x * (1.0 + xp.erf(x / 1.4142135623730951))",
    "isnan": "x != x",
    "reciprocal": "1.0 / x",
    "relu": "xp.maximum(x, 0.0)",
    "rsqrt": "1.0 / xp.sqrt(x)",
    "sigmoid": "1.0 / (1.0 + xp.exp(-x))",
    "size": "x.shape",
    "softmax": ("(e := xp.exp(x - xp.max(x, axis=-1, keepdims=True))) / xp.sum(e, axis=-1, keepdims=True)"),
}
"""What to write instead of other functions and methods."""


class MissingFunctionError(AttributeError):
    """The namespace of a value lacks a function."""


def missing_function(name: str, namespace: ModuleType) -> MissingFunctionError:
    """Return the error for a function that the namespace of a value lacks: what it has instead."""
    start = f"a value of a graph has a part of the functions of the array API, and no `{name}`."
    if name in EXPRESSIONS or OTHER_NAMES.get(name) in namespace.__all__:
        return MissingFunctionError(f"{start} {function_hint(name, namespace)}")
    return MissingFunctionError(f"{start} There is no replacement; `xp.__all__` lists the functions.")


def function_hint(name: str, namespace: ModuleType) -> str:
    """Return what to write instead of a function or a method of that name; it exists in the namespace."""
    standard = OTHER_NAMES.get(name, name)
    if name in EXPRESSIONS:
        expression = EXPRESSIONS[name]
        return f"Write {expression}" + (", with xp = x.__array_namespace__()." if "xp." in expression else ".")
    if standard not in namespace.__all__:
        return f"The namespace of a value has no `{name}` and no replacement for it."
    call = f"xp.{standard}"
    if callable(getattr(namespace, standard)):
        call += f"({ARGUMENTS.get(standard, 'x')})"
    return f"Take functions from the namespace, as xp = x.__array_namespace__(), {call}."
