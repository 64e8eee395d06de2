"""torch's kernel inside torch.compile, torch.func and exporters, of which torch.onnx has one node for it.

Values are not read there, nor on a device (`attend_unread`). The kernel, or its translation by an exporter and
onnxruntime, then differs from the contract in these cases:

- a masked key or value holds NaN, and 0 * NaN is NaN: keys and values that no query attends to are set to 0;
- a row has no key: torch's translation for opsets before 23 returns the mean of the values; it is set to 0;
- all of a row's bias is the most negative finite number: onnxruntime treats it as a row without keys, so the
  bias is kept above that number;
- the scale is not positive: torch returns NaN with `is_causal`, onnxruntime refuses: the query is scaled;
- the mask broadcasts along L or S, or the inputs lack 4 axes: not translated, so both are converted first;
- the dtype is a half: the kernel rounds the weights to it, so the call is computed in float32. Only on CUDA,
  where the kernel is never the default, a half stays: torch has no flash kernel for float32.
"""

from __future__ import annotations

import sys

from .._call import PreparedCall
from .._libraries import dtype_name
from .._libraries.base import is_compiling
from .._libraries.protocols import Array
from .._libraries.torch import has_tangents, makes_fakes
from . import operands
from .torch import COMPILERS, WITHOUT_TANGENTS, attend_unread


def not_default_reason(call: PreparedCall) -> str | None:
    """The kernel is a default while torch exports: an exporter may have one node for it.

    It lacks some derivatives in torch.func, and in torch.compile no NaN can be read.
    """
    if has_tangents():
        return WITHOUT_TANGENTS
    return None if _is_exporting() else operands.not_default_reason(call, "torch", COMPILERS)


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why the kernel, or its translation by an exporter, does not compute the call as documented."""
    reason = operands.unsupported_reason(call, "torch")
    if reason is not None:
        return reason
    # No memory is counted: a compiler or a runtime decides on it.
    if call.is_empty:
        return "an axis is empty, which onnxruntime does not compute"
    exact = not _is_exporting() or dtype_name(call.grid.dtype) != "float64"
    return None if exact else "onnxruntime computes a float64 Attention to float32 accuracy"


def attend(call: PreparedCall) -> Array:
    """Return the output, (..., Hq, L, Ev). torch's translation to ONNX broadcasts no mask along L and S."""
    return attend_unread(call, in_full=True)


def _is_exporting() -> bool:
    """Return whether torch makes a graph that others run, or none: it shall show one node for a call."""
    return bool(sys.modules["torch"].compiler.is_exporting()) or (not is_compiling() and makes_fakes())
