"""The commands in one application, and its own errors as exit codes."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from sdpa_xp import __version__
from sdpa_xp_export._interrupts import INTERRUPTED
from sdpa_xp_export._runtime.limits import ModelFailedError
from sdpa_xp_export.cli import __doc__
from sdpa_xp_export.cli.compare import agree, list_backends, run_demo
from sdpa_xp_export.cli.export import export
from sdpa_xp_export.cli.flag_names import command_message
from sdpa_xp_export.cli.printing import say
from sdpa_xp_export.cli.verify import run_verify

EXAMPLES = """\b
Graphs:
  sdpa-xp export --query 'float32[B,8,L,64]' --key 'float32[B,2,L,64]' --is-causal
  sdpa-xp verify attention.onnx
\b
Libraries on this machine:
  sdpa-xp backends
  sdpa-xp agree --backend numpy --dtype float32
  sdpa-xp demo
"""
"""One example for each command, in groups; after \\b a line stays a line."""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__, epilog=EXAMPLES)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"sdpa-xp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options of every command."""


app.command("export")(export)
app.command("verify")(run_verify)
app.command("agree")(agree)
app.command("demo")(run_demo)
app.command("backends")(list_backends)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code. Errors name flags; errors of typer become ValueErrors."""
    group = cast(TyperGroup, typer.main.get_command(app))
    try:
        code: Any = group.main(arguments or ["--help"], prog_name="sdpa-xp", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        text = error.format_message()
        if text.startswith(("No such command", "Missing command")):
            text += f" The commands are {', '.join(group.commands)}."
        raise ValueError(text) from error
    except (ValueError, TypeError, OSError) as error:
        kind = ModelFailedError if isinstance(error, ModelFailedError) else ValueError
        raise kind(command_message(group, arguments, error)) from error
    return int(code or 0)
