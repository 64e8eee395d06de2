"""What the docstrings of a family repeat is shown once: `help()` has all of it, a page of the reference a line.

A function that says "All arguments are as in `attend`." lists each argument again, for `help()`. Those that two
functions describe in the same words are named in one line, which links to the function that explains them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from griffe import DocstringSectionKind, Extension, Function, Module, Object

REFERS = re.compile(
    r"(?:All arguments|This argument and (?:the next ones|all others but `\w+`)) are as in `(\w+)`\."
)
AS_FOR = re.compile(r"As (?:for|in) `\w+`\.")
"""The whole of a section, or of the description of an error, that another function has."""
LETTER = r"`(?:L|S|E|Ev|Hq|H|\.\.\.)`"
LEGEND = re.compile(rf"(?:{LETTER}(?: and {LETTER})? [^`.]*[,.]\s*)+")
"""A section of shapes that only says what the letters mean, as the first page of the reference does for all."""


class SharedParts(Extension):
    """Drop from parsed docstrings what another one explains; the templates get the names and its path."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for described_object in _described(pkg):
            sections = _sections(described_object)
            sections[:] = [section for section in sections if not _is_legend(section)]
        described = [(function, dict(_arguments(function))) for function in _functions(pkg)]
        times = Counter(argument for _, arguments in described for argument in arguments.items())
        for function, arguments in described:
            refers = REFERS.search(" ".join(arguments.values()))
            names: list[str] = []
            if refers:
                known = {name for other, its in described if other.name == refers[1] for name in its}
                # A second sentence says what differs, such as that a log-sum-exp includes the sinks.
                repeated = {argument for argument, n in times.items() if n > 1 and ". " not in argument[1]}
                names = [
                    parameter.name
                    for parameter in function.parameters
                    if parameter.name in known
                    and (
                        parameter.name not in arguments
                        or (parameter.name, arguments[parameter.name]) in repeated
                    )
                ]
                explained_by = _path(function, refers[1], pkg)
                function.extra["shared"] |= {"names": names, "explained_by": explained_by}
            for section in _sections(function):
                if section.kind is DocstringSectionKind.parameters:
                    section.value = [argument for argument in section.value if argument.name not in names]
            _sections(function)[:] = [
                section
                for section in _sections(function)
                if not _is_shared(section) and not _is_of_help(section, function)
            ]


def _sections(member: Object) -> list[Any]:
    return member.docstring.parsed if member.docstring else []


def _described(parent: Object) -> Iterator[Object]:
    """Yield everything that a package defines and that has a docstring."""
    for member in parent.members.values():
        if isinstance(member, Object):
            if member.docstring:
                yield member
            yield from _described(member)


def _functions(package: Module) -> list[Function]:
    """Return every function and method that a package defines."""
    return [member for member in _described(package) if isinstance(member, Function)]


def _arguments(function: Function) -> Iterator[tuple[str, str]]:
    """Yield the arguments that the docstring describes: ("softcap", "A positive number; None or 0 is off.")."""
    for section in _sections(function):
        if section.kind is DocstringSectionKind.parameters:
            yield from ((argument.name, " ".join(argument.description.split())) for argument in section.value)


def _path(function: Function, name: str, package: Module) -> str:
    """Return the path in the reference of the function that a docstring names: "attend" of the same class."""
    parent = function.parent
    return (
        name if parent is not None and parent.is_class and name in parent.members else f"{package.path}.{name}"
    )


def _is_of_help(section: Any, function: Function) -> bool:
    """Whether a section has the errors of a method: `help()` has them, and the page of errors the messages."""
    parent = function.parent
    return section.kind is DocstringSectionKind.raises and parent is not None and parent.is_class


def _is_legend(section: Any) -> bool:
    """Whether a section has the letters of the shapes and no more."""
    return section.kind is DocstringSectionKind.admonition and bool(
        LEGEND.fullmatch(" ".join(section.value.contents.split()))
    )


def _is_shared(section: Any) -> bool:
    """Whether a section says no more than that it is as for another function."""
    if section.kind is DocstringSectionKind.raises:
        return all(AS_FOR.fullmatch(error.description) for error in section.value)
    return section.kind is DocstringSectionKind.admonition and bool(
        AS_FOR.fullmatch(section.value.contents.strip())
    )
