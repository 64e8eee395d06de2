"""An error of the system in the words of ours."""

from __future__ import annotations


def worded(error: OSError, text: str) -> OSError:
    """An error of the class and the number of `error` that says `text`, and no number before it."""
    made = type(error)(text)
    made.errno = error.errno
    return made


def reason(error: OSError) -> str:
    """What went wrong, without the path, which may be one that the user never named."""
    return error.strerror or str(error)
