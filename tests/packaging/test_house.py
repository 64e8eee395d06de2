"""The rules of the house that no linter knows: who may name an array library, and how things are named."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import internals
import pytest

from sdpa_xp_export.cli.app import app

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "sdpa_xp", ROOT / "export/sdpa_xp_export")
AROUND = [ROOT / name for name in ("conftest.py", "tests", "quality", "benchmarks", "docs", "examples")]
"""What uses the packages."""
Code: TypeAlias = Mapping[Path, Sequence[ast.AST]]
"""Every node of the code in a file, by its path from the top folder."""
ARRAY_LIBRARY = re.compile(
    r"(?<![a-z])(numpy|torch|jax|cupy|mlx|dask|cubed|array.api.(strict|compat))(?![a-z])", re.IGNORECASE
)
PRONOUNS = frozenset(
    [
        *("own", "found", "given", "held", "made", "each", "once", "of", "at", "on"),
        *("some", "seen", "asked", "taken", "it"),
    ]
)
"""Words that do not say what they name."""


def files_of(places: Iterable[Path]) -> Iterator[Path]:
    """Yield every file of code among these folders and files."""
    for place in places:
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        assert files, place
        yield from files


def nodes_of(places: Iterable[Path]) -> Code:
    return {path.relative_to(ROOT): [*ast.walk(ast.parse(path.read_text()))] for path in files_of(places)}


# Each file is parsed once, and nothing is kept for the tests of other files: the nodes take 200 MB.
@pytest.fixture(scope="module")
def in_packages() -> Code:
    return nodes_of(PACKAGES)


@pytest.fixture(scope="module")
def around() -> Code:
    return nodes_of(AROUND)


def flat(*code: Code) -> Iterator[tuple[Path, ast.AST]]:
    """Yield every node with its file."""
    return ((path, node) for part in code for path, nodes in part.items() for node in nodes)


@pytest.mark.parametrize("folder", ["_programs", "_run", "_sources", "_call"])
def test_the_mathematics_names_no_array_library(folder: str) -> None:
    """What a library does differently is in `_libraries` or `_kernels`."""
    files = sorted((ROOT / "sdpa_xp" / folder).rglob("*.py"))
    assert files
    named = {str(file.relative_to(ROOT)): ARRAY_LIBRARY.findall(file.read_text()) for file in files}
    assert {file: names for file, names in named.items() if names} == {}


def test_a_class_name_means_one_thing(in_packages: Code) -> None:
    places = defaultdict(set)
    for path, node in flat(in_packages):
        if isinstance(node, ast.ClassDef):
            places[node.name].add(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


STATISTICS = ("sdpa_xp/_statistics.py", "sdpa_xp/_varlen.py", "sdpa_xp/caches/kv.py", "sdpa_xp/caches/paged.py")


def test_no_name_is_a_pronoun(in_packages: Code, around: Code) -> None:
    """A field says what it holds, a function what it does."""
    pronouns = []
    for path, node in flat(in_packages, around):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name == "of" and str(path) in STATISTICS:  # read with the call: statistics of entropy
            continue
        if name is not None and name.strip("_") in PRONOUNS:
            pronouns.append(f"{path}:{getattr(node, 'lineno', 0)}: {name}")
    assert pronouns == []


def imports_by_text(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules of a file's own package that it imports where a law of imports cannot see them."""
    package = "sdpa_xp" if path.parts[0] == "sdpa_xp" else "sdpa_xp_export"
    folder = ROOT / ("sdpa_xp" if package == "sdpa_xp" else "export/sdpa_xp_export")
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == package:
            for alias in node.names:  # a public name, which `__getattr__` finds by the text of its module
                if not any((folder / name).exists() for name in (alias.name, f"{alias.name}.py")):
                    yield f"from {package} import {alias.name}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            text = ast.unparse(node.args[0])
            if not isinstance(node.args[0], ast.Constant) or "sdpa_xp" in text:
                yield text


