"""Streams: work is done at once here, so that they have nothing to do."""

from __future__ import annotations


class Stream:
    """A stream, which is current inside of its context."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def get_current_stream() -> Stream:
    """Return a stream."""
    return Stream()
