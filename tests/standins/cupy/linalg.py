"""The one name that array-api-compat imports."""

from __future__ import annotations

from typing import Any


def lstsq(*arguments: Any, **keywords: Any) -> Any:
    """Refuse to compute."""
    raise NotImplementedError("the rules of CuPy have no linalg.lstsq")
