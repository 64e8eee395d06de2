"""The table of a GPU, tried on the CPU: each cell has numbers or says why it has none."""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CELLS = ("all pairs", "causal", "memory, all pairs", "memory, causal")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("on_device")


def broken(*_: Any) -> Any:
    raise RuntimeError("this | is\nbroken")


def rows_of(table: ModuleType, left: float = 600) -> list[Any]:
    return [row for rows in table.table((16,), "cpu", 0, time.monotonic() + left) for row in rows]


@pytest.mark.slow
def test_each_cell_has_numbers_or_a_reason(table: ModuleType, tmp_path: Path) -> None:
    rows = rows_of(table)
    assert {(row.cell, row.contender) for row in rows} == {
        (cell, contender) for cell in CELLS for contender in table.CONTENDERS
    }
    assert all(bool(row.numbers) != bool(row.reason) for row in rows)
    times = {(row.cell, row.contender): row for row in rows if row.numbers}
    for cell in ("all pairs", "causal"):
        assert times[cell, table.CUPY].numbers["milliseconds"].median > 0
    table.write(tmp_path, "cpu", rows)
    assert len(json.loads((tmp_path / "on_device.json").read_text())["rows"]) == len(rows)
    page = (tmp_path / "on_device.md").read_text()
    assert all(f"## {cell.capitalize()}\n" in page for cell in CELLS)


def test_one_that_raises_is_reported(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is made, and later in its turn."""
    later = dataclasses.make_dataclass("Later", ["runs"])(0)

    def make(call: Any, arrays: Any, device: Any) -> Any:
        contender = make_ours(call, arrays, device)

        def run() -> Any:
            later.runs += 1
            return contender.run() if later.runs <= 2 else broken()

        return contender._replace(run=run)

    make_ours = table.CONTENDERS[table.CUPY]
    monkeypatch.setattr(table, "CONTENDERS", {table.FLASH: broken, table.TORCH: make, table.CUPY: make_ours})
    monkeypatch.setattr(table, "TIMED_CALLS", ("all pairs",))
    of_times = {row.contender: row for row in rows_of(table) if row.cell == "all pairs"}
    assert of_times[table.FLASH].reason == of_times[table.TORCH].reason == "RuntimeError: this / is broken"
    assert list(of_times[table.CUPY].numbers) == ["milliseconds"]


def test_one_that_is_wrong_gets_no_time(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(call: Any, arrays: Any, device: Any) -> Any:
        """Attention of all pairs, whatever was asked for."""
        return make_right(dataclasses.replace(call, is_causal=False), arrays, device)

    make_right = table.CONTENDERS[table.CUPY]
    monkeypatch.setattr(table, "CONTENDERS", {table.CUPY: make})
    reasons = {row.cell: row.reason for row in rows_of(table)}
    assert reasons["all pairs"] == ""
    assert reasons["causal"].startswith("row 0 is off by")


def test_cells_that_get_no_time_say_so(table: ModuleType) -> None:
    rows = rows_of(table, left=-1)
    assert len(rows) == len(CELLS) * len(table.CONTENDERS)
    assert {row.reason for row in rows} == {"no time was left"}


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "cupy is not installed"),
        (type("OutOfMemoryError", (RuntimeError,), {})("Tried to allocate"), "out of memory"),
        (RuntimeError("BFCArena: Failed to allocate memory for 12 bytes"), "out of memory"),
    ],
)
def test_errors_in_a_few_words(table: ModuleType, error: Exception, shown: str) -> None:
    assert table.why(error) == shown


def test_memory_is_held_against_half_the_length(table: ModuleType) -> None:
    rows = [
        table.memory_row("causal", length, table.CUPY, above)
        for length, above in ((16, 3), (32, 12), (64, None))
    ]
    grown = table.grown(rows)
    assert [row.numbers.get(table.GROWTH) for row in grown] == [None, table.Spread.from_numbers([4.0]), None]
