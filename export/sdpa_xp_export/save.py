"""Write a model to a file: whole or not at all, and over another file only if told to.

Large initializers are written to a second file if one file cannot hold them.
"""

from __future__ import annotations

import glob
import math
import os
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from google.protobuf.message import EncodeError

from sdpa_xp._checks.keywords import check_flag, check_integer, explains_keywords
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from ._files.loading import data_files
from ._files.model import (
    EXTERNAL_ABOVE,
    LargeModel,
    Model,
    all_but,
    check_holds_data,
    initializer_bytes,
    initializer_parts,
    joined,
    without_initializers,
)
from ._files.paths import PathArgument, check_is_no_input, free_target, reworded, write_new, write_whole

ARGUMENT = PathArgument("save", "path")

ALIGNED = 2**16
"""Each initializer in a data file begins at a multiple of this, so that any system can map it into memory."""


@explains_keywords
def save(
    model: Model,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    external_above: int = EXTERNAL_ABOVE,
) -> Path:
    """Write `model` to `path`, completely or not at all.

    The initializers of a model over 2 GiB are in a second file beside it, `<name>.<32 hex digits>.data`. If a
    save fails or is interrupted, the old model and its data are unchanged, and nothing is left. A killed
    process, or two saves at once, may leave a `.<32 hex digits>.unfinished` or a data file that no model refers
    to.

    Args:
        model: The result of `export_attention` or `to_onnx`; it is not changed.
        path: The file; its folder must exist. If it is a link, the file that it points to is written.
        overwrite: Whether an existing file may be replaced.
        external_above: The largest size of initializers, in bytes, that are written to the model file itself.

    Returns:
        The path of the model file, with links resolved. Open a model with external data by this path.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `model` refers to external data itself, its graph alone is over 2 GiB, or an array that a
            `LargeModel` refers to was written to; `path` holds what no file system can name.
        FileExistsError: A file is at `path` and `overwrite` is False. Or `path` is no regular file, or one that
            a model's data are in.
        FileNotFoundError: The folder of `path` does not exist.
        OSError: The disk is full, or the folder cannot be written to.

    Examples:
        >>> import tempfile
        >>> from sdpa_xp_export import TensorSpec, export_attention
        >>> qkv = TensorSpec("float32", ("B", 8, "L", 64))
        >>> model = export_attention(qkv, qkv, qkv, is_causal=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, f"{folder}/attention.onnx").name
        'attention.onnx'
    """
    if not isinstance(model, LargeModel | onnx.ModelProto):
        rule = "`model` must be an onnx.ModelProto"
        raise ArgumentTypeError("save", rule, {"type": type(model).__name__})
    if not isinstance(model, LargeModel):
        check_holds_data("save", model)  # onnx would look for external data beside `path`
    replaces = check_flag("save", "overwrite", overwrite)
    small = initializer_bytes(model) <= check_integer("save", "external_above", external_above, most=math.inf)
    with reworded(ARGUMENT, path):
        target = free_target(path, ARGUMENT, overwrite=replaces)
        owner = target.with_suffix("").with_suffix("")  # of which `target` may be the data file
        beside = {target: f"the data of {owner.name}"} if target in _data_of(owner) else {}
        check_is_no_input(ARGUMENT, target, _read_by(model) | beside)
        data = target.with_name(f"{target.name}.{uuid.uuid4().hex}.data")
        files = {data}

        def fill(file: BinaryIO) -> None:
            file.write(_serialized(model if small else _with_data_in(data, model, target)))

        def before() -> None:
            files.update(_data_of(target))  # also that of a save which wrote meanwhile

        def tidy() -> None:
            for unused in files - _data_of(target):  # wherever the save was interrupted
                unused.unlink(missing_ok=True)

        write_whole(target, fill, ARGUMENT, overwrite=replaces, before=before, tidy=tidy)
    return target


def _read_by(model: Model) -> dict[Path, str]:
    """Return the files that the arrays of a LargeModel are mapped from."""
    files = {}
    for weight in model.weights.values() if isinstance(model, LargeModel) else ():
        array: Any = weight.array
        while array is not None:
            if isinstance(array, np.memmap) and isinstance(array.filename, str | os.PathLike):
                files[Path(array.filename)] = "a file that numbers of `model` are read from"
            array = getattr(array, "base", None)
    return files


def _data_of(target: Path) -> set[Path]:
    """Return the data files that the model at `target` refers to, among those that `save` named."""
    files = {*target.parent.glob(f"{glob.escape(target.name)}.{'[0-9a-f]' * 32}.data")}
    return files and files & data_files(target)  # without files, `target`, which may be large, need not be read


def _with_data_in(data: Path, model: Model, target: Path) -> onnx.ModelProto:
    """Write the numbers to `data`, to which no model refers yet; return the model that refers to them there."""
    referring = without_initializers(model)

    def write_all(file: BinaryIO) -> None:
        for tensor, chunks in initializer_parts(model, "save"):
            if chunks is None:
                referring.graph.initializer.append(tensor)
                continue
            offset = file.seek(-(-file.tell() // ALIGNED) * ALIGNED)
            file.writelines(chunks)  # at most a part of one initializer is in memory twice
            reference = _without_numbers(tensor)
            reference.data_location = onnx.TensorProto.EXTERNAL
            for key, value in {"location": data.name, "offset": offset, "length": file.tell() - offset}.items():
                reference.external_data.add(key=key, value=str(value))
            referring.graph.initializer.append(reference)

    write_new(data, write_all, like=target)
    return referring


def _serialized(model: Model) -> bytes:
    """Return a model with all its numbers, as one message."""
    got = {"bytes of raw data": initializer_bytes(model)}
    error = ArgumentValueError(
        "save", "`model` must be under 2 GiB without the raw data of its initializers", got
    )
    if initializer_bytes(model) >= 2**31:
        raise error
    whole = without_initializers(model) if isinstance(model, LargeModel) else model
    if isinstance(model, LargeModel):
        for tensor, chunks in initializer_parts(model, "save"):
            whole.graph.initializer.append(tensor if chunks is None else _without_numbers(tensor))
            if chunks is not None:
                whole.graph.initializer[-1].raw_data = joined(chunks)
    try:
        return bytes(whole.SerializeToString())
    except EncodeError as too_large:
        raise error from too_large


def _without_numbers(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return all_but(tensor, "raw_data", "external_data", "data_location")