TEXTS = {
    # A public name, when a program first uses it, and the parts in which a name is looked for that it has not.
    "sdpa_xp/__init__.py": ["f'{__name__}.{_MODULES[name]}'", "f'{__name__}.{part}'"],
    "sdpa_xp/_tiles/modifier.py": ["f'{package}.{file}'"],  # a public name, listed for type checkers too
    "sdpa_xp/_torch/description.py": ["f'{PACKAGE}.{module}'"],  # of the class of a mask or a bias
    "export/sdpa_xp_export/_judge/function.py": ["module"],  # of the function that a user names
    "export/sdpa_xp_export/_backends.py": ["package.module", "name"],  # of array libraries
}
"""The texts that may name a module."""


def test_no_import_by_a_text_hides_a_circle(in_packages: Code) -> None:
    """import-linter reads statements: it sees neither a module named by a text, nor a public name's module."""
    hidden = {str(path): [*imports_by_text(path, nodes)] for path, nodes in in_packages.items()}
    assert {path: texts for path, texts in hidden.items() if texts} == TEXTS


def test_one_module_names_what_is_private(around: Code) -> None:
    """What moves or is renamed in a package changes tests/internals.py, and nothing else around it."""
    private = re.compile(r"\bsdpa_xp(?:_export)?(?:\.\w+)*(?:\.| import )_[a-z]")
    # The second has addresses on a page of the docs, where names of private modules must not be found.
    allowed = {"tests/internals.py", "tests/site/test_search_words.py"}
    places = []
    for path, node in flat(around):
        texts = []
        if isinstance(node, ast.ImportFrom):
            texts = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            texts = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [node.value]
        if str(path) not in allowed and any(private.search(text) for text in texts):
            places.append(f"{path}:{getattr(node, 'lineno', 0)}")
    assert places == []
    texts = [path.read_text() for path in files_of(AROUND) if path.name != "internals.py"]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    assert [name for name in internals.PLACES if name not in words] == []


def test_the_page_for_contributors_names_what_there_is() -> None:
    """Each name and each path in backticks is in the tree."""
    folders = ("sdpa_xp", "export", "tests", "quality", "benchmarks", "docs/_site")
    texts = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join([*texts, (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()])
    quoted = set(re.findall(r"`([^`\n]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    missing = []
    for text in quoted:
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", text):  # a name, or a call of it
            name = text.partition("(")[0].rpartition(".")[2]
            missing += [] if re.search(rf"\b{name}\b", code) else [text]
        elif re.fullmatch(r"[A-Za-z_][\w./-]*", text) and not any(ROOT.glob(f"**/{text.rstrip('/')}")):
            missing.append(text)
    assert missing == []


def test_targets_of_make_find_what_their_programs_import() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$$path", "tests")
    programs = re.findall(
        r"(?:PYTHONPATH=(\S+) )?\$\(BIN\)/python (?:-m )?((?:[a-z]\w*[./])+[a-z]\w*)", makefile
    )
    assert len(programs) > 10
    for path, program in programs:
        is_file = program.endswith(".py")
        folders = [ROOT / folder for folder in path.split(":") if folder]
        folders.append((ROOT / program).parent if is_file else ROOT)
        place = program if is_file else program.replace(".", "/") + ".py"
        (file,) = [folder / place for folder in [ROOT, *folders] if (folder / place).exists()][:1]
        for node in ast.parse(file.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                ours = [folder for folder in AROUND if (folder / f"{top}.py").exists()]
                ours += [ROOT] * (ROOT / top in AROUND)
                assert not ours or set(ours) & {*folders}, f"{program} cannot import {name}"


def test_commands_that_make_and_the_project_run_exist() -> None:
    paths = [*(ROOT / ".ci").iterdir(), *(ROOT / ".github").rglob("*.yml")]
    paths += [ROOT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md", "RELEASING.md")]
    commands = {name for path in paths for name in re.findall(r"\bsdpa-xp ([a-z]+)", path.read_text())}
    assert {"demo", "export"} <= commands <= {command.name for command in app.registered_commands}


def test_imports_of_a_package_from_itself_are_relative(in_packages: Code) -> None:
    """So a copy of the folder works under another name. child.py is run by its path, and has no package."""
    for path, nodes in in_packages.items():
        package = path.parts[0] if path.parts[0] != "export" else path.parts[1]
        imports = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        imports += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
        absolute = [name for name in imports if str(name).partition(".")[0] == package]
        assert not absolute or path.name == "child.py", path
