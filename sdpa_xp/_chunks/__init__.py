"""Calls of arrays that lie in chunks, on one machine or on many, computed by the tasks of a scheduler.

A task gets one chunk of queries and one of keys and values, and computes the attention state of these keys.
States merge in a tree. Blocks that a mask empties have no task, and no array is larger than a chunk.

The library's file in `_libraries` says how tasks become an array. Tasks hold no array and no lock, so any
worker can compute them.
"""

from __future__ import annotations

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._chunks.call import CutCall, refused_function
from sdpa_xp._core.dropout import Dropout


def cut_call(call: PreparedCall, dropout: Dropout | None = None) -> CutCall | None:
    """Return a call cut into its chunks, or None if it is computed like calls of other libraries.

    Without a `dropout`, this draws the seed from the `rng` of a call that has some.
    """
    graphs = call.grid.library.task_graphs()
    if graphs is None or unsupported_reason(call) is not None:
        return None
    return CutCall(call, graphs, call.draw_dropout() if dropout is None else dropout)


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why a call of chunked arrays has to be one block, or None."""
    if 0 in call.grid.shape or any(0 in array.shape for array in call.arrays.values()):
        return "an axis has no elements"
    error = refused_function(call)
    return None if error is None else f"a function of the caller does not take arrays of a chunk: {error}"


__all__ = ["CutCall", "cut_call", "unsupported_reason"]
