"""Options that several commands share, and the values that a shell completes them with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from sdpa_xp_export._runtime.releases import PROVIDERS

DTYPES = ("float32", "float16", "bfloat16", "float64")


def completed_from(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion by the values that begin like the word under the cursor; it checks nothing."""
    known = tuple(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return complete


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Provider = Annotated[
    str | None,
    typer.Option(
        help="cpu or cuda. Default: all that onnxruntime offers.", autocompletion=completed_from(PROVIDERS)
    ),
]
