"""Calls that are cut into blocks, which many tasks or devices compute.

    blocks      which part of each array belongs to a block of the scores
    windows     a block as a call of its own, whose masks and biases count in the whole call
    tasks       what a task computes for a block of chunked arrays
    cutting     a call of chunked arrays: where it is cut, and which blocks have pairs that may attend
    graphs      the graph of its tasks, for Dask
    streams     its tasks for cubed, which projects their memory
    schedule    which device has which queries and keys, and which way the keys travel
    walks       around the ring: states merge, gradients travel with the keys (`sdpa_xp/ring.py` starts it)

The library's file in `_libraries` says how tasks become an array, and how devices send arrays. Tasks hold no
array and no lock, so any worker can compute them. No array is larger than a chunk.
"""

from __future__ import annotations

from typing import cast

from .._call.prepared_call import PreparedCall
from .._core.dropout import Dropout
from .._libraries.cubed import CubedStreams
from .._libraries.dask import DaskGraphs
from .._libraries.protocols import Array
from ..errors import ArgumentTypeError
from .cutting import CutCall, unsupported_reason
from .graphs import GraphCall
from .streams import StreamedCall


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
        library = call.grid.library.name
        rule = f"arrays of {library} support attention, but neither weights nor gradients"
        hint = f"Arrays of Dask support both: dask.array.from_zarr reads what {library} writes."
        raise ArgumentTypeError(call.grid.function, rule, {"query": f"an array of {library}"}, hint)
    return cut if isinstance(cut, GraphCall) else None


def attend(call: PreparedCall, dropout: Dropout | None = None) -> tuple[Array, Array] | None:
    """Return output and log-sum-exp of a call that is computed in chunks, or None."""
    cut = cut_call(call, dropout)
    return None if cut is None else cut.attend(call.result_dtype)


__all__ = ["CutCall", "attend", "cut_call", "graph_call"]
