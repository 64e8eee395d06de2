"""The generator of a call with dropout: a call that fails draws nothing from it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sdpa_xp._libraries import Library


class Undrawn:
    """A context in which an error leaves a generator as it was before, so that the call can be made again.

    Keys of JAX and MLX have no state, and that of a cupy.random.Generator cannot be read.
    """

    def __init__(self, rng: Any, library: Library, inner: AbstractContextManager[object]) -> None:
        self.rng, self.library, self.inner = rng, library, inner

    def __enter__(self) -> None:
        self.state = self.library.rng_state(self.rng)
        self.inner.__enter__()

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        self.inner.__exit__(error, *rest)
        if error is not None and self.state is not None:
            self.library.restore_rng(self.rng, self.state)
