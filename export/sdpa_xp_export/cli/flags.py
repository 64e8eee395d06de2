"""The flags of a command: read from its signature, with their help from the `Args:` of its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar, cast

import typer

F = TypeVar("F", bound=Callable[..., None])
_ARGUMENT = re.compile(r"(\w+)(?: \((<\w+>)\))?: (.+)", re.DOTALL)
_SHORT = {"output": "-o"}
"""The flags that have a short name, too."""


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
