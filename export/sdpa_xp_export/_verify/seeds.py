"""The seed of a verification. Without one each verification draws its own, so that repeated ones see more."""

from __future__ import annotations

import secrets

from sdpa_xp._checks.numbers import check_integer

SEEDS = 2**32
"""The number of seeds that are drawn from; a caller may pass any integer from 0 on."""


def seed_of(function: str, seed: int | None) -> int:
    """Return the seed that a caller passed, or a new one."""
    if seed is None:
        return new_seed()
    check_integer(function, "seed", seed, least=0)
    return int(seed)


def new_seed() -> int:
    """Return a seed that nobody chose."""
    return secrets.randbelow(SEEDS)
