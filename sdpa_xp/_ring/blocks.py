"""A block of a ring: some queries of a device against some keys that have come by."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sdpa_xp._chunks.cutting import Axis
from sdpa_xp._chunks.slots import put_blocks
from sdpa_xp._core import streaming
from sdpa_xp._core.key_value_source import ArraySource
from sdpa_xp._core.scores import BoundOptions, Scores
from sdpa_xp._core.window import PlacedWindow
from sdpa_xp._libraries.programs import DeviceRing
from sdpa_xp._libraries.protocols import Array, Part
from sdpa_xp._ring.schedule import Schedule
from sdpa_xp._tiles.plan import plan_tiles
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import WindowPlace

State: TypeAlias = tuple[Array, Array, Array]
"""Output (..., Hq, rows, Ev), and two numbers that add up to the log-sum-exp (..., Hq, rows).

All have the accumulation dtype.
"""


class Operands(NamedTuple):
    """What a block is computed from, or all that a device holds."""

    query: Array
    key: Array
    value: Array
    arrays: tuple[Array, ...] = ()
    """Those of the options."""


class RingCall(NamedTuple):
    """What all blocks share."""

    ring: DeviceRing
    schedule: Schedule
    grid: ScoreGrid
    """That of the whole call."""
    options: BoundOptions
    """With slots instead of arrays, and without the sinks."""
    axes: tuple[tuple[Axis, ...], ...]
    """The axes of the scores along which `Operands.arrays` lie."""


class BlockPlace(NamedTuple):
    """Which queries of this device meet which keys: numbers that are known on the device."""

    row: Array
    """The first query among those of the device."""
    column: Array
    """The first key among those that have come by."""
    query_start: Array
    key_start: Array


def window_of(call: RingCall, place: BlockPlace) -> PlacedWindow:
    """Return the window of a block."""
    schedule = call.schedule
    return PlacedWindow(
        call.grid, WindowPlace(place.query_start, place.key_start, schedule.queries, schedule.keys)
    )


def operands_of(call: RingCall, operands: Operands, place: BlockPlace) -> Operands:
    """Return the part of what a device holds that belongs to a block."""
    part, columns = call.ring.part, columns_of(call, place)
    return Operands(
        part(operands.query, rows_of(call, place)),
        part(operands.key, columns),
        part(operands.value, columns),
        tuple(part(array, parts_of_array(call, n, array, place)) for n, array in enumerate(operands.arrays)),
    )


def rows_of(call: RingCall, place: BlockPlace, axis: int = -2) -> list[Part]:
    """Return the queries of a block, of those of the device."""
    return [Part(axis, place.row, call.schedule.queries)]


def columns_of(call: RingCall, place: BlockPlace) -> list[Part]:
    """Return the keys of a block, of those that have come by."""
    return [Part(-2, place.column, call.schedule.keys)]


def parts_of_array(call: RingCall, number: int, array: Array, place: BlockPlace) -> list[Part]:
    """Return a block's part of one of `Operands.arrays`, which has the rows of the device, and all columns."""
    parts = []
    for axis, length in zip(range(-array.ndim, 0), array.shape, strict=True):
        along = call.axes[number][axis]
        if along == -2 and length > 1:
            parts.append(Part(axis, place.row, call.schedule.queries))
        elif along == -1 and length > 1:
            parts.append(Part(axis, place.key_start, call.schedule.keys))
    return parts


def state_of(call: RingCall, block: Operands, place: BlockPlace) -> State:
    """Return attention of a block."""
    window = window_of(call, place)
    options = window.options(put_blocks(call.options, block.arrays))
    scores = Scores(window.grid, block.query, ArraySource(block.key), options)
    widths = block.query.shape[-1] + block.value.shape[-1]
    plan = plan_tiles(window.grid, scores.group, widths)
    output, lse = streaming.attend(scores, ArraySource(block.value), plan, call.grid.dtype, in_parts=True)
    assert lse is not None
    return output, lse[..., 0], lse[..., 1]
