"""The commands in one application: errors of the functions that they call name flags, and end as exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from sdpa_xp import __version__
from sdpa_xp.errors import Message, message_of

from .._interrupts import INTERRUPTED
from .._runtime.limits import ModelFailedError
from . import __doc__
from .demo import list_backends, run_demo
from .export import export
from .judge import judge
from .terminal import say
from .verify import run_verify

FUNCTIONS = ("TensorSpec", "demo", "export", "export_attention", "find", "judge", "save", "verify")
"""The functions in whose messages the command puts its own name."""
KEYWORDS = {
    "json": "--json",
    "dtypes": "--dtype",
    "names": "--name",
    "output": "--output",
    "overwrite": "--force",
    "path": "--output",
}
"""The flag of a keyword that has another name than the flag."""
VALUES = {
    "float_parsing": "a number",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "greater_than_equal": "at least {ge}",
}
"""What a value must be, by what pydantic, which reads the values for typer, finds wrong with it."""
EXAMPLES = """\b
Graphs:
  sdpa-xp export --query 'float32[B,8,L,64]' --is-causal -o causal.onnx
  sdpa-xp verify causal.onnx
\b
Libraries on this machine:
  sdpa-xp backends
  sdpa-xp judge torch.nn.functional:scaled_dot_product_attention
  sdpa-xp demo
"""
"""One example for each command, in groups; after \\b a line stays a line."""
SUMMARY, _, EXIT_CODES = (__doc__ or "").strip().partition("\n\n")

# Without markup: rich leaves `[length,...]` of a help text out, since it looks like a tag.
app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=SUMMARY,
    epilog=f"{EXAMPLES}\n\b\n{EXIT_CODES}",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"sdpa-xp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of every command."""


app.command("export")(export)
app.command("verify")(run_verify)
app.command("judge")(judge)
app.command("demo")(run_demo)
app.command("backends")(list_backends)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code. Errors name flags; errors of typer become ValueErrors."""
    group = cast(TyperGroup, typer.main.get_command(app))  # an application of several commands is a group
    try:
        # In its standalone mode, typer prints an error in a box of several lines, and exits by itself.
        code: Any = group.main(arguments or ["--help"], prog_name="sdpa-xp", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        text = _refused_value(error) or error.format_message()
        if text.startswith(("No such command", "Missing command")):  # typer has no class for these two alone
            text += f" The commands are {', '.join(group.commands)}."
        elif context := getattr(error, "ctx", None):
            text = f"{text.rstrip('.')}. See {context.command_path} --help."
        raise ValueError(text) from error
    except (ValueError, TypeError, OSError) as error:
        kind = ModelFailedError if isinstance(error, ModelFailedError) else ValueError
        raise kind(_named_message(group, arguments, error)) from error
    return int(code or 0)


def _refused_value(error: typer.TyperException) -> str:
    """Return the message for a value that is not of the type of its option; "" for another error."""
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not isinstance(error, typer.BadParameter) or error.param is None or error.ctx is None or not details:
        return ""
    flag, rule = error.param.opts[0], VALUES.get(details[0]["type"], "")
    if not rule:
        return ""
    must = f"`{flag}` must be {rule.format(**details[0].get('ctx', {}))}"
    return Message(str(error.ctx.command.name), must, {flag: repr(details[0]["input"])})


def _named_message(group: TyperGroup, arguments: Sequence[str], error: Exception) -> str:
    """Return the message of a function that the command called, with the names that the command has."""
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    message = message_of(error)
    command = group.commands.get(name or "")
    if message is None or name is None or not isinstance(command, TyperCommand):
        return str(error)
    function = name if message.function in FUNCTIONS else message.function
    return message.renamed(function, _flags(command, arguments))


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
