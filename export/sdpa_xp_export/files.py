"""Write a model to a file: whole or not at all, and never over another unless told to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx

from sdpa_xp.checks import message


def save(model: onnx.ModelProto, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write `model` to `path`, which then holds all of it or what it held before.

    Args:
        model: What `export_attention` returned.
        path: The file; its folder must exist.
        overwrite: Whether a file that is there may be replaced.

    Returns:
        The path.

    Raises:
        FileExistsError: `path` is there and `overwrite` is False; or it is a folder.
        FileNotFoundError: Its folder is not there.
        OSError: The disk is full, or the folder cannot be written to.
    """
    target = Path(path)
    if target.is_dir():
        raise FileExistsError(message("save", "`path` must be a file", {"path": target}))
    if not target.parent.is_dir():
        raise FileNotFoundError(message("save", "the folder of `path` must exist", {"path": target}))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(model.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        if overwrite:
            os.replace(name, target)
        else:
            _publish(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _publish(name: str, target: Path) -> None:
    """Give the finished file its name, unless the name is taken: one step, so that no writer is overrun."""
    try:
        os.link(name, target)
    except FileExistsError:
        hint = "Pass overwrite=True (--force) to replace it."
        rule = "`path` must not exist"
        raise FileExistsError(message("save", rule, {"path": target}, hint)) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
