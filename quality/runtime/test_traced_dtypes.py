"""The functions of a traced namespace in every release: each lacks some kernels, and has faults of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from traced_calls import DTYPES, assert_all_same, expected_of, feeds_of, model_of, numbers, of_two_arrays
from traced_table import BINARY, JOINED, OPERATORS, UNARY

from quality.runtime.outcomes import runtime_of
from quality.runtime.releases import NEWEST, REDUCED, Graph, run_graphs

MIXED = [
    ("int8", "uint16"),
    ("uint32", "int64"),
    ("int16", "int64"),
    ("float32", "float64"),
    ("uint8", "uint64"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("release", "opset"), [*((release, None) for release in REDUCED), (NEWEST, 25)])
def test_a_release_computes_every_function_of_every_dtype(
    release: str, opset: int | None, tmp_path: Path
) -> None:
    graphs: dict[str, Graph] = {}
    expectations = {}
    calls = {f"{dtype} {seed}": [(UNARY, (numbers(dtype, seed),))] for dtype in DTYPES for seed in (0, 1)}
    calls |= {
        f"{one} {other}": of_two_arrays(BINARY | OPERATORS | JOINED, one, other)
        for one, other in [*zip(DTYPES, DTYPES, strict=True), *MIXED]
    }
    for name, several in calls.items():
        for number, (rows, arguments) in enumerate(several):
            expected = expected_of(rows, *arguments)
            if expected:
                computed = {row: rows[row] for row in expected}
                model, counts = model_of(computed, *arguments, runtime=runtime_of(release), opset=opset)
                graphs[f"{name} {number}"] = model, [feeds_of(*arguments)]
                expectations[f"{name} {number}"] = expected, counts
    for name, runs in run_graphs(release, graphs, tmp_path).items():
        assert not isinstance(runs, str), f"{name}: {runs}"
        expected, counts = expectations[name]
        assert_all_same(expected, counts, runs[0])
