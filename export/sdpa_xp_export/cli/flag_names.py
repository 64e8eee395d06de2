"""Name flags in messages: the functions that the command calls name keywords of Python."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from typer.core import TyperCommand, TyperGroup

FUNCTIONS = ("TensorSpec", "demo", "export", "export_attention", "find", "save", "verify")
"""The functions whose messages begin with their name; the command's name replaces it."""
KEYWORDS = {
    "backends": "--backend",
    "json": "--json",
    "output": "--output",
    "overwrite": "--force",
    "path": "--output",
}
"""The flag of a keyword that has another name than the flag."""
_TEXT = r"(?<!\w)'(?:[^'\\]|\\.)*'"
"""A text in quotes: what a user wrote, which stays as it is."""


def with_flags(text: str, flags: Mapping[str, str], stated: Collection[str] = ()) -> str:
    """Return a message with the flag instead of each keyword: "`name`", "name=value" or "name=True".

    The value of a keyword in `stated` comes from elsewhere, so no flag has it.
    """
    names = "|".join(map(re.escape, flags)) or "(?!)"
    pattern = rf"{_TEXT}|`(?P<named>{names})`|(?<![\w.-])(?P<passed>{names})=(?P<true>True\b)?"

    def flag(match: re.Match[str]) -> str:
        if named := match["named"]:
            return f"`{flags[named]}`"
        if (passed := match["passed"]) and passed not in stated:
            return flags[passed] if match["true"] else f"{flags[passed]}="
        return match[0]

    return re.sub(pattern, flag, text)


def command_message(group: TyperGroup, arguments: Sequence[str], text: str) -> str:
    """Return the message of a function that the command called, with the names that the command has."""
    name = command_name(arguments)
    command = group.commands.get(name or "")
    if not isinstance(command, TyperCommand):
        return text
    function, colon, rest = text.partition(": ")
    if colon and function in FUNCTIONS:
        text = f"{name}: {rest}"
    stated = () if "--call" in _passed(arguments) else ("call",)  # the metadata of the model have it
    return with_flags(text, _flags(command, arguments), stated)


def command_name(arguments: Sequence[str]) -> str | None:
    """Return the command that a command line names, whether there is one of that name or not."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _passed(arguments: Sequence[str]) -> set[str]:
    """Return the flags of a command line."""
    return {argument.partition("=")[0] for argument in arguments}


def _flags(command: TyperCommand, arguments: Sequence[str]) -> dict[str, str]:
    """Return the flag of each keyword that messages of the command may name."""
    names = {str(parameter.name): parameter.opts[0] for parameter in command.params}
    flags = {name: flag for name, flag in names.items() if flag.startswith("--")}
    flags |= {name: flag for name, flag in KEYWORDS.items() if flag in flags.values()}
    passed = _passed(arguments)
    if "--require-provider" in passed and "--provider" not in passed:
        flags["provider"] = "--require-provider"
    return flags
