"""Write a model to a file: whole or not at all, and never over another unless told to."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError, EncodeError

from sdpa_xp.checks import message
from sdpa_xp_export.external import EXTERNAL_ABOVE, apart, held, locations
from sdpa_xp_export.publishing import Asked, free_target, give_name, in_words_of, write

ASKED = Asked("save", "path")

ALIGNED = 2**16
"""Each initializer in a data file begins at a multiple of this, so that any system can map it into memory."""


def save(
    model: onnx.ModelProto,
    path: str | Path,
    *,
    overwrite: bool = False,
    external_above: int = EXTERNAL_ABOVE,
) -> Path:
    """Write `model` to `path`, which then holds all of it or what it held before.

    A model of up to 2 GiB is one file, which is where protobuf ends. Beyond that its initializers go to a
    second file beside it, `<name>.<32 hex digits>.data`, under a name that no other save has. The data are
    complete before the model takes its own name, in one step: an interrupted save leaves the old model with its
    own data. When a model is replaced, the data file that it had by this naming is removed, and when a save
    fails, its own.

    Args:
        model: What `export_attention` returned; it is not changed.
        path: The file; its folder must exist. Through a link the file that it points to is written, and the
            link is kept. onnxruntime looks for external data beside the path that it is given, so open such a
            model by the path that is returned.
        overwrite: Whether a file that is there may be replaced.
        external_above: The bytes of initializers that the file itself may hold.

    Returns:
        The path of the file that holds the model, links resolved.

    Raises:
        TypeError: `model` is no ModelProto.
        ValueError: `model` refers to external data itself, or its graph alone is over 2 GiB.
        FileExistsError: `path` is there and `overwrite` is False; or it is no regular file.
        FileNotFoundError: Its folder is not there.
        OSError: The disk is full, or the folder cannot be written to.

    Examples:
        >>> import tempfile
        >>> from sdpa_xp_export import TensorSpec, export_attention
        >>> qkv = TensorSpec("float32", ("B", 8, "L", 64))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(export_attention(qkv, qkv, qkv, is_causal=True), f"{folder}/attention.onnx").name
        'attention.onnx'
    """
    _check_model(model)
    with in_words_of(ASKED, path):
        target = free_target(path, ASKED, overwrite=overwrite)
        unique = uuid.uuid4().hex
        unfinished = target.with_name(f".{unique}.onnx")
        data = target.with_name(f"{target.name}.{unique}.data")
        before = _data_of(target)
        try:
            if held(model) > external_above:
                model = _with_data_in(data, model)
            write(unfinished, lambda file: file.write(_serialized(model)))
            give_name(unfinished, target, ASKED, overwrite=overwrite)
        finally:
            unfinished.unlink(missing_ok=True)
            _remove_unless_referred_to({data, *before}, target)
    return target


def _check_model(model: onnx.ModelProto) -> None:
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(message("save", "`model` must be an onnx.ModelProto", {"type": type(model).__name__}))
    if found := locations(model):  # it would be looked for beside `path`
        hint = "onnx.load reads it."
        raise ValueError(message("save", "`model` must hold its data", {"external data": sorted(found)}, hint))


def _with_data_in(data: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """Write the numbers to `data`; returns the model that refers to them there."""
    referring = []

    def write_all(file: BinaryIO) -> None:
        def place(raw: bytes) -> tuple[str, int]:
            offset = file.seek(-(-file.tell() // ALIGNED) * ALIGNED)
            file.write(raw)
            return data.name, offset

        referring.append(apart(model, place))

    write(data, write_all)
    return referring[0]


def _serialized(model: onnx.ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except EncodeError as error:
        rule = "`model` must be under 2 GiB without the raw data of its initializers"
        raise ValueError(message("save", rule, {"bytes of raw data": held(model)})) from error


def _remove_unless_referred_to(files: set[Path], target: Path) -> None:
    """Right whatever has happened, and wherever it was interrupted: it asks the file that is there now."""
    there = {file for file in files if file.exists()}
    for left in there - _data_of(target) if there else ():
        left.unlink(missing_ok=True)


def _data_of(target: Path) -> set[Path]:
    """The data files that the model at `target` refers to, of those that `save` has named."""
    if not target.exists():
        return set()
    ours = re.compile(re.escape(target.name) + r"\.[0-9a-f]{32}\.data")
    files = [file for file in target.parent.iterdir() if ours.fullmatch(file.name)]
    if not files:  # then `target`, which may be large, need not be read
        return set()
    try:
        referred = locations(onnx.load(target, format="protobuf", load_external_data=False))
    except DecodeError:
        return set()
    return {file for file in files if file.name in referred}
