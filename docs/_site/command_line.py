"""The help of each command, and what it prints when it runs."""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from pathlib import Path

from evidence import table
from typer.testing import CliRunner

from sdpa_xp_export.cli.app import app

FOLDER = tempfile.TemporaryDirectory()
"""The folder in which the commands of a page run, one after the other."""


VERIFY_KEYS = {
    "holds": "whether the exit code is 0: the results agree, and every required condition is met",
    "failures": "one line for each run, node or release that makes the exit code 1",
    "agrees": "whether every result agrees",
    "form": "the form of the graph",
    "reason": "why the exporter chose this form",
    "onnxruntime": "the installed release",
    "runtime": "the runtime that the file is for",
    "notes": "what may explain a failure, such as an old onnxruntime",
    "smallest_failure": "the smallest run that does not agree; empty if all agree",
    "call": "the arguments of `export_attention` that the file was compared with",
    "call_from_metadata": "false if `--call` passed them",
    "computed_in": "the dtype of the textbook formula that sets the bounds",
    "math_mode": "how products of float32 were computed: `no TF32`, or `TF32`, which rounds factors to 10 bits",
    "left_out": "what was not tried, and why",
    "seed": "what `--seed` takes to try the same lengths again",
    "nodes": "the number of nodes that ran, and where",
    "runs": "one entry for each output of each run",
    "placements": "one entry for each node that ran",
}
"""What each key of `verify --json` holds."""
VERIFY_ENTRIES = {
    "runs": {
        "inputs": "the lengths, and the size of the scores if it is not 1",
        "provider": "the requested provider",
        "output": "the output of the graph",
        "agreement": (
            "`absolute`: the error; null if it is infinite. `relative`: the error over the largest value. "
            "`bound`: the largest accepted error. `index`: the element. "
            "The run agrees if `absolute` <= `bound`"
        ),
        "seconds": "the time of the run",
        "peak_bytes": "the memory of the process above that before the first run; null on CUDA or if not known",
        "longest": "the larger of the numbers of queries and keys",
        "compared": "the number of rows that were compared",
        "rows": "the number of all rows",
        "where": "the batch entry, head and query of the element",
    },
    "placements": {
        "node": "the name of the node",
        "op": "its operator",
        "provider": "the provider that it ran on",
        "requested": "the requested provider; if it differs, the node fell back",
    },
}
"""What each key of an entry of these lists holds."""


def verify_keys(command: str) -> str:
    """Return a table of the keys of `verify --json`, which are those that the command prints."""
    printed = json.loads(_printed(command))
    _compare(printed, VERIFY_KEYS)
    rows = []
    for key, meaning in VERIFY_KEYS.items():
        rows.append([f"`{key}`", meaning])
        if key in VERIFY_ENTRIES:
            _compare(printed[key][0], VERIFY_ENTRIES[key])
            rows += [[f"`{key}[].{inner}`", text] for inner, text in VERIFY_ENTRIES[key].items()]
    return f"{table(['key', 'meaning'], rows)}\n"


def _compare(printed: dict[str, object], described: dict[str, str]) -> None:
    """Check that the table has every key, and no other."""
    if other := printed.keys() ^ described.keys():
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
