"""How torch differentiates a call: as one operation, by the library's own gradients and jets."""

from __future__ import annotations

import math

from .._call import PreparedCall
from .._libraries.base import is_compiling
from .._tiles import tuning


def is_differentiated(call: PreparedCall, *, has_kernel: bool) -> bool:
    """Return whether torch differentiates a call, which a vendor's kernel may compute, as one operation."""
    grid, options, autograd = call.grid, call.options, call.grid.library.autograd
    in_trace = grid.access.is_traced
    if autograd is None or (has_kernel and in_trace):
        return False
    if not autograd.differentiates([*call.arrays.values(), *options.arrays()]):
        return False
    is_transformed = in_trace and not is_compiling()
    if not (has_kernel or is_transformed or options.masks or options.biases):
        return math.prod(grid.shape) > tuning.MOST_SCORES_KEPT
    # A function of the caller may bring in arrays that only the library knows: those of a bias may have
    # gradients, and those of a mask may belong to a transformation.
    modifiers = (*options.biases, *(options.masks if in_trace else ()))
    return all(modifier.has_known_gradients() for modifier in modifiers)
