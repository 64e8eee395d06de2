"""Streams: work is done at once here, so that they only have numbers."""

from __future__ import annotations

import itertools
import threading

_NUMBERS = itertools.count()
_THREAD = threading.local()


class Stream:
    """A stream, which is current inside of its context."""

    def __init__(self) -> None:
        self.ptr = next(_NUMBERS)
        self._previous: list[Stream] = []

    def __enter__(self) -> Stream:
        self._previous.append(get_current_stream())
        _THREAD.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _THREAD.stream = self._previous.pop()


_DEFAULT = Stream()


def get_current_stream() -> Stream:
    """Return the stream that launches go to."""
    stream: Stream = getattr(_THREAD, "stream", _DEFAULT)
    return stream
