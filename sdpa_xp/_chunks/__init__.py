"""Calls of arrays that lie in chunks, on one machine or on many, computed by the tasks of a scheduler.

A task gets one chunk of queries and one of keys and values, and computes the attention state of these keys.
States merge in a tree. Blocks that a mask empties have no task, and no array is larger than a chunk.

The library's file in `_libraries` says how tasks become an array. Tasks hold no array and no lock, so any
worker can compute them.
"""

from __future__ import annotations

from typing import cast

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._checks.keywords import refuse_missing_streams
from sdpa_xp._chunks import forward, streams
from sdpa_xp._chunks.call import CutCall, GraphCall, StreamedCall, refused_function
from sdpa_xp._core.dropout import Dropout
from sdpa_xp._libraries.cubed import CubedStreams
from sdpa_xp._libraries.dask import DaskGraphs
from sdpa_xp._libraries.protocols import Array


def cut_call(call: PreparedCall, dropout: Dropout | None = None) -> GraphCall | StreamedCall | None:
    """Return a call cut into its chunks, or None if it is computed like calls of other libraries.

    Without a `dropout`, this draws the seed from the `rng` of a call that has some.
    """
    chunks = call.grid.library.chunks
    if chunks is None or unsupported_reason(call) is not None:
        return None
    dropout = call.draw_dropout() if dropout is None else dropout
    if isinstance(chunks, CubedStreams):
        return StreamedCall(call, chunks, dropout)
    return GraphCall(call, cast(DaskGraphs, chunks), dropout)


def graph_call(call: PreparedCall) -> GraphCall | None:
    """Return a call cut into its chunks for what only graphs of tasks compute, or None as for `cut_call`."""
    cut = cut_call(call)
    if isinstance(cut, StreamedCall):
        refuse_missing_streams(call.grid.function, call.grid.library.name)
    return cut if isinstance(cut, GraphCall) else None


def attend(call: PreparedCall, dropout: Dropout | None = None) -> tuple[Array, Array] | None:
    """Return output and log-sum-exp of a call that is computed in chunks, or None."""
    cut = cut_call(call, dropout)
    if isinstance(cut, StreamedCall):
        return streams.attend(cut, call.result_dtype)
    return None if cut is None else forward.attend(cut, call.result_dtype)


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why a call of chunked arrays has to be one block, or None."""
    if 0 in call.grid.shape or any(0 in array.shape for array in call.arrays.values()):
        return "an axis has no elements"
    error = refused_function(call)
    return None if error is None else f"a function of the caller does not take arrays of a chunk: {error}"


__all__ = ["CutCall", "attend", "cut_call", "graph_call"]
