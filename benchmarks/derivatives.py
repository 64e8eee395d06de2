"""Derivatives of a call: beside the call itself, and beside the derivatives of the library's own attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeAlias

from bars import OVER_CALL, OVER_OWN, PEAK
from cells import Call
from measuring import Row, Spread, interleaved, internals, ratios

from sdpa_xp import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_jvp,
    scaled_dot_product_attention_laplacian,
    scaled_dot_product_attention_vjp,
)

LENGTHS = (1024, 4096)
NAMES = ("query", "key", "value")
CALL, GRADIENTS, TANGENT = "the call", "gradients", "tangent"
PRODUCT, TWICE, LAPLACIAN = "Hessian-vector product", "double backward", "Laplacian, two directions"
OWN = ", its own attention"
Runs: TypeAlias = Mapping[str, Callable[[], Any]]


def arrays_of(length: int) -> tuple[Any, ...]:
    """Return query, key and value of one head: each library can hold the scores of its second derivatives."""
    return Call(length, length, heads=1, key_heads=1).arrays()


def numpy(length: int) -> Runs:
    query, key, value = arrays = arrays_of(length)
    moved = dict(zip(NAMES, arrays, strict=True))
    both = {name: x[None].repeat(2, 0) for name, x in moved.items()}

    def product() -> Any:
        _, pullback = scaled_dot_product_attention_vjp(*arrays)
        return pullback.jvp(value, moved)

    return {
        CALL: partial(scaled_dot_product_attention, *arrays),
        GRADIENTS: lambda: scaled_dot_product_attention_vjp(*arrays)[1](value),
        TANGENT: partial(scaled_dot_product_attention_jvp, *arrays, moved),
        PRODUCT: product,
        LAPLACIAN: partial(scaled_dot_product_attention_laplacian, query, key, value, both),
    }


def torch(length: int) -> Runs:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = tuple(torch.from_numpy(x).requires_grad_() for x in arrays_of(length))
    arrays = tuple(x.detach() for x in leaves)
    cotangent = arrays[2]

    def by_formula(*inputs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's that has these derivatives
            return torch.nn.functional.scaled_dot_product_attention(*inputs)

    def gradients(attend: Callable[..., Any], **more: Any) -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, cotangent, **more)

    def pulled(attend: Callable[..., Any], *inputs: Any) -> Any:
        return torch.func.vjp(attend, *inputs)[1](cotangent)

    def runs(attend: Callable[..., Any], again: Callable[..., Any], suffix: str) -> Runs:
        derivatives: Runs = {
            CALL: lambda: attend(*arrays),
            GRADIENTS: partial(gradients, attend),
            TANGENT: lambda: torch.func.jvp(again, arrays, arrays),
            PRODUCT: lambda: torch.func.jvp(partial(pulled, again), arrays, arrays),
            TWICE: lambda: torch.autograd.grad(gradients(again, create_graph=True), leaves, arrays),
        }
        return {name + suffix: run for name, run in derivatives.items()}

    by_torch, attend = torch.nn.functional.scaled_dot_product_attention, scaled_dot_product_attention
    return {**runs(attend, attend, ""), **runs(by_torch, by_formula, OWN)}


def programs(length: int) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    """Return the functions of JAX, inside a jit, and their arrays."""
    import jax

    arrays = tuple(map(jax.numpy.asarray, arrays_of(length)))

    def by_jax(*inputs: Any) -> Any:
        return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in inputs)).swapaxes(1, 2)

    def compiled(attend: Callable[..., Any], suffix: str) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
        def gradients(*inputs: Any) -> Any:
            return jax.vjp(attend, *inputs)[1](arrays[2])

        def twice(*inputs: Any) -> Any:
            return jax.vjp(gradients, *inputs)[1](arrays)

        derivatives = {
            CALL: attend,
            GRADIENTS: gradients,
            TANGENT: lambda *inputs: jax.jvp(attend, inputs, arrays),
            PRODUCT: lambda *inputs: jax.jvp(gradients, inputs, arrays),
            TWICE: twice,
        }
        return {name + suffix: (jax.jit(function), arrays) for name, function in derivatives.items()}

    return {**compiled(scaled_dot_product_attention, ""), **compiled(by_jax, OWN)}


def jax(length: int) -> Runs:
    import jax

    def ready(function: Any, arrays: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(function(*arrays))

    return {name: ready(*program) for name, program in programs(length).items()}


LIBRARIES: Mapping[str, Callable[[int], Runs]] = {"NumPy": numpy, "torch": torch, "JAX": jax}


def rows(library: str, length: int, seconds: float) -> list[Row]:
    """Time the derivatives of one library; those of its own attention take turns with ours."""
    runs = LIBRARIES[library](length)
    for run in runs.values():
        run()
    timings = interleaved(runs, seconds)
    measured = []
    for name, times in timings.items():
        numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
        if not name.startswith(CALL):
            whole = CALL + OWN if name.endswith(OWN) else CALL
            numbers[OVER_CALL] = Spread.from_numbers(ratios(times, timings[whole]))
        if name + OWN in timings:
            numbers[OVER_OWN] = Spread.from_numbers(ratios(times, timings[name + OWN]))
        measured.append(Row(f"derivatives, {library}", length, name, numbers, len(times)))
    return measured


def memory(library: str, length: int) -> list[Row]:
    """Measure the memory above the inputs: of a fresh process, or of the program that JAX compiles."""
    if library == "JAX":
        peaks = {name: _compiled(*program) for name, program in programs(length).items()}
    else:
        peaks = {}
        for name in LIBRARIES[library](8):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                peaks[name] = process.submit(_peak, library, length, name).result()
    cell = f"memory of derivatives, {library}"
    return [
        Row(cell, length, name, {PEAK: Spread.from_numbers([peak / 1e6])})
        for name, peak in peaks.items()
        if peak is not None
    ]


def _compiled(function: Any, arrays: tuple[Any, ...]) -> int:
    return int(function.lower(*arrays).compile().memory_analysis().temp_size_in_bytes)


def _peak(library: str, length: int, name: str) -> int | None:
    LIBRARIES[library](8)[name]()  # loads what is loaded once, which is not counted
    _, above = internals.peak_above(LIBRARIES[library](length)[name])
    return above
