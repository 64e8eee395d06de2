"""Around the ring: each device meets the keys that come by, and merges the states over them.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889, section 3.

A device sends keys on while it computes with them. Gradients of keys travel with the keys: each device adds its
part, and the last one sends them home. So a device holds two blocks of keys at a time, for gradients too, which
compute the scores of a block again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar, cast

from .._libraries import FLOATING, astype_if_needed, dtype_name
from .._libraries.meshes import DeviceRing
from .._libraries.protocols import Array, Part
from .._programs import BoundOptions
from .._run import finite_shift
from .._tiles.grid import ScoreGrid, WindowBounds
from .blocks import Axis, put_blocks
from .schedule import Schedule, Walk
from .windows import PlacedWindow, State, merge_windows, state_without_keys, window_scores, window_state

T = TypeVar("T")
V = TypeVar("V")
KeysAndValues: TypeAlias = tuple[Array, Array]
Meet: TypeAlias = Callable[[KeysAndValues, V, T, Array], tuple[V, T]]
"""What a device does with keys that have come by: (keys, what travels with them, what stays, step)."""


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
    """Which queries of this device meet which keys. Only the device knows these numbers."""

    row: Array
    """The first query among those of the device."""
    column: Array
    """The first key among those that have come by."""
    window: WindowBounds
    """The place among all queries and keys."""

    def rows(self, axis: int = -2) -> list[Part]:
        """Return the queries of the block, of those of the device."""
        return [Part(axis, self.row, self.window.queries)]

    def columns(self) -> list[Part]:
        """Return the keys of the block, of those that have come by."""
        return [Part(-2, self.column, self.window.keys)]

    def parts_of(self, array: Array, axes: tuple[Axis, ...]) -> list[Part]:
        """Return the block's part of an array of the options, which has the device's rows and all columns."""
        parts = []
        for number, along, length in zip(range(-array.ndim, 0), axes, array.shape, strict=True):
            if along == -2 and length > 1:
                parts.append(Part(number, self.row, self.window.queries))
            elif along == -1 and length > 1:
                parts.append(Part(number, cast(Array, self.window.key_start), self.window.keys))
        return parts


class Gradients(NamedTuple):
    """Sums over the blocks of a device."""

    query: Array
    arrays: tuple[Array, ...]
    """Of the floating ones among `Operands.arrays`."""


Sums: TypeAlias = tuple[KeysAndValues, Gradients]
"""The sums of what travels with keys, and of what stays."""


def operands_of(call: RingCall, operands: Operands, place: BlockPlace) -> Operands:
    """Return the part of what a device holds that belongs to a block."""
    part, arrays = call.ring.part, zip(operands.arrays, call.axes, strict=True)
    return Operands(
        part(operands.query, place.rows()),
        part(operands.key, place.columns()),
        part(operands.value, place.columns()),
        tuple(part(array, place.parts_of(array, axes)) for array, axes in arrays),
    )


def state_of(call: RingCall, block: Operands, place: BlockPlace) -> State:
    """Return attention of a block: some queries of this device against some keys that have come by."""
    options = put_blocks(call.options, block.arrays)
    scores = window_scores(PlacedWindow(call.grid, place.window), block.query, block.key, options)
    return window_state(scores, block.value)


def attend(call: RingCall, operands: Operands) -> State:
    """Return attention of the queries of each device over the keys of all of them; it can be differentiated."""

    def compute(*arrays: Array) -> State:
        return _attend(call, _operands(arrays))

    def pull_back(arrays: tuple[Array, ...], state: State, cotangents: State) -> tuple[Array | None, ...]:
        return _gradients(call, _operands(arrays), state, cotangents)

    # Derivatives of JAX's own would keep the keys that come by at each step.
    state: State = call.ring.differentiable(compute, pull_back)(*operands[:3], *operands.arrays)
    return state


def _operands(arrays: tuple[Array, ...]) -> Operands:
    query, key, value, *rest = arrays
    return Operands(query, key, value, tuple(rest))


def _attend(call: RingCall, operands: Operands) -> State:
    ring, shape = call.ring, (*call.grid.leading_shape, operands.query.shape[-2])
    state = state_without_keys(call.grid, shape, operands.value.shape[-1])

    def meet(keys: KeysAndValues, travelling: tuple[()], state: State, step: Array) -> tuple[tuple[()], State]:
        present = operands._replace(key=keys[0], value=keys[1])

        def compute(place: BlockPlace, state: State) -> State:
            new = state_of(call, operands_of(call, present, place), place)
            output, large, small = merge_windows([_rows_of(call, state, place), new])
            return (
                ring.with_part(state[0], output, place.rows()),
                ring.with_part(state[1], large, place.rows(-1)),
                ring.with_part(state[2], small, place.rows(-1)),
            )

        return travelling, _at_blocks(call, step, compute, state)

    keys = operands.key, operands.value
    for walk in call.schedule.walks:
        begun = keys if walk.steps[0] == 0 else ring.sent(keys, walk.direction)
        _, state = _walk(call, walk, begun, (), state, meet)
    return state


def _gradients(call: RingCall, operands: Operands, state: State, cotangents: State) -> tuple[Array | None, ...]:
    """Return the gradients of all that a device holds, from its state and the cotangents of the state."""
    xp, ring, dtype = call.grid.xp, call.ring, call.grid.dtype
    floating = [n for n, array in enumerate(operands.arrays) if dtype_name(array.dtype) in FLOATING]

    def zeros(array: Array) -> Array:
        return xp.zeros(array.shape, dtype=dtype, device=None)

    def added(total: Array, part: Array, parts: list[Part]) -> Array:
        return ring.with_part(total, ring.part(total, parts) + part, parts)

    def meet(keys: KeysAndValues, travelling: KeysAndValues, staying: Gradients, step: Array) -> Sums:
        present = operands._replace(key=keys[0], value=keys[1])

        def compute(place: BlockPlace, sums: Sums) -> Sums:
            (of_key, of_value), staying = sums
            contribution = _gradients_of_block(call, present, place, state, cotangents, floating)
            of_arrays = tuple(
                added(total, part, place.parts_of(total, call.axes[number]))
                for total, part, number in zip(staying.arrays, contribution.arrays, floating, strict=True)
            )
            of_query = added(staying.query, contribution.query, place.rows())
            of_key = added(of_key, contribution.key, place.columns())
            of_value = added(of_value, contribution.value, place.columns())
            return (of_key, of_value), Gradients(of_query, of_arrays)

        return _at_blocks(call, step, compute, (travelling, staying))

    keys = operands.key, operands.value
    nothing = zeros(operands.key), zeros(operands.value)
    staying = Gradients(zeros(operands.query), tuple(zeros(operands.arrays[number]) for number in floating))
    # A device's own keys come first, whose gradients need not travel.
    of_keys, staying = meet(keys, nothing, staying, _number(call, 0))
    for walk in call.schedule.walks:
        walk = Walk(walk.direction, tuple(step for step in walk.steps if step))
        if walk.steps:
            begun = ring.sent(keys, walk.direction)
            travelled, staying = _walk(call, walk, begun, nothing, staying, meet)
            # Gradients that went along for s steps go home at once, not on around the ring.
            home = ring.sent(travelled, -walk.steps[-1])
            of_keys = of_keys[0] + home[0], of_keys[1] + home[1]
    of_arrays = dict(zip(floating, staying.arrays, strict=True))  # integers and booleans have no gradient
    numbers = range(len(operands.arrays))
    computed = (staying.query, *of_keys, *(of_arrays.get(number) for number in numbers))
    return tuple(
        None if gradient is None else astype_if_needed(xp, gradient, array.dtype)
        for gradient, array in zip(computed, (*operands[:3], *operands.arrays), strict=True)
    )


def _gradients_of_block(
    call: RingCall, operands: Operands, place: BlockPlace, state: State, cotangents: State, floating: list[int]
) -> Operands:
    r"""Return what a block contributes; of the arrays only to the `floating` ones.

    The output is $\sum_b w_b o_b$ with $w_b = \exp(lse_b - lse)$, so a block's output has the cotangent
    $w_b\,do$, and its log-sum-exp $w_b (dlse + do \cdot (o_b - o))$.
    """
    xp = call.grid.xp
    block = operands_of(call, operands, place)

    def compute(query: Array, key: Array, value: Array, *floating_arrays: Array) -> State:
        arrays = [*block.arrays]
        for number, array in zip(floating, floating_arrays, strict=True):
            arrays[number] = array
        return state_of(call, Operands(query, key, value, tuple(arrays)), place)

    differentiated = (*block[:3], *(block.arrays[number] for number in floating))
    # In the accumulation dtype, so that what blocks contribute is not rounded before it is added up.
    wide = [astype_if_needed(xp, array, call.grid.dtype) for array in differentiated]
    (of_block, large_of_block, small_of_block), pull_back = call.ring.pullback(compute, *wide)
    output, large, small = _rows_of(call, state, place)
    # Callers add the two parts of the log-sum-exp of a state, so both have the cotangent of the sum.
    of_output, _, of_lse = _rows_of(call, cotangents, place)
    weight = xp.exp(large_of_block - finite_shift(xp, large) + (small_of_block - small))
    change = xp.sum(of_output * (of_block - output), axis=-1)
    of_weighed, of_lse = of_output * xp.expand_dims(weight, axis=-1), weight * (of_lse + change)
    query, key, value, *arrays = pull_back((of_weighed, of_lse, of_lse))
    return Operands(query, key, value, tuple(arrays))


def _walk(
    call: RingCall, walk: Walk, keys: KeysAndValues, travelling: V, staying: T, meet: Meet[V, T]
) -> tuple[V, T]:
    """Let keys travel by one device from step to step; they are sent while they are computed with."""
    ring = call.ring

    def go(carried: tuple[KeysAndValues, V, T], step: Array) -> tuple[KeysAndValues, V, T]:
        keys, travelling, staying = carried
        following = ring.sent(keys, walk.direction)
        travelling, staying = meet(keys, travelling, staying, step)
        return following, ring.sent(travelling, walk.direction), staying

    # The last keys are sent to no one.
    keys, travelling, staying = ring.repeated(go, (keys, travelling, staying), walk.steps[:-1])
    return meet(keys, travelling, staying, _number(call, walk.steps[-1]))


def _at_blocks(call: RingCall, step: Array, compute: Callable[[BlockPlace, T], T], state: T) -> T:
    """Compute each block of this device at a step in which a pair may attend."""
    ring, schedule, xp = call.ring, call.schedule, call.grid.xp
    count, me = schedule.pieces_each, ring.number()
    owner = (me - step) % schedule.devices
    pieces = xp.asarray(schedule.pieces, dtype=xp.int32, device=None)
    meets = xp.asarray(schedule.meets, dtype=xp.bool, device=None)

    def meet_block(state: T, number: Array) -> T:
        row, column = number // count, number % count
        of_queries, of_keys = pieces[me, row], pieces[owner, column]
        queries, keys = schedule.queries, schedule.keys
        window = WindowBounds(queries, keys, of_queries * queries, of_keys * keys)
        place = BlockPlace(row * queries, column * keys, window)
        if schedule.is_full:  # no branch, which the compiler would have to keep
            return compute(place, state)
        return ring.only_if(meets[of_queries, of_keys], lambda state: compute(place, state), state)

    return ring.repeated(meet_block, state, range(count * count))


def _rows_of(call: RingCall, state: State, place: BlockPlace) -> State:
    output, large, small = state
    part, rows = call.ring.part, place.rows(-1)
    return part(output, place.rows()), part(large, rows), part(small, rows)


def _number(call: RingCall, number: int) -> Array:
    # `device=None` here and below: in a program of several devices, an array is on no certain one.
    return call.grid.xp.asarray(number, dtype=call.grid.xp.int32, device=None)
