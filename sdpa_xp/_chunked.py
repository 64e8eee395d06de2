"""The door to calls of arrays in chunks. `_many` is loaded for the first of them, and nothing else needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ._call import PreparedCall
from ._libraries.protocols import Array
from ._programs import ResultName

if TYPE_CHECKING:
    from ._libraries.dask import DaskGraphs
    from ._many.graphs import GraphCall
    from ._programs.dropout import Dropout


def cut_call(call: PreparedCall, dropout: Dropout | None = None) -> GraphCall | None:
    """Return a call as a graph of tasks; None if its arrays are in no chunks, or its options need it whole.

    Without a `dropout`, this draws the seed from the `rng` of a call that has some.
    """
    if (chunks := call.grid.library.chunks) is None:
        return None
    from ._many.cutting import unsupported_reason
    from ._many.graphs import GraphCall

    if unsupported_reason(call) is not None:
        return None
    return GraphCall(call, cast("DaskGraphs", chunks), call.draw_dropout() if dropout is None else dropout)


def attend(call: PreparedCall, *names: ResultName, dropout: Dropout | None = None) -> dict[str, Array] | None:
    """Return what is named of a call that is computed in chunks, or None."""
    cut = cut_call(call, dropout)
    return None if cut is None else cut.attend(call.result_dtype, *names)
