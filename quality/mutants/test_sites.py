"""What is a mutant and what is none, and that a draw is the same for one seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from quality.mutants.draw import draw
from quality.mutants.run import listed
from quality.mutants.sites import differs, mutants
from quality.mutants.suites import LEFT_OUT, SUITES

ROOT = Path(__file__).parents[2]
SOURCE = '''
"""A module: 1 < 2."""
__all__ = ["f"]
LIMIT: int = 3


@cached(maxsize=4)
def f(x: "a < b", axis=-1, *, flag=True) -> int:
    """Text with 5 and 6."""
    if x is None or x < 1:
        return 0
    if not x:
        raise ValueError(f"no {x + 1}")
    value = max(x, key) + rows[1:x]
    value += call(one, two, three)
    for _ in zip(value, strict=True):
        zip(value, strict=False)
    return value
'''
EXPECTED = [
    ("<module>", "3", "4"),
    ("f", "-1", "(-2)"),
    ("f", "True", "False"),
    ("f", "x is None or x < 1", "((not (x is None or x < 1)))"),
    ("f", "return 0", "pass"),
    ("f", "x is None or x < 1", "(x is None and x < 1)"),
    ("f", "x is None", "(x is not None)"),
    ("f", "x < 1", "(x <= 1)"),
    ("f", "1", "2"),
    ("f", "0", "1"),
    ("f", "not x", "(x)"),
    ("f", 'raise ValueError(f"no {x + 1}")', "pass"),
    ("f", "max(x, key) + rows[1:x]", "(max(x, key) - rows[1:x])"),
    ("f", "max", "min"),
    ("f", "key", "value"),
    ("f", "rows", "columns"),
    ("f", "1", "None"),
    ("f", "x", "None"),
    ("f", "1", "2"),
    ("f", "value += call(one, two, three)", "pass"),
    ("f", "value += call(one, two, three)", "value -= call(one, two, three)"),
    ("f", "call(one, two, three)", "call(two, one, three)"),
    ("f", "value", "key"),
    ("f", "zip(value, strict=False)", "pass"),
    ("f", "False", "True"),
    ("f", "value", "key"),
    ("f", "value", "key"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sdpa_xp" / "module.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_sites(file: Path) -> None:
    all_mutants = mutants(file.parents[1], file)
    assert {mutant.file for mutant in all_mutants} == {"sdpa_xp/module.py"}
    assert sorted((mutant.function, mutant.before, mutant.after) for mutant in all_mutants) == sorted(EXPECTED)


def test_a_mutant_changes_its_site_alone(file: Path) -> None:
    for mutant in mutants(file.parents[1], file):
        source = mutant.applied(SOURCE)
        assert differs(SOURCE, mutant)
        assert len(source) == len(SOURCE) + len(mutant.after) - len(mutant.before)
        line = SOURCE.splitlines()[mutant.line - 1]
        assert mutant.before.splitlines()[0] in line


def test_defaults_run_at_import(file: Path) -> None:
    changes = {(mutant.before, mutant.after) for mutant in mutants(file.parents[1], file) if mutant.at_import}
    assert changes == {("3", "4"), ("-1", "(-2)"), ("True", "False")}


def test_letters_of_several_bytes(tmp_path: Path) -> None:
    path = tmp_path / "sdpa_xp" / "module.py"
    path.parent.mkdir()
    path.write_text('x = "äß", 1\n')
    (only,) = mutants(tmp_path, path)
    assert only.applied(path.read_text()) == 'x = "äß", 2\n'


def test_a_draw_follows_from_its_seed(file: Path) -> None:
    root = file.parents[1]
    one, same, other = (draw(root, 10, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert len(set(one)) == 10


def test_each_folder_of_tests_judges_mutants_or_says_why_not() -> None:
    files = [file for top in ("tests", "quality") for file in (ROOT / top).rglob("test_*.py")]
    folders = {"/".join(file.relative_to(ROOT).parts[:2]) for file in files}
    judging = {name for suite in SUITES.values() for name in suite if name.startswith(("tests/", "quality/"))}
    assert judging | {*LEFT_OUT} == folders
    assert not judging & {*LEFT_OUT}


def test_what_is_equivalent_is_in_the_program() -> None:
    """A line that was changed or moved may have a mutant that is not equivalent."""
    for name in listed():
        assert name in {mutant.name for mutant in mutants(ROOT, ROOT / name[0])}, name
