"""`demo` and `backends`: the array libraries and the exported forms, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.text import Text

from sdpa_xp._checks import install_hint

from .. import _backends as backends
from .._demo import encoder
from .._demo.comparison import Row
from .._files.paths import PathArgument
from .._runtime.session import providers, version
from ..forms.choice import FORMS
from . import DISAGREES, terminal
from .terminal import flags, say

COLUMNS = ("backend", "by", "dtype", "device", "error", "used", "agrees")
LEGEND = (
    "by: xp computes with the library's arrays, the others are forms of a graph",
    "error: the largest one against a float64 reference",
    "used: its share of the bound, which follows from the textbook formula's error",
)
HEAT = ((0.25, "green"), (0.5, "yellow"), (1.0, "dark_orange"), (math.inf, "bold red"))
"""The colour of a share up to each number, on a terminal."""


@flags()
def run_demo(output: Path = Path("demo-output"), force: bool = False) -> None:
    """Compare a real encoder's attention on every library.

    The attention of a small sentence encoder runs on every installed library and in every form of a graph. The
    folder gets the graph, attention.onnx, and a picture of the weights, attention.png. The encoder comes with
    the extra `demo`.

    Args:
        output: The folder for the files.
        force: Replace an existing file.
    """
    terminal.check_output(PathArgument("demo", "output"), output, {})
    encoder.check_folder(output, overwrite=force)
    encoded = encoder.activations()
    say(f"all-MiniLM-L6-v2, attention of {len(encoded.layers)} layers x 12 heads on:")
    for tokens in encoded.tokens:
        say("  " + " ".join(token for token in tokens if token != "[PAD]"))
    for line in encoder.findings(encoded):
        say(line)
    libraries, rows = backends.find_backends(), []
    most = len(encoder.DTYPES) * (len(libraries) + len(providers()) * len(FORMS))
    with terminal.progress("demo", steps=most, is_timed=False) as steps:
        for row in encoder.rows(encoded, libraries, steps.begin):
            rows.append(row)
            steps.end(row.name)
    _show(rows)
    _show_missing()
    for path in encoder.write(encoded, output, overwrite=force):
        say(f"wrote {path}")
    if not all(row.agrees for row in rows):
        raise typer.Exit(DISAGREES)


@flags()
def list_backends(json: bool = False) -> None:
    """List the installed array libraries and onnxruntime providers.

    Args:
        json: Print JSON for scripts.
    """
    rows = [(library.name, library.version, library.device) for library in backends.find_backends()]
    rows += [("onnxruntime", version(), name) for name in providers()]
    if json:
        terminal.say_json([dict(zip(("name", "version", "device"), row, strict=True)) for row in rows])
    else:
        terminal.say_table(("library", "version", "device or provider"), rows)


def _show(rows: Iterable[Row]) -> None:
    """Print the rows that ran something, with the worst error of their jobs; then those that disagree."""
    cells: list[list[terminal.Cell]] = []
    for row in rows:
        if row.worst is None:
            continue
        labels = (row.backend, row.implementation, row.dtype, row.device)
        heat = _heat(row.worst.absolute, row.worst.bound)
        cells.append([*labels, f"{row.worst.absolute:.1e}", heat, terminal.YES if row.agrees else terminal.NO])
    terminal.say_table(COLUMNS, cells)
    for line in LEGEND:
        say(line)
    for row in rows:
        if not row.agrees:
            say(f"DISAGREES: {row.name}: {', '.join(row.disagreeing)}")


def _show_missing() -> None:
    """Say which libraries were not compared, and how to install those that run on every machine."""
    missing = [name for name in backends.LIBRARIES if not backends.is_installed(name)]
    if not missing:
        return
    say(f"not compared, because not installed: {', '.join(missing)}")
    extras = [name for name in missing if name not in ("array-api-strict", "cupy")]  # no extra; needs a GPU
    if extras:
        say(f"  {install_hint(','.join(extras))}")


def _heat(error: float, bound: float) -> Text:
    """Return the share of the bound that an error uses up, in its colour."""
    share = error / bound if bound else math.inf if error else 0.0
    style = next((style for most, style in HEAT if share <= most), HEAT[-1][1])  # NaN is in no range
    return Text(f"{share:.0%}" if math.isfinite(share) else "inf", style)
