"""How much memory a derivative needs: of one plain call, in a fresh process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
from autograd import INPUTS, Call
from internals import engine

from quality.derivatives.features import Feature
from quality.derivatives.ways import Operands, Problem, columns

SHORT, LENGTHS = 8, (3072, 6144)
LEFT_OUT = ("Hessian",)
"""Its result has as many elements as the square of the number of queries."""


def is_linear(megabytes: Sequence[float]) -> bool:
    """Return whether the memory of `LENGTHS` grows by less than one array of L x S scores in float32 does.

    The rest is what a compiler needs, whatever the lengths are.
    """
    short, long = megabytes
    return long - short < 4e-6 * (LENGTHS[1] ** 2 - LENGTHS[0] ** 2)


def measured(name: str) -> dict[str, list[float]]:
    """Return the megabytes above the arrays of a call by derivative, for each length; none if refused."""
    results: dict[str, list[float]] = {}
    for derivative in columns()[name]().derivatives:
        if derivative not in LEFT_OUT:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                results[derivative] = process.submit(_megabytes, name, derivative).result()
            print(name, derivative, results[derivative], flush=True)
    return results


def _megabytes(name: str, derivative: str) -> list[float]:
    try:
        _run(name, derivative, SHORT)  # what is loaded once is not counted
        before = engine.kilobytes("VmRSS")  # a library may keep what the first length needs
        return [round((_run(name, derivative, length) - 1024 * before) / 1e6, 1) for length in LENGTHS]
    except Exception:  # whatever the library raises: the features say it
        return []


def _run(name: str, derivative: str, length: int) -> int:
    """Return the largest number of bytes that the process had while it computed."""
    library, derivatives = columns()[name]()
    if name.lower().startswith("jax"):
        import jax

        jax.config.update("jax_disable_most_optimizations", False)  # which the tests do without
    shape = (1, length, 8)
    call = Call(dict.fromkeys(INPUTS, shape))
    problem = Problem.placed(Feature(call), library)
    rng = np.random.default_rng(0)
    arrays, tangents = (
        [library.put(rng.standard_normal(shape, np.float32)) for _ in range(3)] for _ in range(2)
    )

    def run() -> None:
        results = derivatives[derivative].compute(problem, Operands(arrays, tangents, tangents[0]))
        for x in results:
            library.get(x)

    with library.guard():
        engine.peak_above(run)  # resets the peak before it runs
    return 1024 * engine.kilobytes("VmHWM")
