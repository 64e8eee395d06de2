"""Options that several commands share, and the values that a shell completes them with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._files.paths import PathArgument, check_is_no_input
from sdpa_xp_export._runtime.releases import PROVIDERS

DTYPES = ("float32", "float16", "bfloat16", "float64")


def completed_from(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion by the values that begin like the word under the cursor; it checks nothing."""
    known = tuple(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return complete


def check_output(output: PathArgument, path: Path, inputs: Mapping[Path, str]) -> None:
    """Check that a file to write has a name, and is none of those that the command reads."""
    if str(path) == "-":
        rule, hint = "must be the name of a file", "Nothing but text is written to standard output."
        raise ArgumentValueError(*output.message(rule, path, hint).parts)
    check_is_no_input(output, path, inputs)


UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}{end}": 1024**power for power, prefix in enumerate("kmgt", start=1) for end in ("", "ib")}
"""Bytes in a unit: a GB is 10**9, and a GiB or a G is 2**30."""


def number_of_bytes(function: str, name: str, text: str) -> int:
    """Read a number of bytes such as 4GiB."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        rule, hint = f"`{name}` must be a number of bytes", "Write it as 4GiB or 500MB."
        raise ArgumentValueError(function, rule, {name: repr(text)}, hint)
    return int(float(match[1]) * UNITS[match[2]])


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Provider = Annotated[
    str | None,
    typer.Option(help="cpu or cuda. Default: all that start here.", autocompletion=completed_from(PROVIDERS)),
]
