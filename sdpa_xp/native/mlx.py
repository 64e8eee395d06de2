"""mlx.core.fast.scaled_dot_product_attention.

On the CPU MLX composes it of two products and a softmax of all scores, so that many are refused. The kernels
for GPUs can be had by name, and are no default: no test has run on one. It differs from the contract where

- a row has no key: a boolean mask gives the mean of the values, -inf gives NaN; such a row is set to 0;
- the scores that are not masked are all -inf: a boolean mask and "causal" put the smallest finite number where
  they mask, which is larger: what masks here is -inf;
- the lengths differ: "causal" lets the last query attend the last key; it is a mask like the others here;
- a masked key or value holds NaN, which 0 * NaN lets through: that shows in the output, and the portable
  implementation computes it again; inside mx.compile and mx.vmap what no query attends is blanked;
- all scores of a row are -inf: NaN, which shows in the output likewise;
- the dtype is a half: the scores are rounded to it, so that float32 is what is computed in;
- the dtype is float64: exp is that of float32.
"""

from __future__ import annotations

import math
import sys

from sdpa_xp._libraries import dtype_name
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.arguments import Call
from sdpa_xp.native import operands
from sdpa_xp.scores import attended


def is_by_name(call: Call) -> str | None:
    """Not on the CPU where nothing masks: no tile could be skipped, and no masked NaN has to be kept out."""
    if _is_masked(call):
        return "MLX's kernel skips nothing that is masked: it is for calls that ask for it"
    if call.pairs.traced or not _on_cpu(call):
        where = "inside mx.compile and mx.vmap" if call.pairs.traced else f"on {call.pairs.device}"
        return f"MLX's kernel is for calls that ask for it {where}"
    return None


def _is_masked(call: Call) -> bool:
    return bool(call.masks or call.biases)


def _on_cpu(call: Call) -> bool:
    return bool(call.pairs.device.type == sys.modules["mlx.core"].cpu)


def refusal(call: Call) -> str | None:
    """Why the kernel does not compute the call to the contract."""
    reason = operands.refusal(call, "MLX")
    if reason is not None:
        return reason
    if call.sinks is not None and call.sinks.shape != (call.sizes.query_heads,):
        return "MLX's kernel takes `sinks` of shape (Hq,) alone"
    if dtype_name(call.pairs.dtype) == "float64":
        return "MLX's kernel computes float64 to float32 accuracy"
    if operands.is_empty(call):
        return "an axis is empty"
    if math.prod(call.pairs.scores) > operands.MANY_SCORES and (_on_cpu(call) or _is_masked(call)):
        return "MLX's kernel makes all scores, or a mask of them, at once"
    return None


def attend(call: Call) -> Array | None:
    """The output, (..., Hq, L, Ev); None if it holds a NaN or inf, which may be the kernel's own."""
    if _is_masked(call) or call.scale is not None:
        call.bind([call.whole])  # refuses arrays that do not fit
    xp, dtype, sizes = call.pairs.xp, call.pairs.dtype, call.sizes
    query, key, value = (xp.astype(x, dtype, copy=False) for x in call.arrays.values())
    scale = call.scale
    if scale is None:
        scale = 1.0 / math.sqrt(sizes.width)
    elif not isinstance(scale, float):
        query, scale = query * xp.astype(scale, dtype, copy=False), 1.0
    allowed = _allowed(call)
    if allowed is not None and call.pairs.traced:
        seen = attended(xp, allowed, sizes.heads)
        key, value = (xp.where(seen, x, 0.0) for x in (key, value))
    output: Array = sys.modules["mlx.core"].fast.scaled_dot_product_attention(
        *(operands.with_4_axes(call, x) for x in (query, key, value)),
        scale=scale,
        mask=None if allowed is None else _mask(call, allowed),
        sinks=None if call.sinks is None else xp.astype(call.sinks, dtype, copy=False),
    )
    output = operands.of_the_batch(call, output)
    if allowed is not None:
        output = xp.where(xp.any(allowed, axis=-1, keepdims=True), output, 0.0)
    return output if call.pairs.traced or bool(xp.isfinite(xp.sum(output))) else None


def _allowed(call: Call) -> Array | None:
    """Which pairs may attend; None where all may."""
    given = operands.allowed(call)
    return operands.causal(call) if given is None and operands.is_causal(call) else given


def _mask(call: Call, allowed: Array) -> Array:
    """What the kernel adds, at most (B, Hq, L, S); 0 in a row without a key, for its gradient to be 0."""
    xp, bias = call.pairs.xp, operands.bias(call)
    some = xp.any(allowed, axis=-1, keepdims=True)
    mask = xp.where(allowed, 0.0 if bias is None else bias, xp.where(some, -math.inf, 0.0))
    return mask if mask.ndim < 4 or len(call.sizes.batch) == 1 else operands.of_one_batch(call, mask)
