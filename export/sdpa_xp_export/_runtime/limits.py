"""What a model may take that is verified: time, also for what this process computes itself, and memory.

A file states the call, and so how long the reference takes. The loops of the reference ask here whether the
time is up, as no other process can be ended for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real

from sdpa_xp._checks.keywords import check_integer
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

TIMEOUT = 3600.0
"""Seconds of all runs together."""


class ModelFailedError(ValueError):
    """An engine cannot load or run a model: a fault of the model or of the release, not of the arguments."""


def check_limits(function: str, timeout: object, memory: object) -> None:
    """Check what a caller passed as limits."""
    rule, got = "`timeout` must be a positive number of seconds", {"timeout": repr(timeout)}
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise ArgumentTypeError(function, rule, got)
    if not float(timeout) > 0:
        raise ArgumentValueError(function, rule, got, "Infinity is no limit: pass inf.")
    if memory is not None:
        check_integer(function, "memory", memory, least=1, most=2**62)


@dataclass(slots=True)
class Deadline:
    """A limit of time, and when it ends; a block of `paused` moves the end."""

    seconds: float
    end: float


# A context variable, so that two threads that verify at once have each a deadline of its own.
_PRESENT: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Let `check_time` raise in this block when the seconds are over."""
    token = _PRESENT.set(Deadline(seconds, time.perf_counter() + seconds))
    try:
        yield
    finally:
        _PRESENT.reset(token)


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of the deadline, if there is one, for what is no fault of the model."""
    start, present = time.perf_counter(), _PRESENT.get()
    try:
        yield
    finally:
        if present is not None:
            present.end += time.perf_counter() - start


def check_time() -> None:
    """Raise a ModelFailedError if there is a deadline and it is over."""
    present = _PRESENT.get()
    if present is not None and time_left() < 0:
        rule = "the inputs and the reference of `model` must be computed within the limit of time"
        hint = "If you trust the model, pass a larger `timeout`."
        raise ModelFailedError(Message("verify", rule, {"timeout": shown_limit(present.seconds)}, hint))


def time_left() -> float:
    """Return the seconds until the deadline, negative if it is over; infinite if there is none."""
    present = _PRESENT.get()
    return math.inf if present is None else present.end - time.perf_counter()


def failed(
    doing: str, reason: object, function: str = "verify", engine: str = "onnxruntime"
) -> ModelFailedError:
    """Return the error of a model that an engine does not load or run; its errors have no common base."""
    rule = f"{engine} must {doing} `model`"
    return ModelFailedError(Message(function, rule, {"its error": reason}))


def shown_limit(seconds: float) -> str:
    """Return a limit of time as messages show it."""
    return f"{seconds:g} s, of all runs together"
