"""Attention over the blocks of a paged cache: of a query array with a batch axis, or of packed queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._call.prepared_call import PreparedCall
from .._libraries.protocols import Array
from .._programs.scores import ResultName
from . import groups
from .sequences import Sequences, lengths_of


class PagedCall(NamedTuple):
    """A call whose keys and values lie in blocks, (P, H, size, width)."""

    call: PreparedCall
    """Its query is (N, Hq, L, E), or packed (Hq, T, E)."""
    block_table: Sequence[Sequence[int]]
    lengths: Sequence[int]
    """The number of tokens of each sequence."""
    starts: Sequence[int] | None
    """The cumulative numbers of packed queries, or None if the query has a batch axis."""


def attend(paged: PagedCall, *names: ResultName) -> dict[str, Array]:
    """Return what is named: the output in the shape of the query, the log-sum-exp, (N, Hq, L) or (Hq, T)."""
    call, table, keys, starts = paged
    queries = [call.sizes.queries] * len(keys) if starts is None else lengths_of(starts)
    size = call.arrays["key_blocks"].shape[-2]
    sequences = Sequences([*zip(queries, keys, strict=True)], (starts, None), table, size)
    return groups.attend(call, sequences, *names)
