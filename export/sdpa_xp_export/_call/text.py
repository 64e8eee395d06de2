"""A call as the JSON in the metadata of its model; its masks, biases and arrays as text, also for the command.

The text of a mask or a bias is its repr, with specs for inputs: `causal() & padding(int64[B])`. It is read as a
syntax tree, of which only the functions of `sdpa_xp.masks` and `sdpa_xp.biases` are called.
"""

from __future__ import annotations

import ast
import hashlib
import json
import numbers
import operator
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import reduce
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import numpy as np

from sdpa_xp import biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError, message_of, summary
from sdpa_xp.masks import Mask

from ..spec import TensorSpec
from .call import OPTIONS, ExportCall, checked_call
from .operands import Initializer, kind_of

Expression: TypeAlias = Mask | Bias | TensorSpec | Initializer

LONGEST_CALL = 1_000_000
"""Characters of a call; a list of ids takes the most of them."""
LONGEST = 100_000
DEEPEST = 160  # more than masks nest, less than Python's parser reads
_TOO_DEEP = f"nested more than {DEEPEST} deep"
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Add: operator.add,
}
_NO_FUNCTIONS = ModuleType("arrays")
_NO_FUNCTIONS.__all__ = ()  # type: ignore[attr-defined]  # mypy knows only attributes that a file states
_FUNCTIONS = {"attn_mask": masks, "bias": biases}
"""The functions that the text of an argument may call; other arguments are arrays."""
_NOT_TEXT = ("Mask", "Bias", "from_function", "to_array")
_SPEC = re.compile(r"\w+\[[^\]'\"]*\]")  # its names may be words of Python, and its shape may be empty
_FOREIGN: dict[type[ast.expr], str] = {
    ast.JoinedStr: "an f-string",
    ast.ListComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.Lambda: "a lambda",
    ast.Starred: "*",
    ast.Subscript: "an index",
    ast.Compare: "a comparison",
    ast.BoolOp: "`and` or `or` (write & and |)",
}


