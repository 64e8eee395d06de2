"""The hash that dropout draws from is the published one."""

from __future__ import annotations

from typing import Any

import numpy as np
from internals import dropout

ALL = 2**32 - 1
EDGES = [0, 1, 2, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]


def lowbias32(x: int) -> int:
    """As published, in unsigned numbers: github.com/skeeto/hash-prospector."""
    x ^= x >> 16
    x = x * 0x7FEB352D & ALL
    x ^= x >> 15
    x = x * 0x846CA68B & ALL
    return x ^ x >> 16


def test_signed_numbers_are_mixed_as_unsigned_ones() -> None:
    numbers = [*EDGES, *np.random.default_rng(0).integers(0, 2**32, 1000).tolist()]
    signed: Any = np.asarray(numbers, np.uint32).view(np.int32)
    with np.errstate(over="ignore"):
        mixed = np.asarray(dropout._mix(signed)).view(np.uint32).tolist()
    assert mixed == [lowbias32(number) for number in numbers]
