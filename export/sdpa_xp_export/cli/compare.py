"""`agree`, `demo` and `backends`: the array libraries and the exported forms, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from itertools import chain
from pathlib import Path

import typer
from rich.text import Text

from sdpa_xp._checks.messages import install_hint
from sdpa_xp.errors import ArgumentValueError

from .. import _demo as demo
from .._agree import backends
from .._agree.comparison import Row, compare, feature_jobs
from .._files.paths import PathArgument
from .._runtime.session import providers, version
from ..forms.choice import FORMS
from ..spec import dtype_hint
from . import DISAGREES, terminal
from .terminal import flags, say

DTYPES = ("float32", "float16", "bfloat16", "float64")
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
    demo.check_folder(output, overwrite=force)
    encoded = demo.activations()
    say(f"all-MiniLM-L6-v2, attention of {len(encoded.layers)} layers x 12 heads on:")
    for tokens in encoded.tokens:
        say("  " + " ".join(token for token in tokens if token != "[PAD]"))
    for line in demo.findings(encoded):
        say(line)
    libraries = backends.find_backends()
    most = _most_rows(demo.DTYPES, libraries, providers())
    with terminal.progress("demo", steps=most, is_timed=False) as steps:
        rows = _collected(demo.rows(encoded, libraries, steps.begin), steps)
    _show(rows)
    _show_missing()
    for path in demo.write(encoded, output, overwrite=force):
        say(f"wrote {path}")
    _judge(rows)


@flags(
    settings={"dtype": {"values": DTYPES}, "backend": {"values": backends.LIBRARIES}},
    dtypes=", ".join(DTYPES),
    libraries=", ".join(backends.LIBRARIES),
)
def agree(dtype: list[str] | None = None, backend: list[str] | None = None, json: bool = False) -> None:
    """Compare every feature with the reference.

    Each feature runs on every library and in every form; the reference is computed in float64. One library and
    one dtype take seconds, everything takes minutes.

    Args:
        dtype (<dtype>): {dtypes}; repeat the option for several. Default: all.
        backend (<library>): {libraries}; repeat the option for several. Default: all that are installed.
        json: Print JSON for scripts.
    """
    dtypes = dtype or DTYPES
    for name in dtypes:
        if name not in DTYPES:
            rule = f"`dtype` must be one of {', '.join(DTYPES)}"
            raise ArgumentValueError("agree", rule, {"dtype": repr(name)}, dtype_hint(name, DTYPES))
    libraries, offered = backends.find_backends(backend), providers()
    most = _most_rows(dtypes, libraries, offered)
    with terminal.progress("agree", steps=most, quiet=json, is_timed=False) as steps:
        compared = (compare(feature_jobs(name), name, libraries, offered, steps.begin) for name in dtypes)
        collected = _collected(chain.from_iterable(compared), steps)
    if json:
        terminal.say_json([row.as_json() for row in collected])
    else:
        _show(collected)
        if backend is None:
            _show_missing()
    _judge(collected)


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


def _most_rows(dtypes: Sized, libraries: Sized, offered: Sized) -> int:
    """Return the number of rows if each library holds each dtype."""
    return len(dtypes) * (len(libraries) + len(offered) * len(FORMS))


def _collected(rows: Iterable[Row], steps: terminal.Steps) -> list[Row]:
    """Collect the rows, with a progress bar."""
    collected = []
    for row in rows:
        collected.append(row)
        steps.end(row.name)
    return collected


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


def _judge(rows: Iterable[Row]) -> None:
    if not all(row.agrees for row in rows):
        raise typer.Exit(DISAGREES)
