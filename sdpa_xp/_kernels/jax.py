"""jax.nn.dot_product_attention, compiled once for all operations of a call.

XLA builds all scores at once. jax.nn's own masks are large negative numbers, so the masks of the call are
passed as a bias of -inf. The kernel then differs from the contract in these cases:

- a row has no key: the kernel returns NaN, so the row is computed without a mask and set to 0;
- a masked key or value holds NaN: keys and values that no query attends to are set to 0. If the output is still
  not finite, the portable implementation computes the call again;
- the dtype is a half: the kernel rounds the weights to it, so the call is computed in float32;
- the dtype is float64: the kernel computes the softmax in float32, so the call is refused.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, cast

from .._call import PreparedCall
from .._libraries import dtype_name, truth
from .._libraries.protocols import Array, Shape
from .._run import any_query_attends, has_key
from .._tiles import is_masked
from ..biases.algebra import Added
from . import operands

MOST_SCORES = 2**17
"""From here on the portable implementation is as fast as the kernel, or faster. Measured on two cores."""


def not_default_reason(call: PreparedCall) -> str | None:
    """The kernel is a default for short calls on the CPU outside a jit, as one operation starts fast."""
    grid = call.grid
    if not grid.may_read() or getattr(grid.device, "platform", None) != "cpu":  # a mesh has no platform
        return operands.not_default_reason(call, "JAX", "a jit")
    if math.prod(grid.shape) > MOST_SCORES:
        return "JAX's kernel makes all scores at once, so it is not the default for many scores"
    return None


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why the kernel does not compute the call as documented."""
    for name in call.options.extras:
        return f"JAX's kernel takes no `{name}`"
    if dtype_name(call.grid.dtype) == "float64":
        return "JAX's kernel computes a softmax in float32"
    if call.arrays["value"].shape[-1] != call.sizes.width:
        return "JAX's kernel needs E = Ev"
    if call.is_empty:
        return "an axis is empty"
    # The kernel adds one array. The function of a bias may do more than add.
    scores = call.scores()
    if len(scores.options.biases) > 1 or not all(isinstance(term, Added) for term in scores.options.biases):
        return "JAX's kernel supports only one bias, which must be added to the scores"
    return None


def attend(call: PreparedCall) -> Array | None:
    """Return the output, (..., Hq, L, Ev); None if the kernel does not keep a NaN out."""
    scores = call.scores()
    tile = scores.tile(*call.grid.sides)
    allowed = scores.options.mask.allowed_in(tile)
    if allowed is False:  # no pair attends: the portable implementation returns zeros without a product
        return None
    added = [term.added(tile) for term in scores.options.biases if isinstance(term, Added)]
    output, finite = _compiled()(
        *call.arrays.values(),
        scores.options.scale,
        None if allowed is True else allowed,
        added[0] if added else None,
        batch=call.sizes.batch,
    )
    # Inside a jit no value can be read. Only NaN of keys that no query attends is kept out, as documented.
    return None if truth(finite) is False else cast(Array, output)


@functools.cache
def _compiled() -> Any:
    # JAX compiles once for each set of shapes; two threads that are the first at once may compile twice.
    return sys.modules["jax"].jit(_attention, static_argnames="batch")


def _attention(
    query: Array,
    key: Array,
    value: Array,
    scale: Array | float,
    allowed: Array | None,
    added: Array | None,
    *,
    batch: Shape,
) -> tuple[Array, Array]:
    """Return the output, in float32, and whether all of it is finite."""
    jax = sys.modules["jax"]
    xp = jax.numpy
    # With half inputs the kernel would round the weights to the half.
    query, key, value = (xp.astype(x, xp.float32) for x in (query, key, value))
    query, bias, attends = query * xp.astype(scale, xp.float32), None, None
    if added is not None:
        allowed = ~is_masked(added) if allowed is None else allowed & ~is_masked(added)
    if allowed is not None:
        allowed = allowed[(None,) * (3 - allowed.ndim)]
        # The kernel multiplies masked values by 0, and 0 * NaN is NaN.
        key, value = (xp.where(any_query_attends(xp, allowed, x.shape[-3]), x, 0.0) for x in (key, value))
        attends = has_key(xp, allowed)
        # A row of -inf would be NaN, also in its gradient. It is computed unmasked, and set to 0 below.
        bias = xp.where(attends, xp.where(allowed, 0.0 if added is None else added, -math.inf), 0.0)
        bias = bias if len(batch) < 2 else operands.merge_batch(xp, bias, batch)
    rows = (xp.swapaxes(operands.merge_batch(xp, x, batch), -2, -3) for x in (query, key, value))
    output = xp.swapaxes(jax.nn.dot_product_attention(*rows, bias=bias, scale=1.0), -2, -3)
    output = xp.reshape(output, (*batch, *output.shape[1:]))
    output = output if attends is None else xp.where(attends, output, 0.0)
    return output, xp.isfinite(xp.sum(output))
