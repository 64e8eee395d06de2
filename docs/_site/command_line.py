"""The command line as it is: what each command says of itself, and what it prints when it runs."""

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
"""Where the commands of a page run, one after the other."""


def said(*command: str) -> str:
    """What `--help` prints, as a block of text."""
    printed = CliRunner().invoke(app, [*command, "--help"], prog_name="sdpa-xp", env={"COLUMNS": "80"})
    if printed.exit_code:
        raise RuntimeError(printed.output)
    return _block(f"$ {' '.join(['sdpa-xp', *command, '--help'])}", printed.output)


def used(*commands: str) -> str:
    """Each command and what it prints, as a block of text; a command that fails raises."""
    return _block(*(line for command in commands for line in (f"$ {command}", _printed(command))))


def _block(*lines: str) -> str:
    kept = (line.rstrip() for text in lines for line in text.strip("\n").splitlines())
    return "\n".join(["", "```text", *kept, "```", ""])


def _printed(command: str) -> str:
    """What a command prints, in a process of its own."""
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    paths = [str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")]
    settings = {"COLUMNS": "88", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-m", "sdpa_xp_export", *arguments],
        cwd=FOLDER.name,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.replace(f"{Path(FOLDER.name).resolve()}/", "")
