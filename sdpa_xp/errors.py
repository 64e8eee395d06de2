"""Errors with fields: which function refuses what, what must hold, what came, and a hint.

    try:
        scaled_dot_product_attention(query, key, value, scale="large")
    except ArgumentValueError as error:
        print(error.argument, error.rule, error.hint)

Errors of other classes, as a FileExistsError, and warnings have a `Message` as their only argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PACKAGE = __name__.rpartition(".")[0]
"""The name of this package, which a copy of its folder may have under another one."""
_NAME = re.compile(r"`(\w+)([.\[=][^`]*)?`")
"""A name in a rule or a hint stands in backticks, alone or with its part or its value."""


def _stated(rule: str, got: Mapping[str, str]) -> str:
    """Return what must hold and what came instead, if anything came."""
    return "; got ".join(filter(None, [rule, ", ".join(f"{name}={value}" for name, value in got.items())]))


class Message(str):
    """`function: rule; got name=value. hint`, with its parts; nothing is said of values if there are none."""

    function: str
    rule: str
    """What must hold. Names stand in backticks."""
    got: dict[str, str]
    """What came instead, by name, as it is shown."""
    hint: str
    """What to do; may be empty."""

    def __new__(cls, function: str, rule: str, got: Mapping[str, object], hint: str = "") -> Message:
        shown = {name: str(value) for name, value in got.items()}
        self = super().__new__(cls, f"{function}: {_stated(rule, shown)}." + (f" {hint}" if hint else ""))
        self.function, self.rule, self.got, self.hint = function, rule, shown, hint
        return self

    @property
    def parts(self) -> tuple[str, str, dict[str, str], str]:
        """What a message and an error are made from."""
        return self.function, self.rule, self.got, self.hint

    def __getnewargs__(self) -> tuple[Any, ...]:  # pickle would pass the text alone
        return self.parts

    @property
    def argument(self) -> str:
        """The argument that the rule names first, such as `bias.slopes`; may be empty."""
        match = _NAME.search(self.rule)
        return match[1] + (match[2] or "").partition("=")[0] if match else ""

    @property
    def statement(self) -> str:
        """The message without the function and the hint, for a place inside of another message."""
        return _stated(self.rule, self.got)

    def renamed(self, function: str, names: Mapping[str, str]) -> Message:
        """Return the message of another function, whose arguments have other names."""
        got = {}
        for key, value in self.got.items():
            name, dot, part = key.partition(".")
            got[names.get(name, name) + dot + part] = value
        return Message(function, renamed(self.rule, names), got, renamed(self.hint, names))


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return `text` with other names in backticks. A name that gets to be a flag loses its `=True`."""

    def name_of(match: re.Match[str]) -> str:
        name, rest = match[1], match[2] or ""
        return f"`{names[name]}{'' if rest == '=True' else rest}`" if name in names else match[0]

    return _NAME.sub(name_of, text)


class _ArgumentError(Exception):
    """An error whose message has parts."""

    message: Message
    function: str
    """The public function that was called."""
    argument: str
    """The argument that must be mended, such as `bias.slopes`; may be empty."""
    rule: str
    """What must hold."""
    got: dict[str, str]
    """What came instead, by name."""
    hint: str
    """What to do; may be empty."""

    def __init__(
        self, function: str, rule: str = "", got: Mapping[str, object] = MappingProxyType({}), hint: str = ""
    ) -> None:
        if not rule:  # Keras and torch's DataLoader raise an error anew with its text, which then has no parts
            super().__init__(function)
            self.function, self.rule, self.got, self.hint, self.argument = "", function, {}, "", ""
            return
        self.message = Message(function, rule, got, hint)
        super().__init__(self.message)
        self.function, self.rule, self.hint = function, rule, hint
        self.argument, self.got = self.message.argument, self.message.got

    def __reduce__(self) -> tuple[Any, ...]:
        message = message_of(self)
        return type(self), self.args if message is None else message.parts


class ArgumentTypeError(_ArgumentError, TypeError):
    """An argument has a type, a dtype or a library that the function does not take."""


class ArgumentValueError(_ArgumentError, ValueError):
    """An argument has a value, a shape or a device that the function does not take."""


def message_of(error: BaseException) -> Message | None:
    """Return the message with parts of an error of any class; None if it comes from elsewhere."""
    return error.args[0] if len(error.args) == 1 and isinstance(error.args[0], Message) else None


def summary(error: BaseException, within: str = "") -> str:
    """Return what an error says without its hint, for a place inside of a message of the function `within`."""
    message = message_of(error)
    if message is not None:
        return message.statement if message.function == within else f"{message.function}: {message.statement}"
    lines = str(error).splitlines() or [type(error).__name__]  # of another library
    return lines[0].partition(". ")[0].rstrip(".")
