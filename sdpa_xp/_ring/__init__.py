"""Attention over keys that are divided among devices which run one program, and send the keys to each other.

    schedule    which device has which queries and keys, and which way the keys travel
    blocks      some queries of a device against some keys that have come by
    walks       around the ring: states merge, gradients travel with the keys

JAX's programs (`_libraries/programs.py`) say how arrays are sent, and how one program runs on all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._chunks.slots import take_arrays
from sdpa_xp._core.online_softmax import merge
from sdpa_xp._libraries import TRACED, astype_if_needed
from sdpa_xp._libraries.programs import DeviceRing
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._ring import walks
from sdpa_xp._ring.blocks import Operands, RingCall
from sdpa_xp._ring.exchange import to_plain, to_zigzag
from sdpa_xp._ring.reach import may_meet
from sdpa_xp._ring.schedule import Schedule, plan_ring


def attend(call: PreparedCall, ring: DeviceRing) -> Array:
    """Return the output (..., Hq, L, Ev) of a call, computed by the devices of a ring."""
    grid = replace(call.grid, device=None, access=TRACED)
    schedule = schedule_of(call, ring.size)
    bound = call.bind(replace(call.grid, device=None, access=call.grid.access._replace(waits=False)))
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


def schedule_of(call: PreparedCall, devices: int) -> Schedule:
    """Return which device computes what."""
    return plan_ring(devices, call.grid.queries, call.grid.keys, may_meet(call))


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
    state = walks.attend(call, Operands(query, key, value, tuple(arrays)))
    output, large, _ = state
    if sinks is not None:  # a sink is the state of a key whose value is 0
        of_sinks = xp.broadcast_to(sinks[..., 0], large.shape)
        output, *_ = merge(xp, [state, (xp.zeros_like(output), of_sinks, 0.0)])
    output = astype_if_needed(xp, output, dtype)
    return to_plain(ring, xp, output, -2) if call.schedule.is_zigzag else output
