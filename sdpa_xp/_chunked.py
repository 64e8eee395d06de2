"""The door to calls of arrays in chunks. `_many` is loaded for the first of them, and nothing else needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._call.prepared_call import PreparedCall
from ._libraries.protocols import Array
from ._programs.dropout import Dropout
from ._programs.scores import Name

if TYPE_CHECKING:
    from ._many import GraphCall


def cut_call(call: PreparedCall, dropout: Dropout | None = None) -> GraphCall | None:
    """Return a call as a graph of tasks; None if its arrays are in no chunks, or its options need it whole.

    Without a `dropout`, this draws the seed from the `rng` of a call that has some.
    """
    if call.grid.library.chunks is None:
        return None
    from . import _many

    return _many.cut_call(call, dropout)


def attend(call: PreparedCall, *names: Name, dropout: Dropout | None = None) -> dict[str, Array] | None:
    """Return what is named of a call that is computed in chunks, or None."""
    cut = cut_call(call, dropout)
    return None if cut is None else cut.attend(call.result_dtype, *names)
