"""The commands in one application, and how its own errors come out."""

from __future__ import annotations

from typing import Any

import typer

from sdpa_xp_export.cli import INTERRUPTED, __doc__
from sdpa_xp_export.cli.compare import agree, list_backends, run_demo
from sdpa_xp_export.cli.export import export
from sdpa_xp_export.cli.verify import run_verify

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)
app.command("export")(export)
app.command("verify")(run_verify)
app.command("agree")(agree)
app.command("demo")(run_demo)
app.command("backends")(list_backends)


def run(arguments: list[str]) -> int:
    """The exit code of a command line. An error of typer is a ValueError, as are those of the commands."""
    try:
        code: Any = app(arguments or ["--help"], prog_name="sdpa-xp", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        raise ValueError(error.format_message()) from error
    return int(code or 0)
