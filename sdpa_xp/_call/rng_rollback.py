"""The generator of a call with dropout: a call that fails draws nothing from it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sdpa_xp._libraries.base import Library


class RngRollback:
    """A context in which an error gives a generator back its state, so that the call can be made again.

    Keys have no state, and the state of some generators cannot be read: these are not restored.
    """

    def __init__(self, rng: Any, library: Library, context: AbstractContextManager[object]) -> None:
        self.rng, self.library, self.context = rng, library, context

    def __enter__(self) -> None:
        self.state = self.library.generators.state(self.rng)
        self.context.__enter__()

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        self.context.__exit__(error, *rest)
        if error is not None and self.state is not None:
            self.library.generators.restore(self.rng, self.state)
