"""Which device holds which queries and keys, and which way the keys travel: all that is known before a run.

The axis of a mesh has n devices. The sequence is cut into n or 2 n pieces:

    plain       device d holds piece d, or the pieces 2 d and 2 d + 1
    zig-zag     device d holds the pieces d and 2 n - 1 - d, so that early and late queries are on each device

Zig-zag is the balanced order of a causal mask: Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783,
section 3.3.2. Other masks may be done sooner in the plain order, which needs no exchange. So all are tried, and
the one whose busiest devices compute least is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple


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
    blocks: tuple[tuple[tuple[tuple[bool, ...], ...], ...], ...]
    """Whether pairs may attend, by the device of the queries, that of the keys, and the pieces of both."""
    walks: tuple[Walk, ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.pieces)

    @property
    def pieces_each(self) -> int:
        """The number of pieces of a device."""
        return len(self.pieces[0])

    @property
    def is_zigzag(self) -> bool:
        """Whether the pieces lie in another order than the sequence."""
        return self.pieces != _plain(self.devices, self.pieces_each)

    @property
    def is_full(self) -> bool:
        """Whether all pieces meet."""
        return all(met for of_device in self.blocks for met in _flat(of_device))

    @property
    def hops(self) -> int:
        """How often the keys of each device are sent on."""
        return sum(len(walk.steps) for walk in self.walks) - 1

    def blocks_at(self, step: int) -> list[int]:
        """Return how many blocks each device computes at a step."""
        return [sum(_flat((self.blocks[d][(d - step) % self.devices],))) for d in range(self.devices)]

    @property
    def cost(self) -> tuple[float, int, int]:
        """The pairs that the busiest device of each step computes, then what travels, then the pieces."""
        busiest = sum(max(self.blocks_at(step)) for step in range(self.devices))
        return busiest / self.pieces_each**2, self.hops + self.is_zigzag, self.pieces_each


def plan_ring(devices: int, queries: int, keys: int, meet: Callable[[range, range], bool]) -> Schedule:
    """Return the best schedule; `meet` says whether a pair of some queries and some keys may attend."""
    orders = [_plain(devices, 1)]
    if devices > 1 and queries % (2 * devices) == keys % (2 * devices) == 0:
        orders += [_plain(devices, 2), _zigzag(devices)]
    return min((_schedule(order, queries, keys, meet) for order in orders), key=lambda schedule: schedule.cost)


def _plain(devices: int, count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(count * d, count * (d + 1))) for d in range(devices))


def _zigzag(devices: int) -> tuple[tuple[int, ...], ...]:
    return tuple((d, 2 * devices - 1 - d) for d in range(devices))


def _schedule(
    pieces: tuple[tuple[int, ...], ...], queries: int, keys: int, meet: Callable[[range, range], bool]
) -> Schedule:
    devices, count = len(pieces), len(pieces) * len(pieces[0])
    rows, columns = queries // count, keys // count

    def met(i: int, j: int) -> bool:
        return meet(range(i * rows, (i + 1) * rows), range(j * columns, (j + 1) * columns))

    all_met = [[met(i, j) for j in range(count)] for i in range(count)]
    blocks = tuple(
        tuple(tuple(tuple(all_met[i][j] for j in of_keys) for i in of_queries) for of_keys in pieces)
        for of_queries in pieces
    )
    steps = [
        s for s in range(devices) if any(any(_flat((blocks[d][(d - s) % devices],))) for d in range(devices))
    ]
    return Schedule(pieces, rows, columns, blocks, _walks({0, *steps}, devices))


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


def _flat(blocks: Iterable[Iterable[Iterable[bool]]]) -> Iterable[bool]:
    return (met for of_keys in blocks for row in of_keys for met in row)
