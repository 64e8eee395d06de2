"""The README's examples run, its links lead to files, and its numbers were measured."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
RESULTS: list[dict[str, Any]] = json.loads((ROOT / "results/attention.json").read_text())["rows"]
GRAPHS: dict[str, Any] = json.loads((ROOT / "results/exported.json").read_text())
BY_TORCH = 'sdpa_xp on NumPy, implementation="torch"'
SPEED = {
    "**sdpa_xp, NumPy**": (("all pairs", "sdpa_xp on NumPy"), ("causal", "sdpa_xp on NumPy")),
    '**sdpa_xp, NumPy, `implementation="torch"`**': (
        ("all pairs, by torch", BY_TORCH),
        ("causal, by torch", BY_TORCH),
    ),
    "`jax.nn`, jitted": (("all pairs", "jax.nn, jitted"), ("causal", "jax.nn, jitted")),
    "**sdpa_xp, JAX, jitted**": (("all pairs", "sdpa_xp on JAX, jitted"), ("causal", "sdpa_xp on JAX, jitted")),
    "**sdpa_xp, exported to onnxruntime** with fixed lengths": (
        ("all pairs", "onnxruntime, MultiHeadAttention"),
        ("causal", "onnxruntime, GroupQueryAttention"),
    ),
}
"""By line of the table, the cell and the contender of all pairs and of causal calls."""


@pytest.mark.needs("torch", "jax", "matplotlib", "onnxruntime")
def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader types them."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert capsys.readouterr().out == re.findall(r"```text\n(.*?)```", TEXT, flags=re.DOTALL)[0]
    exec(compile("\n".join(blocks[1:]), "README.md", "exec"), names)
    assert (tmp_path / "attention.onnx").exists()


def test_links_lead_to_files_that_a_forge_shows_whole() -> None:
    """Pages of the site that the build completes show little elsewhere."""
    assert len(LINKS) > 15
    paths = [ROOT / link for link in LINKS if not link.startswith("http")]
    assert [path for path in paths if not path.exists()] == []
    directive = re.compile(r'^\s*(:::|=== "|\?\?\? |!!! |--8<--)|^```\w+ .*(exec|picture)=', re.MULTILINE)
    assert [path for path in paths if path.suffix == ".md" and directive.search(path.read_text())] == []


def test_links_to_sections_lead_to_headings() -> None:
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", TEXT, re.MULTILINE)}
    sections = re.findall(r"\]\(#([^)]+)\)", TEXT)
    assert sections
    assert set(sections) <= headings


def test_the_first_screen_says_how_to_run_it() -> None:
    first = "\n".join(TEXT.splitlines()[:60])
    block = "".join(re.findall(r"```console\n(.*?)```", first, re.DOTALL))
    environment, *commands = re.findall(r"^\$ (.*?) *#", block, re.MULTILINE)
    assert environment.startswith("python3 -m venv .venv")  # many systems refuse without
    installs = ["pip install '.[plot]'", "pip install '.[export,cli]'"]
    assert commands == [*installs, "make demo", "make test-fast", "make test"]


def test_badges_say_what_is_true() -> None:
    for name, texts in badges().items():
        assert all(text in (ROOT / f"docs/assets/badges/{name}.svg").read_text() for text in texts)
        assert f"(docs/assets/badges/{name}.svg)" in TEXT
    makefile = (ROOT / "Makefile").read_text()
    tested = set(
        re.findall(r"[a-z]+", " ".join(re.findall(r"^part-.*:|--backends=\S+", makefile, re.MULTILINE)))
    )
    named = badges()["tests"][1].replace("array-api-strict", "strict").lower().split(", ")
    assert [library for library in named if library not in tested] == []


def test_each_feature_names_a_test_that_exists() -> None:
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("| feature | tests |")
    rows = re.findall(r"^\| .*$", table.partition("\n## ")[0], re.MULTILINE)
    named = [re.findall(r"`(tests/[\w/]+\.py)`", row) for row in rows]
    assert len(rows) > 10
    assert all(named)
    assert [path for paths in named for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("line", SPEED)
def test_speed_is_what_was_measured(line: str) -> None:
    over_torch = [f"{measured(cell, contender, 'over torch SDPA'):.2f}" for cell, contender in SPEED[line]]
    assert cells_of(line) == over_torch
    assert cells_of("torch SDPA") == ["1", "1"]


def test_jit_is_what_was_measured() -> None:
    times = {cell["call"]: cell["milliseconds"] for cell in GRAPHS["jit"]}
    expected = []
    for call in ("all pairs", "causal"):
        time = times[f"{call}, S = 4,096"]
        expected.append(f"{time['jit'] / time['torch SDPA']:.2f}")
    assert cells_of("**sdpa_xp, NumPy, through `jit`** (onnxruntime)") == expected


def test_jit_is_said_to_help_where_it_was_measured() -> None:
    times = {cell["call"]: cell["milliseconds"] for cell in GRAPHS["jit"]}
    long, short = times["all pairs, S = 4,096"], times["all pairs, S = 8"]
    ratio = long["jit"] / long["sdpa_xp on NumPy"]
    assert f"all pairs of 4,096 tokens take {ratio:.1f} of the time." in prose("README.md")
    assert times["causal, S = 4,096"]["jit"] > times["causal, S = 4,096"]["sdpa_xp on NumPy"]
    microseconds = measured("overhead", "sdpa_xp on NumPy", "microseconds", 8)
    assert short["jit"] * 1000 > microseconds


def test_torch_takes_what_was_measured() -> None:
    ratio = measured("all pairs", "sdpa_xp on torch", "over torch SDPA")
    assert f"On torch arrays it calls torch's kernel and takes {ratio:.2f} times as long." in prose("README.md")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_memory_is_what_was_measured(page: str) -> None:
    ours, textbook = (
        measured("memory", contender, "MB above inputs and output")
        for contender in ("sdpa_xp on NumPy", "textbook NumPy")
    )
    sentence = (
        f"needs {ours:.1f} MB of memory above its inputs and output; the formula needs {textbook:,.0f} MB."
    )
    assert sentence in prose(page)


def test_short_calls_are_slower_by_what_was_measured() -> None:
    on_numpy, on_torch = (
        measured("overhead", contender, "over torch SDPA", 8)
        for contender in ("sdpa_xp on NumPy", "sdpa_xp on torch")
    )
    assert (
        f"a call of 8 tokens takes {on_numpy:.1f} times as long as torch SDPA on NumPy, "
        f"and {on_torch:.1f} times on torch."
    ) in prose("README.md")


@pytest.mark.needs("hatchling")
@pytest.mark.parametrize("source", ["", "https://example.org/sdpa_xp", "https://example.org/sdpa_xp/"])
def test_on_a_package_index_no_link_is_relative(source: str) -> None:
    text = hook().absolute(TEXT, source, "1.2.3")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    led = "https://example.org/sdpa_xp/blob/v1.2.3/LICENSE"
    assert (led in links) is bool(source)
    assert ("![Left:" in text) is bool(source)
    assert ("(https://example.org/sdpa_xp/blob/v1.2.3/README.md#where-it-runs)" in text) is bool(source)
    assert "MIT, see" in text


def test_the_picture_is_one_that_is_shown_anywhere() -> None:
    """A sanitiser keeps an image only if it is a file; letters are drawn, since a page has other fonts."""
    picture = (ROOT / "docs/assets/readme.svg").read_text()
    assert "<text" not in picture
    assert "<script" not in picture


def prose(page: str) -> str:
    """Return a page in one line, with the text of each link alone."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join((ROOT / page).read_text().split()))


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of the README's table without its first, which may have links."""
    lines = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", TEXT).splitlines()
    (row,) = (row for row in lines if row.startswith(f"| {line} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def measured(cell: str, contender: str, quantity: str, length: int = 4096) -> float:
    """Return the median at this number of tokens."""
    return spread_of(cell, contender, quantity, length)["median"]


def spread_of(cell: str, contender: str, quantity: str, length: int = 4096) -> dict[str, float]:
    """Return the median and the quartiles at this number of tokens."""
    (row,) = (
        row for row in RESULTS if (row["cell"], row["length"], row["contender"]) == (cell, length, contender)
    )
    numbers: dict[str, float] = row["numbers"][quantity]
    return numbers


def hook() -> Any:
    """Return the module of the build hook."""
    return module_at("hatch_build.py")


def badges() -> dict[str, tuple[str, str]]:
    """Return what each badge says."""
    texts: dict[str, tuple[str, str]] = module_at("docs/_site/badges.py").badges()
    return texts


def module_at(path: str) -> Any:
    """Return the module of a file that is no part of a package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
