"""The reference has every public name once, and a docstring the arguments that there are."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import griffe
import pytest
from documented import DOCS, PUBLIC, ROOT, callables, loaded, pages, rendered
from readable_types import ReadableTypes
from shared_parts import REFERS, SharedParts

CALLABLES = dict(callables())
REST = re.compile(r":(?:[a-z]+:)?[a-z]+:`|^\s*\.\. [a-z-]+::", re.MULTILINE)
"""A role or a directive of reStructuredText, of which Markdown makes nothing."""

ELSEWHERE = re.compile(r"rguments (?:and errors )?are as in (?:a call of the layer|Flax)\.|`\w+` returns it")
"""A call of the layer explains the arguments, or a function makes the object."""


@pytest.mark.parametrize("path", PUBLIC)
def test_every_public_name_is_on_the_site_once(path: str) -> None:
    assert Counter(rendered())[path] == 1


def test_nothing_is_rendered_twice() -> None:
    assert [path for path, times in Counter(rendered()).items() if times > 1] == []


@pytest.mark.parametrize("path", CALLABLES)
def test_the_docstring_has_the_arguments_of_the_signature(path: str) -> None:
    """Or each field of a class has a docstring of its own."""
    symbol = CALLABLES[path]
    parameters = [
        parameter.name.lstrip("*") for parameter in symbol.parameters if parameter.name not in ("self", "cls")
    ]
    names = arguments(symbol)
    if symbol.is_class and not names:
        names = [
            name for name in parameters if name in symbol.all_members and symbol.all_members[name].docstring
        ]
    assert set(names) <= set(parameters)
    if not ELSEWHERE.search(text_of(symbol)):
        assert set(parameters) <= {*names, *referred(path)}


def referred(path: str) -> list[str]:
    """The arguments that the function describes to which a docstring refers, and those to which that refers."""
    refers = REFERS.search(text_of(CALLABLES[path]))
    if not refers:
        return []
    beside = f"{path.rpartition('.')[0]}.{refers[1]}"  # a method of its class
    other = beside if beside in CALLABLES else f"{path.partition('.')[0]}.{refers[1]}"
    return [*arguments(CALLABLES[other]), *referred(other)]


def text_of(symbol: griffe.Object | griffe.Alias) -> str:
    return " ".join(symbol.docstring.value.split()) if symbol.docstring else ""


@pytest.mark.parametrize("path", CALLABLES)
def test_a_default_is_a_value(path: str) -> None:
    """The signature shows the text of a default, in which a call of a function would be code."""
    defaults = [str(parameter.default) for parameter in CALLABLES[path].parameters if parameter.default]
    assert [default for default in defaults if re.search(r"\w\(", default)] == []


@pytest.mark.parametrize("path", CALLABLES)
def test_what_is_returned_is_read_as_prose(path: str) -> None:
    """`Returns:` with a colon in its first line would be read as a type and its description."""
    for section in parsed(CALLABLES[path]):
        if section.kind is griffe.DocstringSectionKind.returns:
            assert [item.annotation for item in section.value if isinstance(item.annotation, str)] == []


def test_the_files_of_the_pages_are_those_of_the_navigation() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r"(?:- |: )(\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(pages())


@pytest.mark.parametrize(
    "path",
    [
        *(path for folder in ("sdpa_xp", "export", "docs/_site") for path in (ROOT / folder).rglob("*.py")),
        *(DOCS / name for name in pages()),
        *ROOT.glob("*.md"),
    ],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_nothing_is_written_for_another_renderer(path: Path) -> None:
    assert REST.findall(path.read_text()) == []


@pytest.mark.parametrize("text", [":math:`x`", ".. math:: x", "  .. note::", ":py:class:`X`", ":func:`f`"])
def test_the_lint_finds(text: str) -> None:
    assert REST.search(f"a line\n{text}")


def arguments(symbol: griffe.Object | griffe.Alias) -> list[str]:
    """The names in `Args:`, in their order."""
    kind = griffe.DocstringSectionKind.parameters
    return [argument.name for section in parsed(symbol) if section.kind is kind for argument in section.value]


def parsed(symbol: griffe.Object | griffe.Alias) -> list[Any]:
    return [] if symbol.docstring is None else list(symbol.docstring.parsed)


def test_types_are_those_that_a_reader_knows() -> None:
    """No type variable and no protocol of ours stands for an array, and no `Unpack` around keywords."""
    objects = loaded(ReadableTypes)
    for path in CALLABLES:
        function = objects[path]
        annotations = [
            *(parameter.annotation for parameter in function.parameters),
            getattr(function, "returns", None),
        ]
        text = " ".join(map(str, annotations))
        assert re.findall(r"\b(?:A|AnyArray|Unpack|checks)\b", text) == [], path
    attend = objects["sdpa_xp.scaled_dot_product_attention"]
    assert str(attend.parameters["attn_mask"].annotation) == "Mask | Array"  # the default shows
    assert objects["sdpa_xp_export.to_onnx"].parameters["runtime"].default == "'onnxruntime>=1.28;cpu'"


def test_what_another_function_explains_is_named_once() -> None:
    """And what differs stands in the table: the sinks of a state."""
    states = loaded(SharedParts)["sdpa_xp.attention_state"]
    assert states.extra["shared"]["explained_by"] == "sdpa_xp.scaled_dot_product_attention"
    assert {"attn_mask", "bias", "softcap"} <= set(states.extra["shared"]["names"])
    assert {"query", "sinks", "lse_base"} <= set(arguments(states))
    assert set(arguments(states)).isdisjoint(states.extra["shared"]["names"])
    assert "are as in" not in str([section.value for section in parsed(states)])


def test_common_errors_are_left_to_help() -> None:
    objects = loaded(SharedParts)
    raised = {
        path: {str(error.annotation) for section in parsed(objects[path]) for error in errors_of(section)}
        for path in ("sdpa_xp.merge_states", "sdpa_xp.plot.mask", "sdpa_xp_export.save")
    }
    assert raised == {
        "sdpa_xp.merge_states": set(),
        "sdpa_xp.plot.mask": set(),
        "sdpa_xp_export.save": {"FileExistsError", "FileNotFoundError", "OSError"},
    }


def errors_of(section: Any) -> list[Any]:
    return section.value if section.kind is griffe.DocstringSectionKind.raises else []


def test_shared_arguments_of_a_method_lead_to_another_method_of_its_class() -> None:
    shared = loaded(SharedParts)["sdpa_xp.KVCache.attend_state"].extra["shared"]
    assert shared["explained_by"] == "attend"