def parse(
    function: str,
    name: str,
    text: str,
    initializers: Mapping[str, Initializer] | None = None,
    *,
    shown: str = "",
) -> Expression:
    """Read a mask, a bias or an array.

    Args:
        function: The function that messages name.
        name: The argument that it is for, such as "attn_mask".
        text: What to read.
        initializers: The arrays that it may name.
        shown: How messages name the argument, if not as `name`.
    """
    kind = _FUNCTIONS.get(name, _NO_FUNCTIONS)
    try:
        if not isinstance(text, str) or len(text) > LONGEST:
            raise ValueError(f"it is a text of at most {LONGEST} characters")
        if "\\" in text:  # an escape could hide a control character in a word
            raise ValueError("a backslash is not allowed here")
        line = " ".join(text.splitlines()).strip()  # Python would end an expression at the end of a line
        tree = ast.parse(_SPEC.sub(r"spec('\g<0>')", line), mode="eval")
        expression: Expression = _Reader(kind, initializers or {}).value(tree.body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else summary(error)
        if message_of(error):  # what it names is no argument of `function`
            why = why.replace("`", "'")
        if isinstance(error, RecursionError | MemoryError):  # Python's own parser raises these
            why = _TOO_DEEP
        public = ", ".join(sorted(set(kind.__all__) - set(_NOT_TEXT)))
        functions = f", or made of {public} ({kind.__name__})" if public else ""
        hint = f"It is a spec, as float32[B,1,L,S]{functions}."
        got = {name: repr(text if len(str(text)) <= 200 else f"{str(text)[:200]}...")}
        rule = f"{shown or f'`{name}`'} must be readable ({why})"
        raise ArgumentValueError(function, rule, got, hint) from error
    return expression


def text_of(value: object) -> str:
    """Return the text that `parse` reads as `value`; for a function its name, which `parse` refuses."""
    if isinstance(value, TensorSpec | Initializer):
        return str(value)
    if not isinstance(value, Mask | Bias):
        return _literal_text(value)
    arguments, kind = value.arguments, kind_of(value)
    if kind in ("&", "|", "+"):
        return "(" + f" {kind} ".join(map(text_of, value.parts)) + ")"
    if kind == "~":
        return f"~{text_of(*value.parts)}"
    if kind == "from_array":  # the array itself says as much
        (array,) = (array for name, array in arguments.items() if name in ("boolean", "array"))
        return f"from_array({text_of(array)})"
    if kind in ("from_function", ""):  # text says no more of a class of the caller than of a function
        return "from_function"
    return f"{kind}({', '.join(f'{name}={text_of(part)}' for name, part in arguments.items())})"


def _literal_text(value: object) -> str:
    """Return the text of a literal; numbers of NumPy are written as Python's."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal_text, value))}]"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return repr(int(value) if isinstance(value, numbers.Integral) else float(value))
    return repr(value)


def _chain(node: ast.expr, op: ast.operator) -> list[ast.expr]:
    """Return a & b & c, which Python's parser nests, as [a, b, c], so that a chain is one level deep."""
    operands = []
    while isinstance(node, ast.BinOp) and type(node.op) is type(op):
        operands.append(node.right)
        node = node.left
    return [node, *reversed(operands)]


class _Reader:
    """Reads a syntax tree with the functions of one module."""

    def __init__(self, functions: ModuleType, initializers: Mapping[str, Initializer]) -> None:
        self.functions = functions
        self.initializers = initializers

    def value(self, node: ast.expr) -> Any:
        """Read a mask, a bias or an array."""
        value = self.read(node, 0)
        if not isinstance(value, Mask | Bias | TensorSpec | Initializer):
            raise TypeError(f"{str(value)[:40]!r} is not a spec, a mask or a bias")
        return value

    def read(self, node: ast.expr, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(_TOO_DEEP)
        match node:
            case ast.BinOp(op=op) if type(op) in _BINARY:
                return reduce(_BINARY[type(op)], [self.combined(part, depth) for part in _chain(node, op)])
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self.combined(operand, depth)
            case ast.Call(func=ast.Name(id="spec"), args=[ast.Constant(value=str(text))], keywords=[]):
                return TensorSpec.parse(text)
            case ast.Call(func=ast.Name(id="initializer"), args=[ast.Constant(value=str(name))], keywords=[]):
                if name not in self.initializers:
                    raise ValueError(f"no initializer {name!r}")
                return self.initializers[name]
            case ast.Call(func=ast.Name(id=name), args=positional, keywords=keywords):
                function = self.function(name)
                named = {
                    keyword.arg: self.read(keyword.value, depth + 1) for keyword in keywords if keyword.arg
                }
                if len(named) < len(keywords):
                    raise ValueError("** is not allowed here, and each argument is given once")
                return function(*(self.read(argument, depth + 1) for argument in positional), **named)
            case _:
                return self.literal(node)

    def combined(self, node: ast.expr, depth: int) -> Any:
        """Read an operand of an operator: a mask or a bias, or an array as one."""
        value = self.read(node, depth + 1)
        if isinstance(value, TensorSpec | Initializer):
            value = self.function("from_array")(value)
        if not isinstance(value, Mask | Bias):
            raise TypeError(f"{str(value)[:40]!r} cannot be combined by & | ~ +")
        return value

    def function(self, name: str) -> Any:
        if name == "from_function":
            raise ValueError("a function cannot be written as text; pass it in Python")
        # Only what is public and returns a mask or a bias: anyone may have written the file.
        public = set(self.functions.__all__) - set(_NOT_TEXT)
        if name not in public:
            for argument, module in _FUNCTIONS.items():
                if module is not self.functions and name in {*module.__all__} - {*_NOT_TEXT}:
                    raise ValueError(f"no function {name!r} here, since it is for `{argument}`")
            near = get_close_matches(name, public, n=1)
            raise ValueError(f"no function {name!r}" + (f", the nearest is {near[0]!r}" if near else ""))
        return getattr(self.functions, name)

    def literal(self, node: ast.expr) -> Any:
        """Read a number, a word, True, False, None, or a list of them."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.literal(element) for element in elements]
            case ast.Name(id=name):
                self.function(name)
                raise ValueError(f"a function must be called, as in {name}(...)")
            case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)):
                public = name in {*self.functions.__all__} - {*_NOT_TEXT}
                hint = f", write the function alone, as in {name}(...)" if public else ""
                raise ValueError(f"a dot is not allowed here{hint}")
            case _:
                raise ValueError(f"{_FOREIGN.get(type(node), 'this expression')} is not allowed here")


def to_json(call: ExportCall) -> str:
    """Return the options of a call as text, without those that are as by default."""
    written: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = getattr(call, name)
        # Each file states `is_causal`: whoever reads the text without this package need not know its default.
        if option.kind is None or (value == option.default and option.kind != "flag"):
            continue
        written[name] = text_of(value) if option.kind in _HAS_TEXT and not isinstance(value, float) else value
    return json.dumps(written)


def digest(text: str, initializers: Mapping[str, Initializer]) -> str:
    """Return the SHA-256 of a call as text and of the numbers that are part of it, in hexadecimal."""
    hashed = hashlib.sha256(text.encode())
    for name, initializer in sorted(initializers.items()):
        numbers = np.ascontiguousarray(initializer.numbers)
        # The same bytes may be other numbers: of another dtype, or in another shape.
        hashed.update(f"{name} {numbers.dtype.name} {numbers.shape}".encode())
        hashed.update(numbers.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


def from_json(
    text: str, initializers: Mapping[str, Initializer], functions: Mapping[str, object] = MappingProxyType({})
) -> ExportCall:
    """Return the call that `to_json` wrote; it is checked again, since a file may hold anything.

    Args:
        text: The text.
        initializers: The numbers that the model holds, by name.
        functions: The masks and biases that cannot be written as text, by argument.
    """
    if len(text) > LONGEST_CALL:
        raise ValueError(f"a call of {len(text)} characters, more than {LONGEST_CALL}")
    read = json.loads(text)
    if not isinstance(read, dict) or not {"query", "key", "value"} <= read.keys():
        raise ValueError("no call")
    for name, value in read.items():
        # `checked_call` would raise for a wrong name, too, but as for a wrong program and not for a wrong file.
        if name not in OPTIONS:
            raise ValueError(f"its call has an unknown key, {name[:40]!r}")
        kind = OPTIONS[name].kind
        if kind == "spec":
            read[name] = TensorSpec.parse(value)
        elif name not in functions and (kind == "modifier" or (kind in _HAS_TEXT and isinstance(value, str))):
            read[name] = parse("verify", name, value, initializers)
    return checked_call("verify", **{**read, **functions})


_HAS_TEXT = ("spec", "array", "number or array", "modifier")
"""The kinds of options whose text is read by `parse`."""
