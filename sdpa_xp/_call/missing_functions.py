"""What a namespace lacks: the error names the called function, and the name that its namespace must have."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sdpa_xp._checks.arrays import explain_missing_name
from sdpa_xp._libraries.protocols import Namespace


class MissingFunctions:
    """A context in which the error for a name that a namespace lacks also names the called function."""

    def __init__(self, function: str, xp: Namespace, context: AbstractContextManager[object]) -> None:
        self.function, self.xp, self.context = function, xp, context

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: Any) -> None:
        self.context.__exit__(kind, error, *rest)
        if isinstance(error, AttributeError):
            explain_missing_name(self.function, self.xp, error)
