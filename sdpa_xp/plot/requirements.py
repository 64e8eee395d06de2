"""Matplotlib, which only an extra of the package installs."""

from __future__ import annotations

from importlib import import_module

from sdpa_xp._checks.messages import install_hint
from sdpa_xp.errors import Message


def require_matplotlib(function: str) -> None:
    """Raise an error that says how to install matplotlib, if it is not installed."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        rule, hint = "matplotlib must be installed", install_hint("plot")
        raise ModuleNotFoundError(Message(function, rule, {"error": error}, hint), name="matplotlib") from None
