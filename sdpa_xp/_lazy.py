"""Public names of a folder whose files are loaded when a name is first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module


def loaded(package: str, name: str, files: Mapping[str, str]) -> object:
    """Return what a file of `package` defines as `name`. `files` has the names of each file, in one text."""
    for file, names in files.items():
        if name in names.split():
            value = getattr(import_module(f"{package}.{file}"), name)
            setattr(sys.modules[package], name, value)
            return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
