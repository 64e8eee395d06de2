"""Write a model to a file: whole or not at all, and never over another unless told to."""

from __future__ import annotations

import os
import uuid
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
        FileExistsError: `path` is there and `overwrite` is False; or it is no regular file.
        FileNotFoundError: Its folder is not there.
        OSError: The disk is full, or the folder cannot be written to.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise FileExistsError(message("save", "`path` must be a file", {"path": target}))
    if not target.parent.is_dir():
        raise FileNotFoundError(message("save", "the folder of `path` must exist", {"path": target}))
    unfinished = target.parent / f".{uuid.uuid4().hex}.onnx"
    try:
        with unfinished.open("xb") as file:
            file.write(model.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            unfinished.replace(target)
        else:
            _publish(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _publish(unfinished: Path, target: Path) -> None:
    """Give the finished file its name, unless the name is taken: one step, so that no writer is overrun."""
    try:
        os.link(unfinished, target)
    except FileExistsError:
        hint = "Pass overwrite=True (--force) to replace it."
        raise FileExistsError(message("save", "`path` must not exist", {"path": target}, hint)) from None
