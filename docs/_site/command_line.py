"""The help of each command, and what it prints when it runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from sdpa_xp_export.cli.app import app

ROOT = Path(__file__).parents[2]
FOLDER = tempfile.TemporaryDirectory()
"""The folder in which the commands of a page run, one after the other."""


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
    """Run a command in a new process; return what it prints."""
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    paths = [str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")]
    settings = {"COLUMNS": "88", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.run(
        [sys.executable, "-m", "sdpa_xp_export", *arguments],
        cwd=FOLDER.name,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{command}: exit code {process.returncode}\n{process.stdout}{process.stderr}")
    return process.stdout.replace(f"{Path(FOLDER.name).resolve()}/", "")
