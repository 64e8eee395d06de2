"""What the docstrings of a family share is said once: a table of parameters links to the function that says it.

A docstring with the sentence "All other arguments and errors are as in `attend`." describes what differs. Its
table gets one more row, with the link, in place of the sentence, and its signature `**others`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import (
    DocstringSectionKind,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

REFERS = re.compile(r" ?All other arguments(?: and errors)? are as in `([\w.]+)`\.")


IMPORTS = re.compile(r"^>>> (?:import numpy as np|from sdpa_xp\S* import .+)\n", re.MULTILINE)
"""As in NumPy's reference, what the examples of a page need is imported: reference/index.md says so."""
PAPER = re.compile(r'(?:"[^"]+",\s+)?arXiv\s+(\d{4}\.\d{5})')
LINK = r"[arXiv \1](https://arxiv.org/abs/\1)"
"""The site links to a paper that has a number, in place of its title, which `help()` shows."""
DRAWING = re.compile(r"^    .* [01] [01]( |$)", re.MULTILINE)
"""A mask, drawn in the description of its function: what the example prints."""
COMMON = ("TypeError", "ValueError", "ModuleNotFoundError")
"""Errors of every function. The page of errors says when they are raised, and `help()` what for."""


class SharedParts(Extension):
    """Give the templates what `REFERS` names, leave out common errors and imports, and link to papers."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for described in _described(pkg):
            sections = described.docstring.parsed if described.docstring else []
            for section in sections:
                if section.kind is DocstringSectionKind.raises:
                    section.value = [error for error in section.value if str(error.annotation) not in COMMON]
                if section.kind is DocstringSectionKind.parameters and isinstance(described, Function):
                    _share(described, section.value, pkg)
                if section.kind is DocstringSectionKind.admonition and section.title == "References":
                    section.value.description = PAPER.sub(LINK, section.value.description)
                if section.kind is DocstringSectionKind.examples:
                    section.value = [(kind, IMPORTS.sub("", text)) for kind, text in section.value]
            is_drawn = any(DRAWING.search(str(section.value)) for section in sections[:1])
            sections[:] = [
                section
                for section in sections
                if section.value and not (is_drawn and section.kind is DocstringSectionKind.examples)
            ]


def _share(function: Function, arguments: list[Any], package: Module) -> None:
    """Take the sentence that refers to another function out of the description of an argument."""
    described = {argument.name for argument in arguments}
    for argument in arguments:
        text = " ".join(argument.description.split())
        if refers := REFERS.search(text):
            argument.description = text.replace(refers[0], "").strip()
            names = [name.name for name in function.parameters if name.name not in (*described, "self", "cls")]
            path = _path(function, refers[1], package)
            function.extra["shared"] |= {"names": names, "explained_by": path, "shown": refers[1]}
            _shorten(function, names)


def _shorten(function: Function, names: list[str]) -> None:
    """Show `**others` in a signature, for the keywords that another function explains."""
    shown = [
        parameter
        for parameter in function.parameters
        if parameter.name not in names or parameter.kind is not ParameterKind.keyword_only
    ]
    if len(shown) < len(function.parameters):
        others = Parameter("others", kind=ParameterKind.var_keyword)
        function.parameters = Parameters(*shown, others)


def _described(parent: Object) -> Iterator[Object]:
    """Yield everything that a package defines and that has a docstring."""
    for member in parent.members.values():
        if isinstance(member, Object):
            if member.docstring:
                yield member
            yield from _described(member)


def _path(function: Function, name: str, package: Module) -> str:
    """Return the path in the reference of the function that a docstring names: "attend" of the same class."""
    parent = function.parent
    return (
        name if parent is not None and parent.is_class and name in parent.members else f"{package.path}.{name}"
    )
