"""From the order of the sequence to zig-zag, and back: each device exchanges its two halves with two others.

Device d has the pieces 2 d and 2 d + 1, and is to have d and 2 n - 1 - d. The first halves of all devices go to
one device each, even pieces below n and odd ones from n on; and so do the second halves.
"""

from __future__ import annotations

from sdpa_xp._libraries.programs import DeviceRing
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp._tiles.layout import slice_of_axis


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
    is_even = ring.number() % 2 <= 0
    halves = xp.where(is_even, first, second), xp.where(is_even, second, first)
    return xp.concat(halves, axis=axis)
