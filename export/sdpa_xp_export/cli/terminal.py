"""What commands share: how they print lines, tables and JSON, with a progress bar, and how they read flags.

The flags of a command are read from its signature, with their help from the `Args:` of its docstring.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sdpa_xp.errors import ArgumentValueError

from .._files.paths import PathArgument, check_is_no_input
from . import plain

F = TypeVar("F", bound=Callable[..., None])
_ARGUMENT = re.compile(r"(\w+)(?: \((<\w+>)\))?: (.+)", re.DOTALL)
_SHORT = {"output": "-o"}
"""The flags that have a short name, too."""
Cell = str | Text
WIDEST = 10_000
NUMBERS = ("error", "bound", "used", "rows", "ms", "peak MB")
"""Columns of numbers."""
YES, NO = Text("yes", "green"), Text("NO", "bold red")


def check_output(output: PathArgument, path: Path, inputs: Mapping[Path, str]) -> None:
    """Check that a file to write has a name, and is none of those that the command reads."""
    if str(path) == "-":
        rule, hint = "must be the name of a file", "Nothing but text is written to standard output."
        raise ArgumentValueError(*output.message(rule, path, hint).parts)
    check_is_no_input(output, path, inputs)


def say(line: str) -> None:
    """Print a line, neither cut nor read as markup."""
    _out().print(Text(plain(line)), soft_wrap=True)


def say_table(columns: Iterable[str], rows: Iterable[Iterable[Cell]]) -> None:
    """Print a table of plain lines."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        # A number is never broken: two halves of one read as two numbers.
        table.add_column(column, overflow="fold", no_wrap=column in NUMBERS)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    out = _out()
    if not out.is_terminal:  # in a pipe each row is one line
        out.width = out.measure(table, options=out.options.update(width=WIDEST)).maximum
    out.print(table)


def say_json(value: object) -> None:
    """Print JSON, which has no infinity: an infinite error becomes null."""

    def finite(value: object) -> object:
        if isinstance(value, dict):
            return {name: finite(element) for name, element in value.items()}
        if isinstance(value, list | tuple):
            return [finite(element) for element in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(value), allow_nan=False))


class Steps:
    """The steps of the work, as a bar of rich with one task shows them."""

    def __init__(self, bar: Progress, steps: int | None) -> None:
        self.bar, self.steps, self.task = bar, steps, bar.add_task("", total=steps)
        bar.refresh()

    def begin(self, name: str) -> None:
        """Name the step that begins."""
        self.bar.update(self.task, description=plain(name))
        self.bar.refresh()

    def end(self, name: str, total: int | None = None) -> None:
        """Count a step that is done; `total` is the number of all steps if that was not known before."""
        known = self.steps if total is None else total
        self.bar.update(self.task, advance=1, total=known, description=plain(name))
        self.bar.refresh()


@contextmanager
def progress(
    what: str, *, steps: int | None = None, quiet: bool = False, is_timed: bool = True
) -> Iterator[Steps]:
    """Show a progress bar on standard error if that is a terminal, until the work is done.

    If the work `is_timed`, the bar is drawn only at its steps: a thread that draws would take some of the time
    that is measured.
    """
    hidden = quiet or not sys.stderr.isatty()
    bar = Progress(
        *([] if is_timed else [SpinnerColumn()]),
        TextColumn(plain(what), markup=False),
        BarColumn(bar_width=16),  # the rest of a line of 80 columns is for names
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        auto_refresh=not is_timed,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=hidden,
    )
    with nullcontext() if hidden else bar:  # rich before 14.3 ends a disabled bar, too, by an empty line
        yield Steps(bar, steps)


def _out() -> Console:
    return Console(highlight=False)


def option(*declared: Any, values: Iterable[str] = (), **settings: Any) -> Any:
    """Return an option of typer, whose value a shell completes by `values`; it may be another one.

    What is `declared` are its names; before them, its default if no annotation holds the option.
    """
    known = tuple(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return typer.Option(*declared, autocompletion=complete if known else None, **settings)


def flags(
    *options: inspect.Parameter, settings: Mapping[str, Mapping[str, Any]] | None = None, **words: object
) -> Callable[[F], F]:
    """Let typer read a flag for each argument of a command, as `seed (<number>): Repeat the runs of this seed.`

    An argument without a default has no flag.

    Args:
        options: The flags that stand first, in place of `**call`.
        settings: More of what `option` takes, by argument.
        words: What stands for `{name}` in the docstring.
    """

    def with_flags(command: F) -> F:
        about, _, section = (inspect.getdoc(command) or "").format(**words).partition("\n\nArgs:\n")
        entries = (_ARGUMENT.match(entry) for entry in re.split(r"^ {4}(?=\w)", section, flags=re.MULTILINE))
        helps = {entry[1]: (entry[2], " ".join(entry[3].split())) for entry in entries if entry}
        parameters = [*options]
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            if parameter.kind == parameter.VAR_KEYWORD:
                continue
            metavar, help = helps.get(name, (None, ""))
            more, flag = (settings or {}).get(name, {}), "--" + name.replace("_", "-")
            if parameter.default is parameter.empty:
                stated = typer.Argument(help=help)
            elif parameter.annotation is bool:
                stated = option(flag, help=help)  # alone, typer would add one for False
            else:
                names = [flag, _SHORT[name]] if name in _SHORT else []
                stated = option(*names, help=help, metavar=metavar, **more)
            parameters.append(parameter.replace(annotation=Annotated[parameter.annotation, stated]))
        command.__doc__ = about
        cast(Any, command).__signature__ = inspect.Signature(parameters)
        return command

    return with_flags
