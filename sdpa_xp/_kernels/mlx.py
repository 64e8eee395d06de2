"""mlx.core.fast.scaled_dot_product_attention.

On the CPU MLX computes two products and a softmax of all scores, so calls with many scores are refused. The
kernels for GPUs are used only if the call asks for them: no test has run on a GPU. The kernel differs from the
contract in these cases:

- a row has no key: with a boolean mask it is the mean of the values, with -inf it is NaN; it is set to 0;
- all unmasked scores are -inf: a boolean mask and "causal" replace masked scores by the most negative finite
  number, which is larger than -inf; so masks are passed as -inf;
- the lengths differ: "causal" aligns the last query with the last key, so `is_causal` is passed as a mask;
- a masked key or value holds NaN, and 0 * NaN is NaN: if the output shows it, the portable implementation
  computes the call again; inside mx.compile and mx.vmap keys and values that no query attends to are set to 0;
- all scores of a row are -inf: the output is NaN, and the call is computed again in the same way;
- the dtype is a half: the kernel rounds the scores to it, so the call is computed in float32;
- the dtype is float64: the kernel computes exp in float32.
"""

from __future__ import annotations

import math
import sys

from .._call import PreparedCall
from .._libraries import dtype_name
from .._libraries.protocols import Array
from .._run import any_query_attends, has_key, is_finite
from . import operands


def not_default_reason(call: PreparedCall) -> str | None:
    """The kernel is a default on the CPU without masks: then no tile can be skipped, and no NaN is masked."""
    if _is_masked(call):
        return "MLX's kernel does not skip masked keys, so it is not the default with a mask or a bias"
    if not call.grid.may_read():
        return operands.not_default_reason(call, "MLX", "mx.compile and mx.vmap")
    return None


def _is_masked(call: PreparedCall) -> bool:
    return bool(call.options.masks or call.options.biases)


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why the kernel does not compute the call as documented."""
    reason = operands.unsupported_reason(call, "MLX", takes={"sinks"})
    if reason is not None:
        return reason
    # The kernel takes one sink for each head, the same for all batch entries.
    if call.options.sinks is not None and call.options.sinks.shape != (call.sizes.query_heads,):
        return "MLX's kernel takes `sinks` of shape (Hq,) alone"
    if dtype_name(call.grid.dtype) == "float64":
        return "MLX's kernel computes float64 to float32 accuracy"
    if call.is_empty:
        return "an axis is empty"
    is_on_cpu = call.grid.device.type == sys.modules["mlx.core"].cpu
    if math.prod(call.grid.shape) > operands.MANY_SCORES and (is_on_cpu or _is_masked(call)):
        return "MLX's kernel makes all scores, or a mask of them, at once"
    return None


def attend(call: PreparedCall) -> Array | None:
    """Return the output, (..., Hq, L, Ev); None if it has a NaN or inf, which may be a fault of the kernel."""
    xp, dtype, sizes = call.grid.xp, call.grid.dtype, call.sizes
    query, key, value = (xp.astype(x, dtype, copy=False) for x in call.arrays.values())
    scale = call.options.scale
    if scale is None:
        scale = 1.0 / math.sqrt(sizes.width)
    elif not isinstance(scale, float):  # the kernel takes one number
        query, scale = query * xp.astype(scale, dtype, copy=False), 1.0
    allowed = operands.allowed(call)
    if allowed is None and operands.is_causal(call):
        allowed = operands.causal(call)
    mask = None if allowed is None else _mask(call, allowed)
    sinks = None if call.options.sinks is None else xp.astype(call.options.sinks, dtype, copy=False)

    def computed(key: Array, value: Array) -> Array:
        output: Array = sys.modules["mlx.core"].fast.scaled_dot_product_attention(
            *(operands.with_4_axes(call, x) for x in (query, key, value)), scale=scale, mask=mask, sinks=sinks
        )
        output = operands.split_batch(call, output)
        return output if allowed is None else xp.where(has_key(xp, allowed), output, 0.0)

    output = computed(key, value)
    is_right = is_finite(xp, [output])
    if is_right is None and allowed is not None:  # in a trace; MLX computes no output that is not used
        attended = any_query_attends(xp, allowed, sizes.heads)
        return computed(*(xp.where(attended, x, 0.0) for x in (key, value)))
    return None if is_right is False else output


def _mask(call: PreparedCall, allowed: Array) -> Array:
    """Return what the kernel adds to the scores. A row without a key gets 0, so that its gradient is 0."""
    xp, bias = call.grid.xp, operands.bias(call)
    mask = xp.where(allowed, 0.0 if bias is None else bias, xp.where(has_key(xp, allowed), -math.inf, 0.0))
    has_one_batch_axis = mask.ndim < 4 or len(call.sizes.batch) == 1
    return mask if has_one_batch_axis else operands.merge_batch(xp, mask, call.sizes.batch)
