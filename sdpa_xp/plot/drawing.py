"""The library that draws, which is an extra of the installation."""

from __future__ import annotations

from importlib import import_module

from sdpa_xp import _checks as checks


def need_matplotlib(function: str) -> None:
    """Refuse a picture where matplotlib is not installed, with what brings it."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        rule, hint = "matplotlib must be installed", "`pip install 'sdpa_xp[plot]'` brings it."
        raise ModuleNotFoundError(
            checks.message(function, rule, {"error": error}, hint), name="matplotlib"
        ) from None
