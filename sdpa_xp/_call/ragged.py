"""Group the sequences of a ragged batch: sequences of equal lengths are computed together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias, cast

from .._checks.arrays import LHE, swap_heads_and_length
from .._core import streaming, threads
from .._core.dropout import Dropout
from .._core.products import Buffer, CallBuffers, KeyValueSource, are_finite, call_buffers
from .._core.scores import BoundOptions, Scores
from .._libraries import computing, namespace_of
from .._libraries.protocols import Array
from .._tiles.plan import Plan, takes_threads
from .._tiles.score_grid import ScoreGrid
from .prepared_call import PreparedCall

Entries: TypeAlias = tuple[int, ...]
"""The numbers of some sequences, in order."""


class DeviceTables(NamedTuple):
    """Where the sequences of a group lie, as int32 arrays on the device."""

    first_query: Array
    """The place of the first query of each sequence among the packed ones, (n,)."""
    first_key: Array
    blocks: Array
    """The blocks of each sequence, (n, blocks); the last one of a shorter sequence is repeated."""


class Group(NamedTuple):
    """Sequences of equal lengths, or on a device padded ones."""

    entries: Entries
    grid: ScoreGrid
    options: BoundOptions
    plan: Plan
    tables: DeviceTables | None = None
    """What is known on the device, if the call is computed there."""


class GroupArrays(NamedTuple):
    """The arrays of a group: the query, (n, Hq, L, E), and where its keys and values come from."""

    query: Array
    key: KeyValueSource
    value: KeyValueSource


GroupState: TypeAlias = tuple[Array, Array | None]
"""The output of a group, (n, Hq, L, Ev), and the log-sum-exp, (n, Hq, L, 1), if it is asked for."""
ArraysOf: TypeAlias = Callable[[Group, CallBuffers | None], GroupArrays]
"""What creates the arrays of a group, in buffers if there are some."""
AttendOtherwise: TypeAlias = Callable[[Group, GroupArrays, Dropout | None], GroupState | None]
"""What computes a group in another way than the core, or returns None."""


def attend_packed(
    call: PreparedCall,
    starts: Sequence[int],
    groups: Sequence[Group],
    widths: tuple[int, int],
    arrays_of: ArraysOf,
    *,
    with_lse: bool,
    attend_otherwise: AttendOtherwise | None = None,
) -> tuple[Array, Array | None]:
    """Return packed outputs (Hq, T, Ev), and the log-sum-exp (Hq, T) if it is asked for.

    `starts` are the cumulative lengths of the queries, and `widths` E and Ev; the rest is as for
    `attend_groups`.
    """
    packed = PackedOutput(call, starts, widths[1]) if call.grid.is_writeable else None
    outputs, lses = attend_groups(
        call, groups, sum(widths), arrays_of, packed, attend_otherwise, with_lse=with_lse
    )
    output = packed.array if packed is not None else call.attach_zero_gradient(pack_sequences(outputs, starts))
    return output, call.connected_lse(pack_sequences(lses, starts)) if with_lse else None


def attend_groups(
    call: PreparedCall,
    groups: Sequence[Group],
    widths: int,
    arrays_of: ArraysOf,
    packed: PackedOutput | None = None,
    attend_otherwise: AttendOtherwise | None = None,
    *,
    with_lse: bool,
) -> tuple[dict[Entries, Array], dict[Entries, Array]]:
    """Return the outputs of all groups, (n, Hq, L, Ev), and with `with_lse` the log-sum-exps, (n, Hq, L, 1).

    Threads share groups that are too small for threads. The arrays of a group are created only when the group
    is computed, so that few copies exist at once. Outputs are written to `packed` instead, if it is given.
    `attend_otherwise` may compute a group in another way. A device is waited for once, after the last group.
    """
    dropout = call.draw_dropout()
    outputs: dict[Entries, Array] = {}
    lses: dict[Entries, Array] = {}
    # Inputs of packed sequences are stacked in buffers, which have the dtype of the scores.
    keeps_buffers = call.grid.library.keeps_buffers and call.grid.dtype == call.result_dtype
    lent = call_buffers(call.grid) if packed is not None and keeps_buffers else nullcontext()

    def compute(group: Group, checksums: list[Array] | None = None, is_guarded: bool = False) -> None:
        arrays = arrays_of(group, buffers)
        out = None if packed is None else packed.view(group.entries)
        state = None if attend_otherwise is None else attend_otherwise(group, arrays, dropout)
        if state is None:
            with computing(arrays.query):  # here too: a library may keep this setting for each thread
                options = group.options._replace(dropout=dropout)
                if is_guarded:
                    options = options._replace(finite_inputs=frozenset())
                state = streaming.attend(
                    Scores(group.grid, arrays.query, arrays.key, options),
                    arrays.value,
                    group.plan,
                    call.result_dtype,
                    with_lse=with_lse,
                    out=out,
                    checksums=checksums,
                )
        output, lse = state
        if packed is None:
            outputs[group.entries] = output
        elif output is not out:
            packed.write(group.entries, output)
        if with_lse:
            lses[group.entries] = cast(Array, lse)

    small = [group for group in groups if group.plan.threads == 1]
    work = sum(math.prod(group.grid.shape) for group in small) * widths
    has_threads = len(small) > 1 and takes_threads(call.grid, work)
    with lent as buffers:
        if call.grid.waits:
            _compute_on_device(compute, groups)
            return outputs, lses
        if len(small) == len(groups) and not has_threads:
            threads.run(compute, small, 1)
            return outputs, lses
        # Once for all groups, because a BLAS takes milliseconds to change its threads.
        with threads.one_blas_thread(call.grid.uses_our_threads):
            for group in groups:
                if group.plan.threads != 1:
                    compute(group)
            threads.run(compute, small, None if has_threads else 1)
    return outputs, lses


def _compute_on_device(compute: Callable[..., None], groups: Sequence[Group]) -> None:
    """Compute groups, and those with a NaN or inf a second time, guarded. The device is waited for once."""
    checksums: list[list[Array]] = [[] for _ in groups]
    for group, of_group in zip(groups, checksums, strict=True):
        compute(group, of_group)
    flags = iter(are_finite([*chain(*checksums)]) if any(checksums) else ())
    for group, of_group in zip(groups, checksums, strict=True):
        if False in [next(flags) for _ in of_group]:  # a list, so that all flags of the group are taken
            compute(group, is_guarded=True)


class PackedOutput:
    """An output (heads, T, width) whose sequences are written one group at a time."""

    def __init__(self, call: PreparedCall, starts: Sequence[int], width: int) -> None:
        xp, grid = call.grid.xp, call.grid
        shape = (grid.heads, starts[-1], width)
        if call.layout == LHE:  # in the caller's order in memory, too
            shape = (starts[-1], grid.heads, width)
        array = xp.zeros(shape, dtype=call.result_dtype, device=grid.device)
        self.array = swap_heads_and_length(xp, array, call.layout)
        self.starts = starts

    def view(self, entries: Entries) -> Array | None:
        """Return the place of contiguous sequences, (n, heads, length, width), or None."""
        return stack_sequences(self.array, self.starts, entries) if is_contiguous(entries) else None

    def write(self, entries: Entries, output: Array) -> None:
        """Write the output of sequences, (n, heads, length, width)."""
        for n, entry in enumerate(entries):
            self.array[:, self.starts[entry] : self.starts[entry + 1], :] = output[n, ...]


def lengths_of(starts: Sequence[int]) -> list[int]:
    """Return the length of each sequence of a packed array, from where they begin and where the last ends."""
    return [last - first for first, last in pairwise(starts)]


def in_parts(entries: Entries, most: int) -> Iterator[Entries]:
    """Cut sequences into parts of at most `most`; contiguous ones need no copy, and stay together."""
    step = len(entries) if is_contiguous(entries) else max(1, most)
    return (entries[first : first + step] for first in range(0, len(entries), step))


def is_contiguous(entries: Entries) -> bool:
    """Return whether no other sequence lies between these."""
    return entries[-1] - entries[0] == len(entries) - 1


def stack_sequences(
    array: Array, starts: Sequence[int], entries: Entries, buffer: Buffer | None = None
) -> Array:
    """Return sequences of equal lengths of a packed array (heads, T, width) as (n, heads, length, width).

    Contiguous ones are a view; others are copied, into `buffer` if there is one.
    """
    xp, first, length = namespace_of(array), starts[entries[0]], starts[entries[0] + 1] - starts[entries[0]]
    if not is_contiguous(entries):
        sequences = [array[:, starts[n] : starts[n + 1], :] for n in entries]
        return xp.stack(sequences, axis=0) if buffer is None else buffer.stack(sequences)
    heads, _, width = array.shape
    tokens = array[:, first : first + len(entries) * length, :]
    return xp.permute_dims(xp.reshape(tokens, (heads, len(entries), length, width)), (1, 0, 2, 3))


def pack_sequences(outputs: Mapping[Entries, Array], starts: Sequence[int]) -> Array:
    """Return outputs (n, heads, length, width) of all sequences as one packed array (heads, T, width).

    Rows of padding are left out.
    """
    parts: dict[int, Array] = {}
    for entries, output in outputs.items():
        xp, lengths = namespace_of(output), [starts[entry + 1] - starts[entry] for entry in entries]
        heads, longest, width = output.shape[1:]
        if is_contiguous(entries) and min(lengths) == longest:
            joined = xp.permute_dims(output, (1, 0, 2, 3))
            parts[entries[0]] = xp.reshape(joined, (heads, len(entries) * longest, width))
        else:
            parts |= {entry: output[n, :, : lengths[n], :] for n, entry in enumerate(entries)}
    return xp.concat([parts[entry] for entry in sorted(parts)], axis=1)


def unstack(outputs: Mapping[Entries, Array]) -> Array:
    """Return outputs (n, heads, length, width) of all sequences in their order, (N, heads, length, width)."""
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    rows = {entry: part[n : n + 1, ...] for entries, part in outputs.items() for n, entry in enumerate(entries)}
    return namespace_of(rows[0]).concat([rows[entry] for entry in sorted(rows)], axis=0)
