"""Messages with the flags of the command: the functions that it calls name keywords of Python."""

from __future__ import annotations

from collections.abc import Sequence

from typer.core import TyperCommand, TyperGroup

from sdpa_xp.errors import message_of

FUNCTIONS = ("TensorSpec", "demo", "export", "export_attention", "find", "save", "verify")
"""The functions in whose messages the command puts its own name."""
KEYWORDS = {
    "backends": "--backend",
    "json": "--json",
    "output": "--output",
    "overwrite": "--force",
    "path": "--output",
}
"""The flag of a keyword that has another name than the flag."""


def command_message(group: TyperGroup, arguments: Sequence[str], error: Exception) -> str:
    """Return the message of a function that the command called, with the names that the command has."""
    name, message = command_name(arguments), message_of(error)
    command = group.commands.get(name or "")
    if message is None or name is None or not isinstance(command, TyperCommand):
        return str(error)
    function = name if message.function in FUNCTIONS else message.function
    return message.renamed(function, _flags(command, arguments))


def command_name(arguments: Sequence[str]) -> str | None:
    """Return the command that a command line names, whether there is one of that name or not."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _flags(command: TyperCommand, arguments: Sequence[str]) -> dict[str, str]:
    """Return the flag of each keyword that messages of the command may name."""
    names = {str(parameter.name): parameter.opts[0] for parameter in command.params}
    flags = {name: flag for name, flag in names.items() if flag.startswith("--")}
    flags |= {name: flag for name, flag in KEYWORDS.items() if flag in flags.values()}
    passed = {argument.partition("=")[0] for argument in arguments}
    if "--call" not in passed:  # the metadata of the model have it
        flags.pop("call", None)
    if "--require-provider" in passed and "--provider" not in passed:
        flags["provider"] = "--require-provider"
    return flags
