"""How many threads the environment allows: SDPA_XP_NUM_THREADS, and the cores of this process."""

from __future__ import annotations

import os

from sdpa_xp.errors import ArgumentValueError

VARIABLE = "SDPA_XP_NUM_THREADS"


def asked_threads() -> int | None:
    """Return the number of threads that the environment asks for, or None if it does not say.

    Raises:
        ValueError: The variable holds something other than a positive integer.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        rule = f"the environment's {VARIABLE} must be a positive integer"
        raise ArgumentValueError("sdpa_xp", rule, {VARIABLE: text})
    return int(text)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
