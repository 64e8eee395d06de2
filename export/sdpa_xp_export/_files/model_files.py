"""Write a model to a file: whole or not at all, and never over another unless told to."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError, EncodeError

from sdpa_xp.checks import message
from sdpa_xp_export._files.atomic import Writer, give_name, writing
from sdpa_xp_export._files.locks import locked
from sdpa_xp_export._files.paths import Asked, free_target, in_words_of
from sdpa_xp_export._model.external_data import (
    EXTERNAL_ABOVE,
    Chunks,
    apart,
    check_holds_data,
    held,
    locations,
    whole,
)
from sdpa_xp_export._model.large_model import LargeModel, Model

ASKED = Asked("save", "path")

ALIGNED = 2**16
"""Each initializer in a data file begins at a multiple of this, so that any system can map it into memory."""


def save(
    model: Model,
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
    fails, its own. What a process has left that was killed while it saved goes with the next save into the
    folder. A file that replaces another has its permissions, and so have its data.

    Args:
        model: What `export_attention` or `to_onnx` returned; it is not changed.
        path: The file; its folder must exist. Through a link the file that it points to is written, and the
            link is kept. onnxruntime looks for external data beside the path that it is given, so open such a
            model by the path that is returned.
        overwrite: Whether a file that is there may be replaced.
        external_above: The bytes of initializers that the file itself may hold.

    Returns:
        The path of the file that holds the model, links resolved.

    Raises:
        TypeError: `model` is no ModelProto and no LargeModel, or `path` is no path.
        ValueError: `model` refers to external data itself, its graph alone is over 2 GiB, or an array that a
            LargeModel refers to was written to; `path` holds what no file system can name.
        FileExistsError: `path` is there and `overwrite` is False, or is a link out of its folder to a file that
            is not there; or it is no regular file.
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
    small = held(model) <= external_above
    with in_words_of(ASKED, path):
        target = free_target(path, ASKED, overwrite=overwrite)
        with writing(target, _remove_data) as writer:
            data = _data_file(target, writer.number)
            before: set[Path] = set()
            try:
                proto = _in_one_file(model) if small else _with_data_in(data, model, writer)
                unfinished = writer.marker if writer.marker in writer.files else writer.create(writer.marker)
                writer.write(unfinished, lambda file: file.write(_serialized(proto)))
                with locked(target.parent):  # what another save has written meanwhile is replaced, too
                    before |= _data_of(target)
                    _mark(before, writer)
                    give_name(unfinished, target, ASKED, overwrite=overwrite)
                    writer.forget(unfinished)
            finally:
                _remove_unless_referred_to({data, *before}, target)
    return target


def _check_model(model: Model) -> None:
    if isinstance(model, LargeModel):
        return
    if not isinstance(model, onnx.ModelProto):
        rule = "`model` must be an onnx.ModelProto"
        raise TypeError(message("save", rule, {"type": type(model).__name__}))
    check_holds_data("save", model)  # it would be looked for beside `path`


def _with_data_in(data: Path, model: Model, writer: Writer) -> onnx.ModelProto:
    """Write the numbers to `data`; returns the model that refers to them there."""
    referring = []

    def write_all(file: BinaryIO) -> None:
        def place(chunks: Chunks) -> tuple[str, int, int]:
            offset = file.seek(-(-file.tell() // ALIGNED) * ALIGNED)
            for chunk in chunks:
                file.write(chunk)
            return data.name, offset, file.tell() - offset

        referring.append(apart(model, place))

    unfinished = writer.create(writer.marker.with_suffix(".data.unfinished"))
    writer.write(unfinished, write_all)
    writer.create(writer.marker)  # who comes upon it when this process is dead looks for `data`
    unfinished.rename(data)
    return referring[0]


def _in_one_file(model: Model) -> onnx.ModelProto:
    if held(model) >= 2**31:
        raise _too_large(model)
    return whole(model)


def _serialized(model: onnx.ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except EncodeError as error:
        raise _too_large(model) from error


def _too_large(model: Model) -> ValueError:
    rule = "`model` must be under 2 GiB without the raw data of its initializers"
    return ValueError(message("save", rule, {"bytes of raw data": held(model)}))


def _remove_unless_referred_to(files: set[Path], target: Path) -> None:
    """Right whatever has happened, and wherever it was interrupted: it asks the file that is there now."""
    there = {file for file in files if file.exists()}
    for left in there - _data_of(target) if there else ():
        left.unlink(missing_ok=True)


def _remove_data(number: str, folder: Path) -> None:
    """Remove the data that a dead save wrote, or was about to remove."""
    for file in folder.glob(f"*.{number}.data"):
        with suppress(OSError):  # what cannot be read may refer to it
            _remove_unless_referred_to({file}, file.with_name(file.name.removesuffix(f".{number}.data")))


def _mark(files: set[Path], writer: Writer) -> None:
    """Mark the data of the model that is replaced, so that a later save removes them if this one dies."""
    for file in files:
        number = file.name.rpartition(".data")[0].rpartition(".")[2]
        with suppress(FileExistsError):
            writer.create_alone(file.with_name(f".{number}.unfinished"))


def _data_file(target: Path, number: str) -> Path:
    return target.with_name(f"{target.name}.{number}.data")


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
