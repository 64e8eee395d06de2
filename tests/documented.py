"""What the site is made of, as its own machinery reads it: docstrings by griffe, pages, public names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_site"))  # as the build of the site does

from call_options import Options  # noqa: E402
from public_names import PublicNames  # noqa: E402

MODULES = (
    "sdpa_xp",
    "sdpa_xp.masks",
    "sdpa_xp.biases",
    "sdpa_xp.positional",
    "sdpa_xp.layers",
    "sdpa_xp.plot",
    "sdpa_xp.integrations.transformers",
    "sdpa_xp.integrations.flax",
    "sdpa_xp.integrations.equinox",
    "sdpa_xp.integrations.keras",
    "sdpa_xp_export",
)
INTERNAL = ("bind", "mapped")
"""Methods that the library calls, of classes that a caller gets; the site leaves them out."""

PUBLIC = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


def pages() -> dict[str, str]:
    """Each page of the site, by its path in docs/."""
    left_out = re.findall(r"^  (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)  # in exclude_docs
    paths = (path for path in sorted(DOCS.rglob("*.md")) if "_site" not in path.parts)
    texts = {path.relative_to(DOCS).as_posix(): path.read_text() for path in paths}
    return {name: text for name, text in texts.items() if name not in left_out}


def rendered() -> list[str]:
    """What the reference renders, by path, as often as it does."""
    return re.findall(r"^::: (\S+)$", "\n".join(pages().values()), re.MULTILINE)


def loaded(*extensions: type[griffe.Extension]) -> griffe.ModulesCollection:
    """Both packages, with the names that mkdocstrings sees, after these extensions of the site."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT, ROOT / "export"],
        extensions=griffe.load_extensions(Options, *extensions, PublicNames),
        docstring_parser=griffe.Parser.google,
        docstring_options={"returns_named_value": False},
    )
    for package in ("sdpa_xp", "sdpa_xp_export"):
        loader.load(package)
    loader.resolve_aliases(implicit=True)
    return loader.modules_collection


def callables() -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """Public functions, classes and their public methods that have a docstring, by path."""
    objects = loaded()
    for path in PUBLIC:
        symbol = objects[path]
        if symbol.is_function or symbol.is_class:
            yield path, symbol
        if symbol.is_class:
            for name, member in symbol.all_members.items():
                public = name == "__call__" or not (name.startswith("_") or name in INTERNAL)
                if public and member.is_function and member.docstring:
                    yield f"{path}.{name}", member
