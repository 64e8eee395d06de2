"""Measure which derivative each library computes of each feature: `python -m quality.derivatives.measure`.

It writes results/derivatives.json, of which the site makes a table; test_results.py holds it fresh.
`--only torch,MLX` measures some libraries again, and `--memory` their memory.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import autograd
import numpy as np
from internals import judge_together
from libraries import Library, generator

from benchmarks import machine
from quality.derivatives import memory
from quality.derivatives.features import Feature, features, poisoned
from quality.derivatives.ways import OF_SDPA_XP, Derivative, Operands, Problem, Quantity, columns
from sdpa_xp import attention_weights
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

RESULTS = Path(__file__).parents[2] / "results" / "derivatives.json"
PACKAGES = ("sdpa_xp", "numpy", "torch", "jax", "mlx", "dask", "array_api_strict")
LONGEST_REASON = 160
Quantities = Mapping[tuple[Quantity | Literal["weights"], int], np.ndarray]
"""The arrays of each quantity; and the gradient of the weights, whose differences second derivatives are."""


class Drawn(NamedTuple):
    """The arrays of a call in their order, a direction for each, and a cotangent of the output."""

    arrays: dict[str, np.ndarray]
    tangents: dict[str, np.ndarray]
    cotangent: np.ndarray


def draw(feature: Feature) -> Drawn:
    rng, call = np.random.default_rng(20170612), feature.call
    arrays, tangents = (autograd.arrays(call, rng, np.float32) for _ in range(2))
    output, _ = autograd.output_and_weights(call, arrays, "float64")
    return Drawn(arrays, tangents, rng.standard_normal(output.shape).astype(np.float32))


def textbook(feature: Feature, drawn: Drawn, dtype: str, dropped: np.ndarray | None) -> Quantities:
    """Return each quantity, computed in `dtype` by torch's autograd from the textbook formula."""
    call, (arrays, tangents, cotangent) = feature.call, drawn
    zeros = {name: np.zeros_like(x) for name, x in arrays.items()}
    still = np.zeros_like(cotangent)

    first, other = (autograd.gradients(call, x, cotangent, dtype, dropped) for x in (arrays, tangents))
    second = autograd.second_order(call, arrays, tangents, (cotangent, still), dtype, dropped)
    along = {name: x[None] for name, x in tangents.items()}
    quantities: dict[Quantity | Literal["weights"], Sequence[np.ndarray]] = {
        "weights": [first["weights"]],
        "gradients": [first[name] for name in arrays],
        "tangent": [autograd.jvp(call, arrays, tangents, dtype, dropped)],
        "second": [second[name] for name in arrays],
        "laplacian": autograd.laplacian(call, arrays, along, zeros, dtype, dropped),
        "mapped": [np.stack([first[name], other[name]]) for name in arrays],
        "hessian": [autograd.hessian(call, arrays, cotangent, dtype, dropped)],
    }
    return {(name, n): x for name, several in quantities.items() for n, x in enumerate(several)}


def kept_weights(feature: Feature, library: Library) -> np.ndarray | None:
    """Return what dropout multiplies the weights by, which does not depend on their values."""
    if not feature.dropout_p:
        return None
    shapes = feature.call.shapes
    with library.guard():
        query, key = (library.put(np.zeros(shapes[name], np.float32)) for name in ("query", "key"))
        weights = attention_weights(query, key, dropout_p=feature.dropout_p, rng=generator(library))
    return library.get(weights).astype(np.float64) * shapes["key"][-2]


