"""The help of each command, and what it prints when it runs."""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Set
from pathlib import Path

from evidence import table
from typer.testing import CliRunner

from sdpa_xp_export import Report
from sdpa_xp_export.cli.app import app
from sdpa_xp_export.report import Agreement, Placement, Run

FOLDER = tempfile.TemporaryDirectory()
"""The folder in which the commands of a page run, one after the other."""


OWN_KEYS = {
    "holds": "whether the exit code is 0: the results agree, and every required condition is met",
    "failures": "one line for each run, node or release that makes the exit code 1",
    "call_from_metadata": "false if `--call` passed the call",
}
"""What the keys of `verify --json` hold that are no attributes of a report."""


def verify_keys(command: str) -> str:
    """Return a table of those keys of `verify --json` that the reference of `Report` does not explain."""
    printed = json.loads(_printed(command))
    _compare(printed.keys() - OWN_KEYS.keys(), Report)
    _compare(printed["runs"][0].keys(), Run)
    _compare(printed["runs"][0]["agreement"].keys(), Agreement)
    _compare(printed["placements"][0].keys(), Placement)
    return f"{table(['key', 'meaning'], [[f'`{key}`', meaning] for key, meaning in OWN_KEYS.items()])}\n"


def _compare(keys: Set[str], described: type) -> None:
    """Check that each key is a field or a property of the class, which the reference describes."""
    if other := {key for key in keys if key not in described.__annotations__ and not hasattr(described, key)}:
        raise ValueError(f"command_line.py does not describe what `verify --json` prints: {sorted(other)}")


def help_text(*command: str) -> str:
    """Return what `--help` prints, as a block of text."""
    printed = CliRunner().invoke(app, [*command, "--help"], prog_name="sdpa-xp", env={"COLUMNS": "80"})
    if printed.exit_code:
        raise RuntimeError(printed.output)
    return _block(f"$ {' '.join(['sdpa-xp', *command, '--help'])}", printed.output)


def transcript(*commands: str) -> str:
    """Run each command; return commands and outputs as a block of text. A command that fails raises."""
    return _block(*(line for command in commands for line in (f"$ {command}", _printed(command))))


def _block(*lines: str) -> str:
    block_lines = (line.rstrip() for text in lines for line in text.strip("\n").splitlines())
    return "\n".join(["", "```text", *block_lines, "```", ""])


def _printed(command: str) -> str:
    """Run a command in the folder of the page; return what it prints."""
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    with contextlib.chdir(FOLDER.name):
        ended = CliRunner().invoke(app, arguments, prog_name="sdpa-xp", env={"COLUMNS": "88"})
    if ended.exit_code:
        raise RuntimeError(f"{command}: exit code {ended.exit_code}\n{ended.output}")
    return ended.stdout.replace(f"{Path(FOLDER.name).resolve()}/", "")
