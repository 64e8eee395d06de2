"""Attention on a GPU in float16: sdpa_xp on CuPy and torch beside torch's own kernels and onnxruntime.

`python benchmarks/on_device.py --into FOLDER [--quick] [--device cpu]` writes on_device.json and
on_device.md there, again after each cell. A cell without numbers says why. With `--device cpu` the
table can be tried without a GPU: NumPy then takes the place of CuPy.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import array_api_compat.numpy as numpy_namespace
import machine
import report
from bars import MEMORY, Bar, row_of
from cells import CELLS, HEADS, WIDTH, Call
from device_contenders import (
    CONTENDERS,
    CUPY,
    DTYPE,
    FLASH,
    MATH,
    TORCH,
    TORCH_NATIVE,
    Arrays,
    Contender,
    Device,
)
from measuring import Row, Spread, interleaved, internals, ratios
from numpy.typing import NDArray

PACKAGES = ("numpy", "torch", "cupy-cuda13x", "onnxruntime-gpu", "onnxruntime", "array-api-compat")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
QUICK = LENGTHS[:2]
SECONDS = 1.0
"""Per contender and cell. After the fifth round, no round begins once this time is over."""

TURN, CALLS = 0.02, 20
"""Short calls are timed together: as many as take TURN seconds, and at most CALLS. A turn waits once."""

TIMED_CALLS = ("all pairs", "causal")
TO_FLASH, TO_MATH = "over torch's flash", "over torch math's best round"
GROWTH = "over the memory at half the length"

BARS = (
    *(Bar(cell, length, TORCH_NATIVE, TO_FLASH, "at most", 1.1) for cell in TIMED_CALLS for length in LENGTHS),
    *(
        Bar(cell, length, name, TO_MATH, "at most", 3.0)
        for cell in TIMED_CALLS
        for name in (CUPY, TORCH)
        for length in LENGTHS
    ),
    *(
        Bar(f"memory, {cell}", length, name, GROWTH, "at most", 2.0)
        for cell in TIMED_CALLS
        for name in (CUPY, TORCH)
        for length in LENGTHS[1:]
    ),
)

HOW = """All contenders of a cell ran in one process, in turns, in another order each round. A number is the
median of the rounds, with the quartiles in brackets, by the clock of the host from the first call of a turn to
the end of the last on the device. Memory is that of one call after the first: what torch's allocator had
handed out at most, or what CuPy's pool took from the device."""


class Reference(NamedTuple):
    """A row of the output, (1, heads, 1, width), in float64 and by the textbook formula in float16."""

    row: int
    exact: NDArray[Any]
    rounded: NDArray[Any]


class Trial(NamedTuple):
    """A contender whose first calls gave the right output, with what they showed."""

    contender: Contender
    above: int | None
    """Peak memory in bytes, without inputs and output."""
    calls: int
    """The number of calls in a turn."""


class Turn:
    """The calls of a contender in one round. After its first error it makes no more calls."""

    def __init__(self, trial: Trial) -> None:
        self.run, self.reason = partial(trial.contender.repeat, trial.calls), ""

    def __call__(self) -> None:
        if self.reason:
            return
        try:
            self.run()
        except Exception as error:  # the table shows it, and the others go on
            self.reason = why(error)


def table(lengths: Sequence[int], device: Device, seconds: float, end: float) -> Iterator[list[Row]]:
    """Yield the rows of each cell; no cell begins after `end`, by the monotonic clock."""
    for length in lengths:
        for cell in TIMED_CALLS:
            if time.monotonic() > end:
                yield [row for name in CONTENDERS for row in without(cell, length, name, "no time was left")]
                continue
            try:
                yield compared(cell, CELLS[cell](length), device, seconds)
            except Exception as error:  # the table shows it, and the others go on
                yield [row for name in CONTENDERS for row in without(cell, length, name, why(error))]


def compared(cell: str, call: Call, device: Device, seconds: float) -> list[Row]:
    """Return a row of times and a row of memory for each contender."""
    arrays = [x.astype(DTYPE) for x in call.arrays()]
    references = expected(call, arrays)
    trials = {name: try_out(name, call, arrays, references, device) for name in CONTENDERS}
    ready = {name: trial for name, trial in trials.items() if isinstance(trial, Trial)}
    turns = {name: Turn(trial) for name, trial in ready.items()}
    for turn in turns.values():
        turn()  # so that no round takes memory from the device
    timings = {
        name: [duration / ready[name].calls for duration in durations]
        for name, durations in interleaved(turns, seconds).items()
        if not turns[name].reason
    }
    rows: list[Row] = []
    for name, trial in trials.items():
        if isinstance(trial, str):
            rows += without(cell, call.keys, name, trial)
        elif name not in timings:
            rows += without(cell, call.keys, name, turns[name].reason)
        else:
            rows += [
                time_row(cell, call.keys, name, timings),
                memory_row(cell, call.keys, name, trial.above),
            ]
    return rows


def try_out(
    name: str, call: Call, arrays: Arrays, references: Sequence[Reference], device: Device
) -> Trial | str:
    """Run a contender; return its trial, or the reason why it does not compute the call."""
    try:
        contender = CONTENDERS[name](call, arrays, device)
        output = contender.library.get(contender.repeat(1))
        if off := disagreement(output, arrays[0], references):
            return off
        above = contender.library.above(partial(contender.repeat, 1))
        above = None if above is None else max(0, above - output.nbytes)
        start = time.perf_counter()
        contender.repeat(1)
        seconds = time.perf_counter() - start
        return Trial(contender, above, min(CALLS, max(1, round(TURN / seconds))))
    except Exception as error:  # out of memory, say: the table shows it
        return why(error)
    finally:
        release()


