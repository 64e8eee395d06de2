"""The text of an error inside another message."""

from __future__ import annotations


def first_sentence(error: Exception) -> str:
    """Return what an error says first, without its hint and the last full stop, so that two are one message."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0].rstrip(".")
