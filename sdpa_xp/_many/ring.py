"""Attention over keys that are divided among devices which run one program, and send the keys to each other.

JAX's programs (`_libraries/programs.py`) say how arrays are sent, and how one program runs on all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._libraries.base import astype_if_needed
from sdpa_xp._libraries.capabilities import TRACED, DeviceRing
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._many import walks
from sdpa_xp._many.blocks import take_arrays
from sdpa_xp._many.cutting import readable_grid
from sdpa_xp._many.schedule import plan_ring, to_plain, to_zigzag
from sdpa_xp._many.walks import Operands, RingCall
from sdpa_xp._many.windows import merge_windows
from sdpa_xp._tiles.modifier import with_arrays
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.masks.algebra import AllOf, And, Mask


def attend(call: PreparedCall, ring: DeviceRing) -> Array:
    """Return the output (..., Hq, L, Ev) of a call, computed by the devices of a ring."""
    grid = replace(call.grid, device=None, access=TRACED)  # one program: its arrays are on no certain device
    schedule = plan_ring(ring.size, grid.queries, grid.keys, may_meet(call))
    bound = call.bind(replace(call.grid, device=None, access=call.grid.access._replace(waits=False)))
    # Sinks join the states at the end, once for each row.
    options, aligned = take_arrays(bound._replace(sinks=None, dropout=call.draw_dropout()))
    arrays, axes = [array.array for array in aligned], [array.axes for array in aligned]
    ring_call = RingCall(ring, schedule, grid, options, tuple(axes))
    inputs = [call.arrays[name] for name in ("query", "key", "value")]
    sinks = [] if bound.sinks is None else [bound.sinks]
    rows = [_row_axis(array, of_array) for array, of_array in zip(arrays, axes, strict=True)]

    def compute(*operands: Array) -> Array:
        return _on_a_device(ring_call, operands, rows, call.result_dtype, has_sinks=bool(sinks))

    output: Array = ring.run(
        compute, [*inputs, *arrays, *sinks], [-2, -2, -2, *rows, *[None] * len(sinks)], len(grid.shape)
    )
    return output


def _row_axis(array: Array, axes: Sequence[int | None]) -> int | None:
    """Return the axis of an array that lies along the queries, or None."""
    numbered = zip(range(-array.ndim, 0), axes, array.shape, strict=True)
    return next((number for number, axis, length in numbered if axis == -2 and length > 1), None)


def _on_a_device(
    call: RingCall, operands: Sequence[Array], rows: Sequence[int | None], dtype: object, *, has_sinks: bool
) -> Array:
    """Return the output of the queries of this device."""
    ring, xp = call.ring, call.grid.xp
    inputs, sinks = (operands[:-1], operands[-1]) if has_sinks else (operands, None)
    if call.schedule.is_zigzag:
        axes = [-2, -2, -2, *rows]
        inputs = [
            x if axis is None else to_zigzag(ring, xp, x, axis) for x, axis in zip(inputs, axes, strict=True)
        ]
    query, key, value, *arrays = inputs
    output, *_ = merge_windows([walks.attend(call, Operands(query, key, value, tuple(arrays)))], sinks)
    output = astype_if_needed(xp, output, dtype)
    return to_plain(ring, xp, output, -2) if call.schedule.is_zigzag else output


def may_meet(call: PreparedCall) -> Callable[[range, range], bool]:
    """Return a function of some queries and some keys: whether the masks let any pair of them attend.

    A mask whose arrays are inputs of a jit lets all of them meet here, and decides on the devices.
    """
    grid, known_values = readable_grid(call), call.grid.library.known_values
    parts = [part for mask in call.options.masks for part in (mask.parts if isinstance(mask, And) else (mask,))]
    known: list[Mask] = []
    for part in parts:
        if all(known_values(array) is not array for _, array in part.arrays()):
            known.append(with_arrays(part, known_values))
    # A mask left out of an intersection allows more pairs, so no block is skipped that has one.
    pattern = AllOf(tuple(mask.bind(grid) for mask in known))
    return lambda rows, columns: pattern.uniform(Tile(rows, columns, grid)) is not False
