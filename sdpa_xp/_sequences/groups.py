"""Attention of sequences of unlike lengths: a call is cut into groups, and their results are joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, cast

from .. import _chunked
from .._call import PreparedCall
from .._checks.arrays import LHE, swap_heads_and_length
from .._checks.score_arrays import Integers
from .._libraries import computing, namespace_of
from .._libraries.protocols import Array
from .._programs import BoundOptions, ResultName, Scores
from .._programs.output import attend as attend_to
from .._run import are_finite, threads
from .._run.buffers import Buffer, CallBuffers, call_buffers
from .._run.program import between_zeros
from .._sources import PagedSource
from .._sources.quantised import factored_operands, source_of
from .._tiles import ArraySource, KeyValueSource
from .._tiles.grid import BatchPart, ScoreGrid
from .._tiles.on_device import PaddedLengths
from .._tiles.plan import Plan, takes_threads
from ..masks.algebra import AllOf
from ..masks.lengths import KeysBefore, QueriesBefore
from .sequences import ENTRY, LENGTHS, PAGES, POSITION, STARTS, Entries, Sequences, is_contiguous


class Group(NamedTuple):
    """Sequences of equal lengths, or on a device padded ones."""

    entries: Entries
    grid: ScoreGrid
    options: BoundOptions
    plan: Plan
    table: Array | None
    """What a device that has to be waited for knows of them; None elsewhere."""


def attend(call: PreparedCall, sequences: Sequences, *names: ResultName) -> dict[str, Array]:
    """Return what is named: the output in the shape of the query, the log-sum-exp, (N, Hq, L) or (Hq, T).

    Threads share groups that are too small for threads. The arrays of a group are created only when the group
    is computed, so that few copies exist at once. A device is waited for once, after the last group.
    """
    starts: Sequence[int] = sequences.starts[0] or ()
    sources = ("key_blocks", "value_blocks") if sequences.starts[1] is None else ("key", "value")
    width = source_of(call.arrays, sources[1]).width
    groups, dropout = _groups(call, sequences, call.sizes.width + width), call.draw_dropout()
    packed = _packed_output(call, starts[-1], width) if starts and call.grid.access.is_writeable else None
    computed: dict[str, dict[Entries, Array]] = {name: {} for name in names}

    def compute(group: Group, is_guarded: bool = False) -> Array | None:
        """Compute a group, and return its checksum if it is to be looked at."""
        query, key, value = _arrays_of(call, sequences, sources, group, buffers)
        if call.grid.library.chunks is not None and sequences.starts[1] is not None:
            key_and_value = (cast(ArraySource, source).array for source in (key, value))
            arrays = dict(zip(call.arrays, (query, *key_and_value), strict=True))
            of_group = call.changed(grid=group.grid, arrays=arrays)
            if (in_chunks := _chunked.attend(of_group, *names, dropout=dropout)) is not None:
                for name, array in in_chunks.items():
                    computed[name][group.entries] = array if name == "output" else array[..., None]
                return None
        out = None
        if packed is not None and is_contiguous(group.entries):
            tokens = slice(starts[group.entries[0]], starts[group.entries[-1] + 1])
            out = _split(packed[:, tokens, :], len(group.entries))
        with computing(query):  # here too: a library may keep this setting for each thread
            options = group.options._replace(dropout=dropout)
            if is_guarded:
                options = options._replace(finite_inputs=frozenset())
            scores, dtype = Scores(group.grid, query, key, options), call.result_dtype
            wanted: Sequence[ResultName] = names if group.table is None else (*names, "checksum")
            results = attend_to(scores, value, group.plan, dtype, *wanted, out=out)
        check = results.pop("checksum", None)
        if packed is not None and (output := results.pop("output")) is not out:
            for n, entry in enumerate(group.entries):
                packed[:, starts[entry] : starts[entry + 1], :] = output[n, ...]
        for name, array in results.items():
            computed[name][group.entries] = array
        return check

    # Packed sequences are stacked in buffers, which have the dtype of the scores.
    keeps_buffers = call.grid.library.keeps_buffers and call.grid.dtype == call.result_dtype
    with call_buffers(call.grid) if packed is not None and keeps_buffers else nullcontext() as buffers:
        _compute_all(call.grid, compute, groups, call.sizes.width + width)
    results = {} if packed is None else {"output": packed}
    for name in names:
        if name not in results:
            results[name] = _joined(computed[name], sequences)
    return call.connected(results)


def in_groups(
    call: PreparedCall, sequences: Sequences, compute: Callable[..., Mapping[str, Array]]
) -> dict[str, Array]:
    """Return what `compute(call, pages)` gives of sequences, (N, Hq, L, n), and its `key_sums`, (N, Hq, 1, S).

    Packed queries have (Hq, T) in place of (N, Hq, L), packed keys (Hq, U). Behind a sequence in pages it is 0.
    """
    computed: dict[str, dict[Entries, Array]] = {}
    in_pages, longest = sequences.starts[1] is None, max(keys for _, keys in sequences.lengths)
    source = "key_blocks" if in_pages else "key"
    transpose = call.grid.xp.matrix_transpose
    for group in _groups(call, sequences, call.sizes.width, sums_queries=True):
        query, key, _ = _arrays_of(call, sequences, (source, source), group, None)
        arrays = {"query": query, "key": call.arrays[source] if in_pages else cast(ArraySource, key).array}
        of_group = call.changed(grid=group.grid, arrays=arrays).with_bound_options(group.options)
        for name, array in compute(of_group, key if in_pages else None).items():
            if name == "key_sums":
                behind = longest - group.grid.keys if in_pages else 0
                array = transpose(between_zeros(group.grid, array, array.ndim - 1, 0, behind))
            computed.setdefault(name, {})[group.entries] = array
    joined = {name: _joined(arrays, sequences, int(name == "key_sums")) for name, arrays in computed.items()}
    return {name: transpose(array) if name == "key_sums" else array for name, array in joined.items()}


def _compute_all(
    grid: ScoreGrid, compute: Callable[..., Array | None], groups: Sequence[Group], widths: int
) -> None:
    """Compute all groups; on a device those with a NaN or inf a second time, guarded."""
    if any(group.table is not None for group in groups):
        checks = [(group, compute(group)) for group in groups]
        doubtful = [(group, check) for group, check in checks if check is not None]
        flags = are_finite([check for _, check in doubtful]) if doubtful else []
        flags_left = iter(flags or ())
        for group, check in doubtful:
            # A list, so that all flags of the group are taken.
            if flags is None or False in [*islice(flags_left, check.shape[0])]:
                compute(group, is_guarded=True)
        return
    small = [group for group in groups if group.plan.threads == 1]
    work = sum(math.prod(group.grid.shape) for group in small) * widths
    has_threads = len(small) > 1 and takes_threads(grid, work)
    # Once for all groups, because a BLAS takes milliseconds to change its threads.
    with threads.one_blas_thread(grid.access.uses_our_threads and (has_threads or len(small) < len(groups))):
        for group in groups:
            if group.plan.threads != 1:
                compute(group)
        threads.run_tasks(compute, small, None if has_threads else 1)


def _groups(
    call: PreparedCall, sequences: Sequences, widths: int, *, sums_queries: bool = False
) -> list[Group]:
    """Return the groups of a call, whose options are bound to the lengths of each.

    If queries are summed, those of padding count as masked, and sequences without queries have sums too.
    """
    batch, group, is_packed = call.grid, call.sizes.group, sequences.starts[0] is not None
    if is_packed:
        batch = replace(batch, batch=(len(sequences.lengths),))
    groups = []
    for entries, table in sequences.grouped(batch, group, widths):
        if table is None:
            first, part = entries[0], BatchPart(entries, is_packed)
            grid = batch.for_entries(part, *sequences.lengths[first], sequences.position(first))
            options = call.bind(grid)
        else:
            queries, keys = zip(*(sequences.lengths[entry] for entry in entries), strict=True)
            positions = tuple(map(sequences.position, entries))
            columns = [table[:, column] for column in (LENGTHS, LENGTHS + 1, POSITION)]
            on_device = [batch.xp.reshape(column, (-1, 1, 1, 1)) for column in columns]
            padding = PaddedLengths(queries, keys, positions, *on_device)
            grid = batch.for_padded(BatchPart(entries, is_packed, table[:, ENTRY]), padding)
            options = call.bind(grid)
            if len({*keys}) > 1:
                options = options._replace(mask=AllOf((KeysBefore(padding.real_keys()), options.mask)))
            if len({*queries}) > 1 and sums_queries:
                real = QueriesBefore(Integers(padding.query_lengths, min(queries), max(queries)))
                options = options._replace(mask=AllOf((real, options.mask)))
        groups.append(Group(entries, grid, options, sequences.plan(grid, group, widths), table))
    # Without any packed query one group stays, from which the output has its shape and its dtype.
    return [group for group in groups if group.grid.queries or sums_queries or not is_packed] or groups[:1]


def _arrays_of(
    call: PreparedCall, sequences: Sequences, names: Sequence[str], group: Group, buffers: CallBuffers | None
) -> tuple[Array, KeyValueSource, KeyValueSource]:
    """Return the query of a group, (n, Hq, L, E), and its keys and values, in buffers if there are some."""
    query, arrays = call.arrays["query"], [call.arrays[name] for name in names]
    places = (None, None, None) if buffers is None else (buffers.query, buffers.key, buffers.value)
    if sequences.starts[0] is None:
        query = group.grid.slice_entries(query, 3)
    else:
        (query,) = _stacked([query], sequences, group, 0, places[:1])
    if sequences.starts[1] is not None:
        key, value = map(ArraySource, _stacked(arrays, sequences, group, 1, places[1:]))
        return query, key, value
    pages = [sequences.pages[entry] for entry in group.entries]
    tables = pages if group.table is None else group.table[:, PAGES:]
    sources = [source_of(call.arrays, name, lambda pool: PagedSource(pool, tables)) for name in names]
    return factored_operands(group.grid, query, *sources)


def _stacked(
    arrays: Sequence[Array], sequences: Sequences, group: Group, side: int, buffers: Sequence[Buffer | None]
) -> list[Array]:
    """Return packed queries (side 0) or keys (1), (heads, T, width), of a group as (n, heads, longest, width).

    Contiguous ones of equal lengths are a view; others are copied, into buffers if there are some. Padding
    repeats the last token of its sequence, so that no other sequence can be seen in it.
    """
    xp, entries, table, starts = group.grid.xp, group.entries, group.table, sequences.starts[side] or ()
    lengths = [sequences.lengths[entry][side] for entry in entries]
    longest, is_equal = max(lengths), min(lengths) == max(lengths)
    if is_equal and (longest == 0 or is_contiguous(entries)):
        first, stop = starts[entries[0]], starts[entries[0]] + len(entries) * longest
        return [_split(array[:, first:stop, :], len(entries)) for array in arrays]
    if table is None:
        parts = [[array[:, starts[n] : starts[n] + longest, :] for n in entries] for array in arrays]
        stacks = zip(parts, buffers, strict=True)
        return [xp.stack(part, axis=0) if buffer is None else buffer.stack(part) for part, buffer in stacks]
    place = xp.expand_dims(group.grid.arange(0, longest), axis=0)
    if not is_equal:
        last = xp.expand_dims(table[:, LENGTHS + side], axis=-1) - 1
        place = xp.where(place < last, place, last)
    index = xp.reshape(xp.expand_dims(table[:, STARTS + side], axis=-1) + place, (-1,))
    return [_split(xp.take(array, index, axis=1), len(entries)) for array in arrays]


def _split(tokens: Array, n: int) -> Array:
    """Return n sequences of equal lengths, (heads, n * length, width), as (n, heads, length, width)."""
    xp, (heads, count, width) = namespace_of(tokens), tokens.shape
    return xp.permute_dims(xp.reshape(tokens, (heads, n, count // n, width)), (1, 0, 2, 3))


def _packed_output(call: PreparedCall, tokens: int, width: int) -> Array:
    """Return zeros, (heads, tokens, width), in the caller's order in memory."""
    xp, grid, layout = call.grid.xp, call.grid, call.layout
    shape = (tokens, grid.heads, width) if layout == LHE else (grid.heads, tokens, width)
    return swap_heads_and_length(xp, xp.zeros(shape, dtype=call.result_dtype, device=grid.device), layout)


def _joined(outputs: Mapping[Entries, Array], sequences: Sequences, side: int = 0) -> Array:
    """Return outputs (n, heads, longest, width) of all groups as (heads, T, width) or (N, heads, L, width).

    Rows of padding are left out. They are those of the queries, or on side 1 those of the keys.
    """
    parts: dict[int, Array] = {}
    is_packed = sequences.starts[side] is not None
    for entries, output in outputs.items():
        xp, (n, heads, longest, width) = namespace_of(output), output.shape
        lengths = [sequences.lengths[entry][side] for entry in entries]
        if not is_contiguous(entries) or min(lengths) < longest:
            cut = (output[n, :, :l, :] if is_packed else output[n : n + 1, ...] for n, l in enumerate(lengths))
            parts |= zip(entries, cut, strict=True)
        elif is_packed:
            parts[entries[0]] = xp.reshape(xp.permute_dims(output, (1, 0, 2, 3)), (heads, n * longest, width))
        else:
            parts[entries[0]] = output
    in_order = [parts[entry] for entry in sorted(parts)]
    return in_order[0] if len(in_order) == 1 else xp.concat(in_order, axis=1 if is_packed else 0)
