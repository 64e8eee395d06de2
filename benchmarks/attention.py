"""Attention on the CPU: sdpa_xp beside torch, JAX, onnxruntime, the textbook formula, and the matmuls alone.

`python benchmarks/attention.py [--quick] [--only NAME,...]` writes attention.json, attention.md and
plots/*.svg into results/; a quick or partial run prints its numbers, and writes only where `--into` says.
There, a partial run replaces the cells that it has measured, and keeps the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bars
import biased
import derivatives
import first_calls
import imports
import machine
import memory
import numpy as np
import plots
import ragged
import report
import summed
import variants
from cells import BY_CALL, BY_TORCH, CELLS, DECODING, HEADS, LENGTHS, ONE_QUERY, TINY, TINY_MASKED, WIDTH, Call
from contenders import BY_TORCH as NUMPY_BY_TORCH
from contenders import (
    CORE,
    LOOP,
    MATMULS,
    NUMPY,
    ON_TORCH,
    OTHERS,
    TEXTBOOK,
    TORCH,
    Ready,
    ours_numpy,
    ready,
    textbook,
)
from measuring import LONG_ROUNDS, ROUNDS, Row, Spread, interleaved, ratios

PACKAGES = ("numpy", "torch", "jax", "onnxruntime", "sdpa_xp")
SECONDS = 1.0
"""Per contender and cell. After the least number of rounds, no round begins once this time is over."""

PAIRS, CALLS = 2048**2, 200
"""Short calls are timed together: as many as have PAIRS pairs of queries and keys, and at most CALLS."""

QUICK = 4096
"""The longest call of a quick run."""


def compared(
    cell: str, call: Call, seconds: float, names: Sequence[str] = CORE, least: int = ROUNDS
) -> list[Row]:
    """Compare the contenders of `names` that support the call with torch, the bare loop and the matmuls."""
    contenders = ready(call, dict.fromkeys([TORCH, *names]))
    warm_up(cell, contenders)
    timings = timed(contenders, call, seconds, least)
    rows = []
    for name, times in timings.items():
        if name not in names:
            continue
        numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
        if name != TORCH and TORCH in timings:
            numbers[bars.TO_TORCH] = Spread.from_numbers(ratios(times, timings[TORCH]))
        if name == NUMPY and LOOP in timings:
            numbers[bars.TO_LOOP] = Spread.from_numbers(ratios(times, timings[LOOP]))
        if MATMULS in timings:
            numbers[bars.LIMIT] = Spread.from_numbers(ratios(timings[MATMULS], times))
        rows.append(Row(cell, call.keys, name, numbers, len(times)))
    return rows


def beside_the_formula(cell: str, call: Call, seconds: float, least: int = ROUNDS) -> list[Row]:
    """Compare sdpa_xp on NumPy with the textbook formula, in turns of these two alone."""
    contenders = ready(call, dict.fromkeys([NUMPY, TEXTBOOK]))
    warm_up(cell, contenders)
    timings = timed(contenders, call, seconds, least)
    rows = []
    for name, times in timings.items():
        numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
        if name == NUMPY:
            numbers[bars.OF_TEXTBOOK] = Spread.from_numbers(ratios(timings[TEXTBOOK], times))
        rows.append(Row(f"{cell}, beside the formula", call.keys, name, numbers, len(times)))
    return rows


def by_call(calls: Mapping[str, Call], seconds: float) -> list[Row]:
    """Time several calls of sdpa_xp on NumPy; the first call attends all pairs."""
    contenders = {name: ours_numpy(call) for name, call in calls.items()}
    for contender in contenders.values():
        contender.run()
    first, *_ = calls
    timings = timed(contenders, calls[first], seconds)
    rows = []
    for name, times in timings.items():
        numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
        if name != first:
            numbers[bars.TO_ALL_PAIRS] = Spread.from_numbers(ratios(times, timings[first]))
        rows.append(Row("by call", calls[name].keys, name, numbers, len(times)))
    return rows


def overhead(seconds: float) -> list[Row]:
    """Time a tiny call against the shortest code for the same result in that library."""
    peers = {TEXTBOOK: TEXTBOOK, NUMPY: TEXTBOOK, TORCH: TORCH, ON_TORCH: TORCH}
    contenders = ready(TINY, peers)
    warm_up("overhead", contenders)
    for name, call in TINY_MASKED.items():
        contenders[f"{NUMPY}, {name}"] = ours_numpy(call)
        masked = textbook(replace(call, window=None))
        assert masked is not None
        contenders[f"{TEXTBOOK}, {name}"] = masked
        peers |= {f"{contender}, {name}": f"{TEXTBOOK}, {name}" for contender in (NUMPY, TEXTBOOK)}
    timings = timed(contenders, TINY, seconds)
    rows = []
    for name, times in timings.items():
        numbers = {"microseconds": Spread.from_numbers(times, 1e6)}
        if name != peers[name]:
            above = (mine - peer for mine, peer in zip(times, timings[peers[name]], strict=True))
            numbers[bars.ABOVE] = Spread.from_numbers(above, 1e6)
        if name in (NUMPY, ON_TORCH):
            numbers[bars.TO_TORCH] = Spread.from_numbers(ratios(times, timings[TORCH]))
        rows.append(Row("overhead", TINY.keys, name, numbers, len(times)))
    return rows


def warm_up(cell: str, contenders: Mapping[str, Ready]) -> None:
    """Run each contender once, so that no compilation is timed, and check that all results agree."""
    outputs = {name: contender.array(contender.run()) for name, contender in contenders.items()}
    for name, output in outputs.items():
        if output is not None and TORCH in outputs:
            rounding = 2.0**-5 if "bfloat16" in cell else 5e-6
            output = np.asarray(output, np.float32)
            np.testing.assert_allclose(output, outputs[TORCH], rtol=0, atol=rounding, err_msg=f"{cell}: {name}")


def timed(
    contenders: Mapping[str, Ready], call: Call, seconds: float, least: int = ROUNDS
) -> dict[str, list[float]]:
    calls = min(CALLS, max(1, PAIRS // (call.queries * call.keys)))
    least = least if call.queries <= QUICK else LONG_ROUNDS
    return interleaved({name: contender.run for name, contender in contenders.items()}, seconds, calls, least)


def sections(longest: int, seconds: float, *, with_others: bool) -> dict[str, list[Callable[[], list[Row]]]]:
    """Return the parts of each section, by the name that --only takes. Each part runs in its own process."""
    lengths = [length for length in LENGTHS if length <= longest]
    cells: dict[str, list[Callable[[], list[Row]]]] = {
        "overhead": [partial(overhead, seconds)],
        "import": [imports.rows],
        "memory": [partial(memory.rows, "memory", length) for length in lengths],
    }
    groups = (CORE, OTHERS) if with_others else (CORE,)
    for cell, call in CELLS.items():
        cells[cell] = [
            partial(compared, cell, call(length), seconds, names) for length in lengths for names in groups
        ]
    if longest == max(LENGTHS):
        cells["memory"].append(partial(memory.rows, "memory, one head", memory.LONG))
    cells["formula"] = [
        partial(beside_the_formula, cell, CELLS[cell](length), seconds)
        for cell in ("all pairs", "causal")
        for length in lengths
        if length <= QUICK
    ]
    cells["one query"] = [
        partial(compared, cell, call, seconds, names) for cell, call in DECODING.items() for names in groups
    ]
    cells["by torch"] = [
        partial(compared, cell, call, seconds, (NUMPY, NUMPY_BY_TORCH, TORCH))
        for cell, calls in BY_TORCH.items()
        for call in calls
        if call.keys <= longest
    ]
    cells["ragged"] = [partial(ragged.packed, seconds), partial(ragged.paged, seconds)]
    cells["biases"] = [partial(biased.rows, length, seconds) for length in lengths if length <= 4096]
    cells["statistics"] = [partial(summed.rows, length, seconds) for length in lengths if length <= 4096]
    reproducible = [
        (cell, CELLS[cell](length))
        for cell in ("all pairs", "causal")
        for length in (1024, 4096)
        if length <= longest
    ]
    cells["reproducible"] = [
        partial(variants.reproducible, f"{cell}, reproducible", call, seconds)
        for cell, call in (*reproducible, ("one query", ONE_QUERY))
    ]
    cells["quantised"] = [partial(variants.quantised, seconds)]
    cells["neighbours"] = [partial(variants.neighbourhood, seconds)]
    cells["derivatives"] = [
        part
        for length in derivatives.LENGTHS
        if length <= longest
        for library in derivatives.LIBRARIES
        for part in (
            partial(derivatives.rows, library, length, seconds),
            partial(derivatives.memory, library, length),
        )
    ]
    jax_lengths, rounds = ((1024,), 2) if longest <= QUICK else ((1024, 4096), 5)
    cells["first calls"] = [
        partial(first_calls.rows, cell, CELLS[cell](length), rounds)
        for cell in ("all pairs", "causal")
        for length in jax_lengths
    ]
    cells["by call"] = [
        partial(by_call, calls, seconds) for length, calls in BY_CALL.items() if length <= longest
    ]
    return cells


def measured(chosen: Mapping[str, Sequence[Callable[[], list[Row]]]]) -> list[Row]:
    """Measure each part in a fresh process; print its rows when it is done."""
    rows: list[Row] = []
    for parts in chosen.values():
        for part in parts:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                new_rows = process.submit(part).result()
            print(*new_rows, sep="\n", flush=True)
            rows += new_rows
    return rows


def write(folder: Path, rows: list[Row], *, is_partial: bool) -> None:
    facts: dict[str, Any] = machine.facts(*PACKAGES) | {"numpy_blas": machine.numpy_kernels()}
    results = folder / "attention.json"
    if is_partial and results.exists():
        recorded = json.loads(results.read_text())
        kept = [Row.read(row) for row in recorded["rows"] if row["cell"] not in {row.cell for row in rows}]
        of_machine = ("cpu", "numpy_blas", "system", "python", *PACKAGES)
        other = [name for name in of_machine if recorded[name] != facts[name]]
        if kept and other:
            raise SystemExit(f"{results} was measured with another {', '.join(other)}: run all of it")
        rows = [*kept, *rows]
        facts["date"] = machine.dates(recorded["date"], facts["date"])
    facts |= {
        "packages": PACKAGES,
        "call": f"(1, {HEADS}, S, {WIDTH}) float32, CPU",
        "thread_pools": machine.thread_pools(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(facts, indent=1) + "\n")
    plot_names = plots.draw(rows, folder / "plots")
    (folder / "attention.md").write_text(report.page(facts, rows, plot_names))


def main() -> None:
    machine.without_settings()
    names = list(sections(0, 0, with_others=False))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"what the bars speak of, S up to {QUICK}",
    )
    parser.add_argument("--only", metavar="NAME,...", help=", ".join(names))
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="where the results are written")
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else names
    if unknown := set(only) - set(names):
        parser.error(f"--only: none of {', '.join(names)}: {', '.join(sorted(unknown))}")

    longest, seconds = (QUICK, SECONDS / 4) if arguments.quick else (max(LENGTHS), SECONDS)
    print(f"NumPy's BLAS: {machine.numpy_kernels()}", flush=True)
    cells = sections(longest, seconds, with_others=not arguments.quick)
    rows = measured({name: cells[name] for name in only})
    print(*report.bars(rows), sep="\n")
    whole = not (arguments.quick or arguments.only)
    folder = arguments.into or (Path(__file__).parents[1] / "results" if whole else None)
    if folder is not None:
        write(folder, rows, is_partial=bool(arguments.only))


if __name__ == "__main__":
    main()
