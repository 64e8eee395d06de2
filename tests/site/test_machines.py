"""Ratios of times in README and on the landing page are those of results/machines; a time names its CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bars
import machine
import machines
from measuring import Row, Spread

ROOT = Path(__file__).parents[2]
LONG = machines.LENGTHS[-1]
RECORDED = machines.recorded()
TIMES = r"\d (?:ms|CPU seconds)\b", r"\d times as (?:long|fast)", r"\d % (?:slower|faster)"
MINUTES = r"(?<!less than )\b\d+ minutes"
TIME = re.compile("|".join([*TIMES, MINUTES]))
CPU = re.compile(r"AVX2|AVX-512|AMX|Zen \d|depending on the CPU")


def words(page: str) -> str:
    """Return a page in one line, with the text of each link alone."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join((ROOT / page).read_text().split()))


def between(cell: str, quantity: str) -> str:
    """Return the range of a ratio for 4,096 tokens over all machines, in words."""
    least, most = machines.range_of(machines.Ratio(cell, LONG, quantity), RECORDED)
    return f"{shown(least)} to {shown(most)} times"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_ranges_are_those_of_the_machines(page: str) -> None:
    formula = between("all pairs, beside the formula", bars.OF_TEXTBOOK)
    torch = between("all pairs", bars.TO_TORCH)
    assert f"{formula} as fast as the textbook formula" in words(page)
    assert f"takes {torch} as long as torch's" in words(page)


def test_readme_has_a_column_for_each_machine() -> None:
    (table,) = (part for part in (ROOT / "README.md").read_text().split("\n\n") if "| AVX2" in part)
    header, _, *lines = table.splitlines()
    for line in lines:
        cell, *shown = [part.strip() for part in line.strip("| ").split("|")]
        for computer, text in zip(RECORDED, shown, strict=True):
            ratios = (machines.Ratio(cell, length, bars.TO_TORCH) for length in machines.LENGTHS)
            assert ", ".join(shown_of(ratio.measured_in(computer.rows)) for ratio in ratios) == text
    assert re.findall(r"\| ([\w-]+) \(", header) == [computer.name for computer in RECORDED]
    assert {line.split("|")[1].strip() for line in lines} == {*machines.CALLS}


def shown_of(spread: Spread | None) -> str:
    """Return the median; a dash if it was not measured."""
    return "-" if spread is None else shown(spread.median)


def shown(ratio: float) -> str:
    """Return a ratio with two digits behind the point, or one from 2 on."""
    return f"{ratio:.{1 if ratio >= 2 else 2}f}"


def test_what_else_the_machines_say() -> None:
    causal = between("causal, beside the formula", bars.OF_TEXTBOOK)
    decoding = between("one query", bars.TO_TORCH)
    assert f"and {causal} with a causal mask" in words("README.md")
    assert f"one query with 4,096 keys, takes {decoding} as long as torch SDPA." in words("README.md")


def test_each_section_with_a_time_names_a_cpu() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code, heading = re.compile(r"```.*?```", re.DOTALL), re.compile(r"^#+ ", re.MULTILINE)
    sections = [(page.name, part) for page in pages for part in heading.split(code.sub("", page.read_text()))]
    timed = [(name, part) for name, part in sections if TIME.search(" ".join(part.split()))]
    assert len(timed) > 5
    assert [(name, part.splitlines()[0]) for name, part in timed if not CPU.search(part)] == []


def test_a_table_of_machines_has_a_line_for_each_ratio() -> None:
    causal = machines.Ratio("causal", LONG, bars.TO_TORCH)
    first, second = (
        machines.Machine({"name": name}, [Row("causal", LONG, machines.NUMPY, {bars.TO_TORCH: spread})])
        for name, spread in (("one", Spread(1.5, 1.25, 2.0)), ("other", Spread(3.0, 3.0, 3.0)))
    )
    lines = machines.beside([first, second])
    assert lines[0] == "| sdpa_xp on NumPy | one | other |"
    assert "| causal, 4,096 tokens: over torch SDPA | 1.5 (1.25 to 2) | 3 |" in lines
    assert len(lines) == 2 + len(machines.RATIOS)
    assert machines.range_of(causal, [first, second]) == (1.5, 3.0)


@pytest.mark.parametrize("name", ["attention", "exported"])
def test_a_part_of_the_results_can_be_measured_again(name: str) -> None:
    """A part joins the rest if all facts of the machine agree, so each fact is recorded."""
    assert machine.facts().keys() <= json.loads((ROOT / f"results/{name}.json").read_text()).keys()