def outcome(
    problem: Problem, derivative: Derivative, drawn: Drawn, exact: Quantities, plain: Quantities
) -> dict[str, Any]:
    """Return the error that is closest to its bound and the bound, or why the derivative is refused or NaN."""
    library = problem.library
    arrays = poisoned(drawn.arrays) if problem.feature.is_poisoned else drawn.arrays
    try:
        with library.guard():
            parts = ([library.put(x) for x in part.values()] for part in (arrays, drawn.tangents))
            results = derivative.compute(problem, Operands(*parts, library.put(drawn.cotangent)))
        computed = [library.get(x) for x in results]
    except Exception as error:  # whatever the library raises: the table says it
        return {"refused": reason(error)}
    expected, rounded = (
        [x for (name, _), x in quantities.items() if name == derivative.quantity]
        for quantities in (exact, plain)
    )
    if not all(np.isfinite(x).all() for x in computed):
        return {"nan": "NaN: fill the padding with zeros"}
    size = max(1.0, *(float(np.abs(x).max()) for x in (*expected, exact["weights", 0])))
    runs = list(zip(computed, expected, rounded, strict=True))
    worst = max(judge_together(runs, "float32", size), key=lambda agreement: agreement.share)
    return {"error": float(f"{worst.absolute:.2g}"), "bound": float(f"{worst.bound:.2g}")}


def reason(error: Exception) -> str:
    """Return what must hold by an error of sdpa_xp, or the first sentence of another after its class."""
    if isinstance(error, ArgumentTypeError | ArgumentValueError):
        return str(error.message.rule)
    if ours := re.search(r"\bscaled_dot_product_attention\w*: (.*?); got", str(error)):
        return ours[1]  # an error that torch.compile could not raise
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return f"{type(error).__name__}: {line.partition('. ')[0]}"[:LONGEST_REASON]


def joined(before: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the outcomes that were measured again, in the order of the features."""
    known = {row["derivative"]: row["features"] for row in before}
    for row in new:
        outcomes = known.get(row["derivative"], {}) | row["features"]
        row["features"] = {name: outcomes[name] for name in features() if name in outcomes}
    return new


def rows(name: str, title: str) -> list[dict[str, Any]]:
    """Return a row for each derivative of a column, with the outcome of one feature."""
    (library, derivatives), feature = columns()[name](), features()[title]
    drawn, dropped = draw(feature), kept_weights(feature, library)
    exact = textbook(feature, drawn, "float64", dropped)
    plain = autograd.textbook(exact, lambda moved: textbook(feature, Drawn(*moved(drawn)), "float32", dropped))
    problem, measured = Problem.placed(feature, library), []
    for derivative, way in derivatives.items():
        if feature.instead and derivative in OF_SDPA_XP:
            result = {"refused": feature.instead}
        else:
            result = outcome(problem, way, drawn, exact, plain)
        measured.append({"library": name, "derivative": derivative, "features": {title: result}})
    return measured


def agrees(result: Mapping[str, Any]) -> bool:
    return "error" not in result or result["error"] <= result["bound"]


def written(results: Mapping[str, Any]) -> str:
    """Return JSON with a line for each outcome, so that a change is seen."""
    lines = []
    for row in results["rows"]:
        outcomes = ",\n    ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in row["features"].items())
        head = json.dumps({name: value for name, value in row.items() if name != "features"})
        lines.append(f'  {head[:-1]}, "features": {{\n    {outcomes}}}}}')
    head = json.dumps({name: value for name, value in results.items() if name != "rows"})
    return f'{head[:-1]}, "rows": [\n' + ",\n".join(lines) + "]}\n"


def main() -> int:
    """Write the file; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(columns())}")
    parser.add_argument("--features", default="-", help="the numbers of some features, such as 1-12")
    parser.add_argument("--memory", action="store_true", help="measure the memory alone")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else [*columns()]
    first, _, last = arguments.features.partition("-")
    part = [*features()][int(first or 1) - 1 : int(last or len(features()))]
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "memory": {}}
    kept = {name: [row for row in before["rows"] if row["library"] == name] for name in columns()}
    memories = before["memory"]

    def write() -> list[dict[str, Any]]:
        every = [row for name in columns() for row in kept[name]]
        RESULTS.write_text(written(machine.facts(*PACKAGES) | {"memory": memories, "rows": every}))
        return every

    for name in chosen:
        if arguments.memory:
            memories[name] = memory.measured(name)
        for title in [] if arguments.memory else part:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries
                kept[name] = joined(kept[name], rows(name, title))
            print(name, title, flush=True)
            write()  # compilers take minutes for all features
    every = write()
    wrong = [
        (r["library"], r["derivative"], n) for r in every for n, x in r["features"].items() if not agrees(x)
    ]
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
