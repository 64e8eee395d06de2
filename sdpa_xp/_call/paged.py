"""Attention over the blocks of a paged cache: of a query array with a batch axis, or of packed queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._core.products import PagedSource
from .._core.quantised import factored_operands, source_of
from .._libraries.protocols import Array
from .._tiles.plan import Plan, plan_pages
from .._tiles.score_grid import ScoreGrid
from . import ragged
from .padded import RaggedBatch, equal_lengths, gather_sequences, padded_groups
from .prepared_call import PreparedCall


class PagedCall(NamedTuple):
    """A call whose keys and values lie in blocks, (P, H, size, width)."""

    call: PreparedCall
    """Its query is (N, Hq, L, E), or packed (Hq, T, E)."""
    block_table: Sequence[Sequence[int]]
    lengths: Sequence[int]
    """The number of tokens of each sequence."""
    starts: Sequence[int] | None
    """The cumulative numbers of packed queries, or None if the query has a batch axis."""

    @property
    def queries(self) -> list[int]:
        """The number of queries of each sequence."""
        if self.starts is None:
            return [self.call.sizes.queries] * len(self.lengths)
        return ragged.lengths_of(self.starts)

    @property
    def block_size(self) -> int:
        return self.call.arrays["key_blocks"].shape[-2]

    @property
    def widths(self) -> tuple[int, int]:
        """E and Ev."""
        return self.call.sizes.width, source_of(self.call.arrays, "value_blocks").width

    def query_of(self, group: ragged.Group) -> Array:
        """Return the queries of a group, (n, Hq, L, E)."""
        query = self.call.arrays["query"]
        if self.starts is None:
            return group.grid.slice_entries(query, 3)
        if group.tables is None:
            return ragged.stack_sequences(query, self.starts, group.entries)
        return gather_sequences([query], self.starts, group, of_keys=False)[0]


def attend(paged: PagedCall, *, with_lse: bool) -> tuple[Array, Array | None]:
    """Return the output in the shape of the query, and the log-sum-exp, (N, Hq, L) or (Hq, T), if asked for."""
    call, starts = paged.call, paged.starts
    batch = call.grid if starts is None else call.grid.with_batch((len(paged.lengths),))
    groups = _groups(paged, batch)

    def arrays_of(group: ragged.Group, _buffers: object) -> ragged.GroupArrays:
        rows = [paged.block_table[entry] for entry in group.entries]
        tables = rows if group.tables is None else group.tables.blocks

        def in_blocks(pool: Array) -> PagedSource:
            return PagedSource(pool, tables)

        key, value = (source_of(call.arrays, name, in_blocks) for name in ("key_blocks", "value_blocks"))
        return ragged.GroupArrays(*factored_operands(group.grid, paged.query_of(group), key, value))

    if starts is not None:
        return ragged.attend_packed(call, starts, groups, paged.widths, arrays_of, with_lse=with_lse)
    outputs, lses = ragged.attend_groups(call, groups, sum(paged.widths), arrays_of, with_lse=with_lse)
    output = call.attach_zero_gradient(ragged.unstack(outputs))
    return output, call.connected_lse(ragged.unstack(lses)) if with_lse else None


def _groups(paged: PagedCall, batch: ScoreGrid) -> list[ragged.Group]:
    """Return the sequences of equal lengths, or on a device padded ones."""
    call, widths = paged.call, sum(paged.widths)
    lengths = [*zip(paged.queries, paged.lengths, strict=True)]

    def plan_of(grid: ScoreGrid) -> Plan:
        return plan_pages(grid, call.sizes.group, widths, paged.block_size)

    if call.grid.waits:
        positions, zeros = [keys - queries for queries, keys in lengths], [0] * len(lengths)
        places = paged.starts or zeros, zeros
        sequences = RaggedBatch(lengths, positions, *places, paged.block_table, paged.block_size)
        return padded_groups(call, batch, sequences, widths, plan_of)
    groups = []
    for (queries, keys), entries in equal_lengths(lengths).items():
        grid = batch.for_entries(entries, queries, keys, position=keys - queries)
        groups.append(ragged.Group(entries, grid, call.bind(grid), plan_of(grid)))
    return groups
