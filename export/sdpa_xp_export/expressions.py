"""Masks and biases as text: `causal() & padding(int64[B])`, for the command line and the metadata of a model.

The text is what their repr is, with specs for inputs. It is read as a tree, and nothing in it is run but the
functions of `sdpa_xp.masks` and `sdpa_xp.biases`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

from sdpa_xp import biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.checks import message
from sdpa_xp.masks import Mask
from sdpa_xp_export.operands import Initializer, Input
from sdpa_xp_export.spec import DTYPES, TensorSpec

Expression: TypeAlias = Mask | Bias | TensorSpec

LONGEST = 10_000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Add: operator.add,
}
_KINDS: dict[str, ModuleType] = {"attn_mask": masks, "bias": biases}
_NOT_TEXT = ("Mask", "Bias", "from_function", "to_array")


def parse(function: str, name: str, text: str, initializers: Mapping[str, Initializer] | None = None) -> Any:
    """The mask or bias that `text` is of; `name` is the argument that it is for, "attn_mask" or "bias"."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"longer than {LONGEST} characters")
        tree = ast.parse(text.strip(), mode="eval")
        return _Reader(_KINDS[name], initializers or {}).read(tree.body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        public = sorted(set(_KINDS[name].__all__) - set(_NOT_TEXT))
        hint = f"It is a spec, or made of {', '.join(public)} (sdpa_xp.{_KINDS[name].__name__.split('.')[-1]})."
        rule = f"`{name}` must be readable ({error})"
        raise ValueError(message(function, rule, {name: repr(text[:200])}, hint)) from error


def text_of(value: object) -> str:
    """The text that `parse` reads as `value`."""
    if isinstance(value, TensorSpec | Input | Initializer):
        return str(value)
    if not isinstance(value, Mask | Bias):
        return repr(list(value)) if isinstance(value, tuple) else repr(value)
    held = value.arguments
    if value.name in ("&", "|", "+"):
        return "(" + f" {value.name} ".join(text_of(each) for each in held.values()) + ")"
    if value.name == "~":
        return f"~{text_of(held['mask'])}"
    if value.name == "from_array":  # the array itself says as much
        (array,) = (each for name, each in held.items() if name in ("boolean", "array"))
        return f"from_array({text_of(array)})"
    if value.name == "from_function":
        return "from_function"
    return f"{value.name}({', '.join(f'{name}={text_of(each)}' for name, each in held.items())})"


class _Reader:
    """Reads a tree with the functions of one module."""

    def __init__(self, functions: ModuleType, initializers: Mapping[str, Initializer]) -> None:
        self.functions = functions
        self.initializers = initializers

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self.read(left), self.read(right))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self.read(operand)
            case ast.Call(func=ast.Name(id="initializer"), args=[ast.Constant(value=str(name))], keywords=[]):
                if name not in self.initializers:
                    raise ValueError(f"no initializer {name!r}")
                return self.initializers[name]
            case ast.Call(func=ast.Name(id=name), args=positional, keywords=keywords):
                function = self.function(name)
                named = {keyword.arg: self.read(keyword.value) for keyword in keywords if keyword.arg}
                if len(named) < len(keywords):
                    raise ValueError("no ** here")
                return function(*map(self.read, positional), **named)
            case ast.Subscript(value=ast.Name(id=name)) if name in DTYPES:
                return TensorSpec.parse(ast.unparse(node).replace("(", "").replace(")", ""))
            case _:
                return ast.literal_eval(node)

    def function(self, name: str) -> Any:
        if name not in self.functions.__all__ or name in _NOT_TEXT:
            raise ValueError(f"no function {name!r}")
        return getattr(self.functions, name)
