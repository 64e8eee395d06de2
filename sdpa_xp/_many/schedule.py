"""Which device holds which queries and keys, and which way the keys travel: all that is known before a run.

The axis of a mesh has n devices. The sequence is cut into n or 2 n pieces:

    plain       device d holds piece d, or the pieces 2 d and 2 d + 1
    zig-zag     device d holds the pieces d and 2 n - 1 - d, so that early and late queries are on each device

Zig-zag is the balanced order of a causal mask: Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783,
section 3.3.2. The busiest of 4 devices then computes 2.25 blocks instead of 3.75, and that of 8 devices 4.25
instead of 7.75, with gradients twice as many (counted on devices of the CPU, JAX 0.10). Other masks may be done
sooner in the plain order, which needs no exchange. So all are tried, and the one whose busiest devices compute
least is taken.

For zig-zag, each device exchanges its two halves with two others. Device d has the pieces 2 d and 2 d + 1, and
is to have d and 2 n - 1 - d. The first halves of all devices go to one device each, even pieces below n and odd
ones from n on; and so do the second halves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .._checks.arrays import slice_of_axis
from .._libraries.meshes import DeviceRing
from .._libraries.protocols import Array, Namespace


class Walk(NamedTuple):
    """Keys that travel: at step s device d has the keys of device d - s."""

    direction: int
    """1 for steps 0, 1, 2, ...; -1 for steps -1, -2, ..."""
    steps: tuple[int, ...]


class Schedule(NamedTuple):
    """Where the pieces lie, which of them meet, and how the keys travel."""

    pieces: tuple[tuple[int, ...], ...]
    """The numbers of the pieces of each device."""
    queries: int
    """The length of a piece of queries."""
    keys: int
    """The length of a piece of keys."""
    meets: tuple[tuple[bool, ...], ...]
    """Whether a pair may attend, by the number of the piece of the queries and that of the keys."""
    walks: tuple[Walk, ...]

    @property
    def devices(self) -> int:
        return len(self.pieces)

    @property
    def pieces_each(self) -> int:
        return len(self.pieces[0])

    @property
    def is_zigzag(self) -> bool:
        """Whether the pieces lie in another order than the sequence."""
        return self.pieces != _plain(self.devices, self.pieces_each)

    @property
    def is_full(self) -> bool:
        """Whether all pieces meet."""
        return all(map(all, self.meets))

    @property
    def hops(self) -> int:
        """How often the keys of each device are sent on."""
        return sum(len(walk.steps) for walk in self.walks) - 1

    def blocks_at(self, step: int) -> list[int]:
        """Return how many blocks each device computes at a step."""
        keys = [self.pieces[(device - step) % self.devices] for device in range(self.devices)]
        pairs = zip(self.pieces, keys, strict=True)
        return [sum(self.meets[i][j] for i in rows for j in columns) for rows, columns in pairs]

    @property
    def cost(self) -> tuple[float, int, int]:
        """The pairs that the busiest device of each step computes, then what travels, then the pieces."""
        busiest = sum(max(self.blocks_at(step)) for step in range(self.devices))
        # All devices wait for the slowest before keys travel on, so each step counts its busiest device.
        return busiest / self.pieces_each**2, self.hops + self.is_zigzag, self.pieces_each


def plan_ring(devices: int, queries: int, keys: int, meet: Callable[[range, range], bool]) -> Schedule:
    """Return the best schedule; `meet` says whether a pair of some queries and some keys may attend."""
    orders = [_plain(devices, 1)]
    # A device with two pieces computes fewer blocks that a mask empties, for twice as many, smaller products.
    if devices > 1 and queries % (2 * devices) == keys % (2 * devices) == 0:
        zigzag = tuple((d, 2 * devices - 1 - d) for d in range(devices))
        orders += [_plain(devices, 2), zigzag]
    return min((_schedule(order, queries, keys, meet) for order in orders), key=lambda schedule: schedule.cost)


def _plain(devices: int, count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(count * d, count * (d + 1))) for d in range(devices))


def _schedule(
    pieces: tuple[tuple[int, ...], ...], queries: int, keys: int, meet: Callable[[range, range], bool]
) -> Schedule:
    devices, count = len(pieces), len(pieces) * len(pieces[0])
    rows, columns = queries // count, keys // count
    row_ranges = [range(n * rows, (n + 1) * rows) for n in range(count)]
    column_ranges = [range(n * columns, (n + 1) * columns) for n in range(count)]
    meets = tuple(tuple(meet(i, j) for j in column_ranges) for i in row_ranges)
    still = Schedule(pieces, rows, columns, meets, ())
    steps = {step for step in range(devices) if any(still.blocks_at(step))}
    return still._replace(walks=_walks({0, *steps}, devices))


def _walks(steps: Iterable[int], devices: int) -> tuple[Walk, ...]:
    """Return walks in both directions that come by all steps, and leave out the longest row of others."""
    ordered = [*sorted(steps), devices]
    gaps = [after - before for before, after in itertools.pairwise(ordered)]
    # Of equal gaps the last one is left out, so that keys that all devices need travel in one direction.
    longest = max(range(len(gaps)), key=lambda number: (gaps[number], number))
    forward, backward = ordered[longest], devices - ordered[longest + 1]
    walks = [Walk(1, tuple(range(forward + 1)))]
    if backward:
        walks.append(Walk(-1, tuple(range(-1, -backward - 1, -1))))
    return tuple(walks)


def to_zigzag(ring: DeviceRing, xp: Namespace, array: Array, axis: int) -> Array:
    """Return the pieces d and 2 n - 1 - d of an array whose pieces 2 d and 2 d + 1 each device has."""
    first, second = (
        ring.permuted(half, _devices_of(ring.size, number)) for number, half in enumerate(_halves(array, axis))
    )
    return _joined_by_parity(ring, xp, first, second, axis)


def to_plain(ring: DeviceRing, xp: Namespace, array: Array, axis: int) -> Array:
    """Return the pieces 2 d and 2 d + 1 of an array whose pieces d and 2 n - 1 - d each device has."""
    early, late = _halves(array, axis)
    joined = _joined_by_parity(ring, xp, early, late, axis)
    halves = []
    for number, half in enumerate(_halves(joined, axis)):
        homes = [0] * ring.size
        for home, device in enumerate(_devices_of(ring.size, number)):
            homes[device] = home
        halves.append(ring.permuted(half, homes))
    return xp.concat(halves, axis=axis)


def _devices_of(devices: int, half: int) -> list[int]:
    """Return for each device the device that its first or second half belongs to."""
    pieces = [2 * device + half for device in range(devices)]
    return [min(piece, 2 * devices - 1 - piece) for piece in pieces]


def _halves(array: Array, axis: int) -> tuple[Array, Array]:
    half = array.shape[axis] // 2
    return array[slice_of_axis(axis, 0, half)], array[slice_of_axis(axis, half, 2 * half)]


def _joined_by_parity(ring: DeviceRing, xp: Namespace, first: Array, second: Array, axis: int) -> Array:
    """Join two halves, on devices with odd numbers the other way round."""
    is_even = ring.number() % 2 <= 0  # `==` would be a bool for the type checker
    halves = xp.where(is_even, first, second), xp.where(is_even, second, first)
    return xp.concat(halves, axis=axis)
