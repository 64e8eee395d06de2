"""Attention inside torch's automatic differentiation, which gets its derivatives from `operation.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .._call import PreparedCall
from .._kernels import Kernel
from .._libraries import astype_if_needed
from .._libraries.base import is_compiling
from .._libraries.protocols import Array
from .._libraries.torch.function import DifferentiableAgain, apply
from .._programs import ResultName
from .._run import finite_shift
from .._tiles import is_masked
from ..biases.algebra import ArrayBias, as_bias
from .operation import AttentionOperation, recorded


def attend(call: PreparedCall, kernel: Kernel | None, *names: ResultName) -> dict[str, Array]:
    """Return what is named of a prepared call: the output (..., Hq, L, Ev), the log-sum-exp (..., Hq, L).

    torch records the derivatives. A vendor's `kernel` has first derivatives of its own.
    """
    if "lse" in names:
        return _attend_with_lse(call)
    output = None if kernel is None else kernel.attend(call)
    if output is None:
        return {"output": _run(call)[0]}
    # A device is not waited for to look at the cotangent.
    may_mask = bool(call.options.masks or call.options.biases) and call.grid.may_read()
    arrays = [*call.arrays.values(), *call.options.arrays()]
    operation = AttentionOperation(recorded(call))
    return {"output": DifferentiableAgain.apply(operation, may_mask, output, *arrays)}


def _attend_with_lse(call: PreparedCall) -> dict[str, Array]:
    """Return the output and the log-sum-exp.

    The log-sum-exp of an operation is a constant, c. Its derivatives are those of c + log(sum exp(s - c)), for
    any constant c. With a sink of 0 and values of 1, attention over the scores s - c is K / (K + 1), where K is
    this sum, so that no other derivatives are needed than those of attention.
    """
    xp, grid, sinks = call.grid.xp, call.grid, call.options.sinks
    output, parts = _run(call)
    m = parts[..., 0:1]
    constant = finite_shift(xp, m) + parts[..., 1:2]
    of_constant = ArrayBias(-constant)
    other = call.call_options.bias
    bias = of_constant if other is None else as_bias(grid.function, other) + of_constant
    value = call.arrays["value"]
    ones = xp.full((*value.shape[:-1], 1), 1.0, dtype=value.dtype, device=grid.device)
    zeros = xp.zeros((grid.heads,), dtype=grid.dtype, device=grid.device)
    changes: Any = {"sinks": zeros, "dropout_p": 0.0, "rng": None}
    of_sum = call.changed(
        grid=replace(grid, is_2d=False),
        arrays={**call.arrays, "value": ones},
        options=call.options._replace(biases=(*call.options.biases, of_constant), **changes),
        call_options=call.call_options._replace(bias=bias, **changes),
    )
    share = _run(of_sum)[0]
    total = share / (-share + 1.0)
    if sinks is not None:
        sink = astype_if_needed(xp, xp.expand_dims(xp.expand_dims(sinks, axis=-1), axis=-1), grid.dtype)
        total = total + xp.exp(sink - constant)
    # The sum is about 1, or 0 in a row without keys.
    lse = xp.where(is_masked(m), m, constant + xp.log(xp.where(is_masked(m), 1.0, total)))
    return call.connected({"output": output, "lse": lse})


def _run(call: PreparedCall) -> tuple[Array, ...]:
    """Return the output and the log-sum-exp as two numbers, as `AttentionOperation` does."""
    if is_compiling():
        from . import compiled  # few programs need it

        return compiled.run(call)
    arrays = [*call.arrays.values(), *call.options.arrays()]
    if (dropout := call.draw_dropout()) is not None:
        arrays.append(dropout.seed)
    return apply(AttentionOperation(recorded(call)), arrays)
