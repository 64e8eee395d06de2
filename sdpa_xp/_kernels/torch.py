"""torch.nn.functional.scaled_dot_product_attention, which torch.onnx.export converts to ai.onnx Attention.

On the CPU the kernel meets the contract except in four cases:

- A masked NaN reaches the output, because 0 * NaN is NaN. If the output has a NaN, the portable implementation
  computes the call again.
- A row whose scores are all NaN becomes 0 if they do not fill a vector register, because the kernel takes it
  for a row without keys. If the output has a 0, the inputs are searched for NaN and inf.
- The kernel rounds the weights of halves, and takes a row with an inf for a row without keys. So halves are
  computed in float32, unless the call names this kernel (`torch_on_numpy.py`): see `_is_right_half`.
- Gradients of rows with large scores are S times too large. The kernel keeps only the log-sum-exp, whose
  rounding error is then larger than log(S). If autograd records, the size of the scores is bounded first.

On a device no value is read: `torch_traced.py` says in which cases the kernel then differs.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard, cast

from .._call import PreparedCall, shared_by_equal_calls
from .._libraries import LARGEST, astype_if_needed, dtype_name
from .._libraries.protocols import Array, Dtype
from .._libraries.torch import Torch, has_tangents
from .._run import any_query_attends, has_key
from .._tiles import is_masked
from . import operands

LONGEST_VECTOR = 64
"""float32 numbers in the widest vector register that there is (2048 bits of Arm's SVE)."""
WITHOUT_TANGENTS = "torch's kernel has no derivatives in forward mode"
COMPILERS = "torch.compile and torch.func"
LARGEST_SCORE = 2.0**16
"""Of calls with gradients; there the rounding of the log-sum-exp changes gradients by up to 0.4 %."""


def not_default_reason(call: PreparedCall) -> str | None:
    """The kernel is a default on the CPU; it lacks some derivatives in forward mode."""
    if has_tangents():
        return WITHOUT_TANGENTS
    return None if _is_on_cpu(call) else operands.not_default_reason(call, "torch", COMPILERS)


def _is_on_cpu(call: PreparedCall) -> bool:
    return bool(call.grid.device.type == "cpu")


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why the kernel does not compute the call as documented."""
    return unsupported_by_shape(call, cuts_keys=_is_on_cpu(call))


def unsupported_by_shape(call: PreparedCall, *, cuts_keys: bool) -> str | None:
    """Return why the kernel does not compute a call as documented now; its arrays may be another library's."""
    reason = operands.unsupported_reason(call, "torch", cuts_keys=cuts_keys)
    if reason is not None:
        return reason
    if call.is_empty:
        return "an axis is empty"
    if operands.mask_size(call) > operands.MANY_SCORES:
        return "torch's kernel makes an L x S array of the mask"
    # torch's flash kernel wants E = Ev; with others it falls back to its math kernel, which builds all scores.
    many = math.prod(call.grid.shape) > operands.MANY_SCORES
    if many and call.sizes.width != call.arrays["value"].shape[-1]:
        return "torch's kernel makes all scores at once if E is not Ev"
    return None


def attend(call: PreparedCall) -> Array | None:
    """Return the output, (..., Hq, L, Ev); None if the kernel gets a NaN or inf wrong."""
    if not _needs_no_conversion(call):
        return _attend_now(call) if _is_on_cpu(call) else attend_unread(call)
    # Here, and not in a function: a small call would notice one more. The public name may stand for a function
    # that calls this one: a program may have put it there.
    kernel = sys.modules["torch"]._C._nn.scaled_dot_product_attention
    query, key, value = call.arrays.values()
    if not _stride(query) == _stride(key) == _stride(value) == 1:  # copy only if one of them needs it
        query, key, value = map(_in_rows, (query, key, value))
    scale: Any = call.options.scale  # a float or None: see `_needs_no_conversion`
    output: Any = kernel(query, key, value, scale=scale)
    if query.dtype != call.grid.dtype:
        return output if _is_right_half(output, query, key, scale) else None
    # If the scores of a row fill a register, a row of NaN stays NaN, and there is nothing to search for.
    if call.sizes.keys < LONGEST_VECTOR and not _hides_no_nan(output, query, key, scale):
        return None
    is_right = not output.requires_grad or _has_right_gradients(query, key, scale)
    return output if is_right else None


def attend_unread(call: PreparedCall, *, in_full: bool = False) -> Array:
    """Return the output of arrays whose values are not read; `in_full` no mask broadcasts along L or S."""
    xp = call.grid.xp
    query, key, value = call.arrays.values()
    if not _keeps_half(call):
        query, key, value = (xp.astype(x, call.grid.dtype, copy=False) for x in (query, key, value))
    query, scale = _scaled(call, query)
    # Such values are not searched for NaN. So keys and values that no query attends to are first set to 0.
    allowed = operands.allowed(call)
    attended = _attended_keys(call) if allowed is None else any_query_attends(xp, allowed, call.sizes.heads)
    if attended is not None:
        key, value = (xp.where(attended, x, 0.0) for x in (key, value))
    mask = None if allowed is None else _mask(call, allowed, in_full=in_full)
    query, key, value = (operands.with_4_axes(call, x) for x in (query, key, value))
    is_causal = mask is None and operands.is_causal(call)
    output = operands.split_batch(call, _kernel_output(call, (query, key, value), mask, scale, is_causal))
    # A translation for opsets before 23 gives the mean of the values for a row without a key.
    return output if allowed is None else xp.where(has_key(xp, allowed), output, 0.0)


def _kernel_output(
    call: PreparedCall, inputs: tuple[Array, ...], mask: Array | None, scale: float | None, is_causal: bool
) -> Any:
    """Return what the kernel makes of inputs of 4 axes; it takes either a mask or `is_causal`."""
    return sys.modules["torch"]._C._nn.scaled_dot_product_attention(
        *inputs,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=bool(call.sizes.query_heads != call.sizes.heads),
    )


def _keeps_half(call: PreparedCall) -> bool:
    """Return whether the kernel gets halves; a scaled query, and a bias on CUDA, would be rounded to them."""
    takes_wide_bias = call.implementation == "torch"
    if not takes_wide_bias and (call.grid.device.type != "cuda" or call.options.biases):
        return False
    return dtype_name(call.grid.dtype) == "float32" and _is_scale_of_kernel(call.options.scale)


@shared_by_equal_calls
def _needs_no_conversion(call: PreparedCall) -> bool:
    """Return whether the call is three arrays and a scale that the kernel takes as they are."""
    if not _is_on_cpu(call) or call.options.masks or call.options.biases:
        return False
    leading = call.grid.leading_shape
    fit = all(array.ndim == 4 and array.shape[:-2] == leading for array in call.arrays.values())
    return fit and call.result_dtype == _kernel_dtype(call) and _is_scale_of_kernel(call.options.scale)


def _kernel_dtype(call: PreparedCall) -> Dtype:
    is_kept = call.result_dtype == call.grid.dtype or _keeps_half(call)
    return call.result_dtype if is_kept else call.grid.dtype


def _in_rows(array: Array) -> Array:
    """Return the array with the elements of a row side by side; else the kernel builds all scores at once."""
    return array if _stride(array) == 1 else cast(Array, cast(Any, array).contiguous())


_stride = operator.methodcaller("stride", -1)


def _attend_now(call: PreparedCall) -> Array | None:
    """Return the output of arrays on the CPU, whose values can be read."""
    query, key, value = (operands.with_4_axes(call, x) for x in call.arrays.values())
    if (real_keys := operands.real_keys(call)) is None:
        output = _attend_all(call, query, key, value)
    elif len(set(real_keys)) == 1:
        keys = slice(real_keys[0])
        output = _attend_all(call, query, key[..., keys, :], value[..., keys, :])
    else:
        output = _attend_each(call, query, key, value, real_keys)
    if output is None:
        return None
    # If no entry has a key, the output is a constant: autograd needs it connected to the inputs.
    output = Torch.autograd.attach_zero_gradient(output, call.arrays.values)
    return operands.split_batch(call, output)


def _attend_each(
    call: PreparedCall, query: Array, key: Array, value: Array, real_keys: Sequence[int]
) -> Array | None:
    """Return the output of batch entries that have different numbers of keys, computed one by one."""
    outputs: list[Array] = []
    for n, keys in enumerate(real_keys):
        inputs = query[n : n + 1, ...], key[n : n + 1, :, :keys, :], value[n : n + 1, :, :keys, :]
        if (output := _attend_all(call, *inputs)) is None:
            return None
        outputs.append(output)
    return call.grid.xp.concat(outputs, axis=0)


def _attend_all(call: PreparedCall, query: Array, key: Array, value: Array) -> Array | None:
    """Return the output of inputs of 4 axes; None if the kernel gets a NaN or inf wrong."""
    xp = call.grid.xp
    if not key.shape[-2]:  # padding has cut all keys; the kernel takes no empty axis
        return xp.zeros((*query.shape[:-1], value.shape[-1]), dtype=call.grid.dtype, device=call.grid.device)
    allowed = operands.allowed(call)
    may_mask = allowed is not None or operands.is_causal(call)
    # A tiny call would notice a function more, and only "torch" keeps halves on the CPU.
    dtype = _kernel_dtype(call) if call.implementation == "torch" else call.grid.dtype
    query, key, value = (_in_rows(astype_if_needed(xp, x, dtype)) for x in (query, key, value))
    query, scale = _scaled(call, query)
    mask = None if allowed is None else _mask(call, allowed)
    output = _kernel_output(call, (query, key, value), mask, scale, may_mask and mask is None)
    if may_mask and not bool(output.sum(dtype=call.grid.dtype).isfinite()):  # from a masked key or value?
        return None
    if dtype != call.grid.dtype:
        return output if _is_right_half(output, query, key, scale) else None
    # A mask may leave a row only the keys of a last, partly filled register, however many keys there are.
    is_short = key.shape[-2] < LONGEST_VECTOR
    if (may_mask or is_short) and not _hides_no_nan(output[..., 0], query, key, scale):
        return None
    bias = mask if call.options.biases else None
    is_right = not output.requires_grad or _has_right_gradients(query, key, scale, bias)
    return output if is_right else None


def _hides_no_nan(output: Any, query: Any, key: Any, scale: float | None) -> bool:
    """Return whether no row of `output` is 0 instead of NaN: the output has no 0, or all scores are finite."""
    torch = sys.modules["torch"]
    # The usual case and the cheapest check: without a 0, no row was mistaken for an empty one.
    if int(output.count_nonzero()) == output.numel():
        return True
    dtype = torch.promote_types(query.dtype, torch.float32)
    # A bound on all scores; it is NaN or inf if a score is.
    largest = query.abs().sum(dtype=dtype) * key.abs().sum(dtype=dtype)
    return bool((largest * max(1.0, scale or 1.0)).isfinite())


def _is_right_half(output: Any, query: Any, key: Any, scale: float | None) -> bool:
    """Return whether the kernel of halves made neither a row of NaN 0 nor the weight of an infinite value."""
    torch = sys.modules["torch"]
    # Weights below 2^-25 become 0 in float16, and 0 * inf is NaN; in bfloat16 they do not before float32's do.
    if output.dtype is torch.float16 and not bool(output.sum(dtype=torch.float32).isfinite()):
        return False
    return _hides_no_nan(output[..., 0], query, key, scale)  # a row that became 0 is 0 in each column


def _has_right_gradients(query: Any, key: Any, scale: float | None, bias: Any = None) -> bool:
    """Return whether the log-sum-exp of each row is small enough to be exact."""
    torch = sys.modules["torch"]
    norm, width = partial(torch.linalg.vector_norm, ord=math.inf), query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    largest = norm(query.detach()) * norm(key.detach()) * (scale * width)
    if bias is not None:
        of_rows = bias.detach().amax(dim=-1)
        largest = largest + norm(torch.where(is_masked(of_rows), 0.0, of_rows))  # a row without a key has none
    return bool(largest < LARGEST_SCORE)


def _is_scale_of_kernel(scale: float | Array | None) -> TypeGuard[float | None]:
    """Return whether the kernel takes a scale: None, or a positive number."""
    return scale is None or (isinstance(scale, float) and scale > 0)


def _scaled(call: PreparedCall, query: Array) -> tuple[Array, float | None]:
    """Return the query and the scale for the kernel."""
    scale: Any = call.options.scale
    if _is_scale_of_kernel(scale):
        return query, scale
    return query * (scale if isinstance(scale, float) else call.grid.xp.astype(scale, query.dtype)), 1.0


def _attended_keys(call: PreparedCall) -> Array | None:
    """Return which keys some query attends to under is_causal, (S, 1); None if all are attended."""
    # Under a causal mask only keys beyond the last query are never attended.
    is_within = call.sizes.keys <= call.sizes.queries
    if not operands.is_causal(call) or (call.grid.library.is_known(is_within) and is_within):
        return None
    return call.grid.xp.expand_dims(operands.indices(call)[1] < call.sizes.queries, axis=-1)


def _mask(call: PreparedCall, allowed: Array, *, in_full: bool = False) -> Array:
    """Return the mask for the kernel, (L, S) or (B, Hq, L, S), where B and Hq may be 1."""
    xp, mask, bias, batch = call.grid.xp, allowed, operands.bias(call), call.sizes.batch
    if bias is not None:
        # onnxruntime takes a row in which all of the bias is the smallest number for a row without a key.
        least = -LARGEST[dtype_name(bias.dtype)] * (1 - 2**-10)
        mask = xp.where(allowed, xp.where(bias < least, least, bias), -math.inf)
    lengths = (call.sizes.queries, call.sizes.keys)
    # Else a mask of keys stays as small as it is.
    if in_full and mask.shape[-2:] != lengths:
        mask = xp.broadcast_to(mask, (*mask.shape[:-2], *lengths))
    if mask.ndim == 3:
        return xp.expand_dims(mask, axis=0)
    return mask if mask.ndim == 2 or len(batch) == 1 else operands.merge_batch(xp, mask, batch)