def expected(call: Call, arrays: Arrays) -> list[Reference]:
    """Return a few rows of the output, among them the rows with the fewest keys."""
    query, key, value = arrays
    references = []
    for row in sorted({0, 1, call.queries // 2, call.queries - 1}):
        reach = row + 1 if call.is_causal else call.keys
        inputs = query[..., row : row + 1, :], key[..., :reach, :], value[..., :reach, :]
        exact, _, _ = internals.reference.attention(*inputs)
        references.append(Reference(row, exact, internals.textbook(numpy_namespace, *inputs)))
    return references


def disagreement(output: NDArray[Any], query: NDArray[Any], references: Sequence[Reference]) -> str:
    """Describe how the output differs from the reference; return nothing if they agree."""
    if output.shape != query.shape or output.dtype != query.dtype:
        return f"gives {output.shape} of {output.dtype}"
    for row, exact, rounded in references:
        agreement = internals.judge(output[..., row : row + 1, :], exact, rounded, DTYPE)
        if not agreement.agrees:
            return f"row {row} is off by {agreement.absolute:.1e}, more than {agreement.bound:.1e}"
    return ""


def time_row(cell: str, length: int, name: str, timings: dict[str, list[float]]) -> Row:
    times = timings[name]
    numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
    if name != FLASH and FLASH in timings:
        numbers[TO_FLASH] = Spread.from_numbers(ratios(times, timings[FLASH]))
    if name != MATH and MATH in timings:
        numbers[TO_MATH] = Spread.from_numbers(times, 1 / min(timings[MATH]))
    return Row(cell, length, name, numbers, len(times))


def memory_row(cell: str, length: int, name: str, above: int | None) -> Row:
    if above is None:
        return Row(f"memory, {cell}", length, name, reason="the library does not tell")
    return Row(f"memory, {cell}", length, name, {MEMORY: Spread.from_numbers([above / 1e6])})


def without(cell: str, length: int, name: str, reason: str) -> list[Row]:
    """Return the rows of a contender that has no numbers."""
    return [Row(title, length, name, rounds=0, reason=reason) for title in (cell, f"memory, {cell}")]


def grown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; add to memory rows the ratio to the memory at half the length."""
    memory = {
        (row.cell, row.contender, row.length): row.numbers[MEMORY].median
        for row in rows
        if MEMORY in row.numbers
    }
    complete = []
    for row in rows:
        half = memory.get((row.cell, row.contender, row.length // 2))
        if half and MEMORY in row.numbers:
            ratio = Spread.from_numbers([row.numbers[MEMORY].median / half])
            row = dataclasses.replace(row, numbers=row.numbers | {GROWTH: ratio})
        complete.append(row)
    return complete


def why(error: Exception) -> str:
    """Describe an error in a few words that fit into a table."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    kind, text = type(error).__name__, " ".join(str(error).split())
    if "OutOfMemory" in kind or any(
        phrase in text.lower() for phrase in ("out of memory", "failed to allocate")
    ):
        return "out of memory"
    return f"{kind}: {text}"[:200].replace("|", "/")


def release() -> None:
    """Free unused device memory, so that the next library can use it."""
    gc.collect()
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    with suppress(Exception):  # after an error of the device, each call raises another
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if cupy is not None:
            cupy.get_default_memory_pool().free_all_blocks()


def write(folder: Path, device: Device, rows: Sequence[Row]) -> None:
    rows = grown(rows)
    facts = machine.facts(*PACKAGES) | {
        "gpu": machine.gpu(),
        "device": device,
        "call": f"(1, {HEADS}, S, {WIDTH}) {DTYPE}",
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (folder / "on_device.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "on_device.md").write_text(page(facts, rows))


def page(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the results in Markdown."""
    on_gpu = facts["device"] == "cuda"
    where = facts["gpu"] if on_gpu else f"{facts['cores']} cores of {facts['cpu']}"
    lines = [
        "# Attention on a GPU" if on_gpu else "# A trial of the GPU's table on the CPU, NumPy in CuPy's place",
        "",
        f"{facts['call']}, {where}, {facts['system']}, {facts['date']}.",
        f"Python {facts['python']}, {', '.join(f'{name} {facts[name]}' for name in PACKAGES)}.",
        *("", HOW, "", "## Bars", ""),
        *report.bars(rows, [bar for bar in BARS if row_of(bar, rows) is not None]),
    ]
    for cell in TIMED_CALLS:
        lines += _section(cell, f"Milliseconds, and {TO_FLASH}.", rows, ("milliseconds", TO_FLASH))
        lines += _section(f"memory, {cell}", f"{MEMORY}, and {GROWTH}.", rows, (MEMORY, GROWTH))
    return "\n".join([*lines, ""])


def _section(cell: str, what: str, rows: Sequence[Row], quantities: Sequence[str]) -> list[str]:
    of_cell = [row for row in rows if row.cell == cell]
    return (
        ["", f"## {cell.capitalize()}", "", what, "", *report.by_length(of_cell, quantities)] if of_cell else []
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument("--quick", action="store_true", help=f"S up to {QUICK[-1]}, a fifth of the time")
    parser.add_argument("--device", choices=get_args(Device), default="cuda")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no cell begins")
    arguments = parser.parse_args()

    lengths, seconds = (QUICK, SECONDS / 5) if arguments.quick else (LENGTHS, SECONDS)
    arguments.into.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for new_rows in table(lengths, arguments.device, seconds, time.monotonic() + arguments.limit):
        print(*new_rows, sep="\n", flush=True)
        rows += new_rows
        write(arguments.into, arguments.device, rows)


if __name__ == "__main__":
    main()
