"""Read a model from a file that anyone may have written, and limit what it can ask for.

The sizes that a file states are compared with its own size before memory is spent on them. External data is
read only from regular files within the folder of the model, and all of it into memory: onnxruntime, which
follows hard links, gets a model that refers to no file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from onnx.checker import ValidationError
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .model import LargeModel, Model, StatedModel, check_holds_data, data_locations, messages
from .paths import PathArgument, absence_hint, reason, with_text

T = TypeVar("T")

LARGEST = 2**31 - 1
"""Bytes of a model with its external data, which is what protobuf can hold."""

_KEYS = ("location", "offset", "length", "checksum")


class UnfitError(Exception):
    """The rule that a file breaks, and what it has instead."""

    def __init__(self, rule: str, got: Mapping[str, object] | None = None) -> None:
        super().__init__(rule)
        self.rule, self.got = rule, got or {}


def load(function: str, path: str | os.PathLike[str], *, largest: int = LARGEST) -> onnx.ModelProto:
    """Read the model in the file `path`, with its external data.

    Args:
        function: The function that messages name.
        path: The file, or a link to it.
        largest: The bytes of the file and of its external data together.

    Raises:
        FileNotFoundError: `path` is no regular file.
        OSError: The file cannot be read.
        ValueError: It is no whole ONNX model, it is too large, or its external data is not in regular files
            within its folder, of no other name.
    """
    argument = PathArgument(function, "model")
    return read_file(argument, path, lambda file: _with_data(_parsed(file, largest), file, largest))


def read_file(argument: PathArgument, path: str | os.PathLike[str], read: Callable[[Path], T]) -> T:
    """Return what `read` makes of a regular file; an UnfitError of it becomes an ArgumentValueError."""
    file = Path(os.path.realpath(argument.checked(path)))
    try:
        if file.is_file():
            return read(file)
    except UnfitError as error:
        message = argument.message(f"must {error.rule}", path)
        raise ArgumentValueError(message.function, message.rule, {**message.got, **error.got}) from error
    except OSError as error:
        raise with_text(error, argument.message(f"must be readable ({reason(error)})", path)) from error
    if Path(path).is_fifo():  # such as <(command) in a shell
        raise FileNotFoundError(
            argument.message("must be a file, not a pipe", path, "Write it to a file first.")
        )
    raise FileNotFoundError(argument.message("must be a file", path, absence_hint(path)))


def data_files(path: Path) -> set[Path]:
    """Return the files of external data that a model refers to; none if the file holds no model.

    Raises:
        OSError: The file cannot be read, so nobody knows.
    """
    file = Path(os.path.realpath(path))
    try:
        locations = data_locations(_parsed(file, LARGEST)) if file.is_file() else set[str]()
    except UnfitError:
        return set()
    return {file.parent / os.fsdecode(location) for location in locations}  # bytes if it is no UTF-8


def _parsed(file: Path, largest: int) -> onnx.ModelProto:
    if file.stat().st_size > largest:
        raise UnfitError(f"be at most {largest} bytes", {"bytes": file.stat().st_size})
    model = onnx.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError:
        raise UnfitError("be an ONNX model (the file is cut short, or has another format)") from None
    return model


def _with_data(model: onnx.ModelProto, file: Path, largest: int) -> onnx.ModelProto:
    # Other files are protobuf, too.
    parts = {"IR version": model.ir_version, "opset": model.opset_import, "node": model.graph.node}
    if absent := [name for name, part in parts.items() if not part]:
        raise UnfitError(f"be an ONNX model (it has no {', no '.join(absent)})")
    tensors = [part for part in map(_checked_texts, messages(model)) if isinstance(part, onnx.TensorProto)]
    external = [tensor for tensor in tensors if uses_external_data(tensor)]
    size = file.stat().st_size + sum(_extent(tensor, file.parent) for tensor in external)
    if size > largest:
        raise UnfitError(f"be at most {largest} bytes with its external data", {"bytes": size})
    for tensor in external:
        try:  # onnx opens the file again, and checks the same rules
            load_external_data_for_tensor(tensor, str(file.parent))
        except (ValidationError, ValueError) as error:
            raise UnfitError(f"have its external data ({str(error).splitlines()[0]})") from error
        tensor.data_location = onnx.TensorProto.DEFAULT  # onnx before 1.23 leaves this to the caller
        del tensor.external_data[:]
    for tensor in tensors:
        try:  # the dtype is known, and the shape fits the data
            numpy_helper.to_array(tensor)
        except Exception as error:  # onnx raises errors of many classes
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnfitError(f"hold tensors as they say ({why})") from error
    return model


def _checked_texts(message: Any) -> Any:
    """Return a message; protobuf returns a text in it that is no UTF-8 as bytes, which no reader expects."""
    for stated in message.DESCRIPTOR.fields:
        value = getattr(message, stated.name) if stated.type == stated.TYPE_STRING else ""
        if any(isinstance(text, bytes) for text in ([value] if isinstance(value, str | bytes) else value)):
            raise UnfitError("be an ONNX model (a text in it is not UTF-8)")
    return message


def _extent(tensor: onnx.TensorProto, folder: Path) -> int:
    """Return how many bytes of external data `tensor` takes; they must exist."""
    stated = {entry.key: entry.value for entry in tensor.external_data}
    if unknown := stated.keys() - set(_KEYS):
        rule = f"describe external data by {', '.join(_KEYS)} alone"
        raise UnfitError(rule, {"keys": _short(sorted(unknown))})
    size = _size_of_regular(folder, stated.get("location", ""))
    offset = _count(stated, "offset") if "offset" in stated else 0
    length = _count(stated, "length") if "length" in stated else size - offset
    if length < 0 or offset + length > size:
        raise UnfitError("have all of its external data", {"said": _short(stated), "bytes of the file": size})
    return length


def _size_of_regular(folder: Path, location: str) -> int:
    path = folder / location
    if "\0" in location or os.path.isabs(location) or os.path.realpath(path) != str(path):  # `..`, or a link
        raise UnfitError(
            "keep its external data in its own folder, without links", {"location": _short(location)}
        )
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise UnfitError("have its external data", {"location": _short(location)}) from None
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        rule = "keep its external data in regular files with no other name"
        raise UnfitError(rule, {"location": _short(location)})
    return status.st_size


def _count(stated: Mapping[str, str], key: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", stated[key]):
        raise UnfitError("have offsets and lengths that are numbers", {key: _short(stated[key])})
    return int(stated[key])


def _short(value: object) -> str:
    return repr(value)[:200]


def loaded_model(function: str, model: object, rule: str) -> StatedModel:
    """Return a model, or read it from the file of that path; `rule` is for anything else."""
    if isinstance(model, str | os.PathLike):
        return StatedModel.from_model(load(function, model))
    if not isinstance(model, Model):
        raise ArgumentTypeError(function, rule, {"model": type(model).__name__})
    if not isinstance(model, LargeModel):
        check_holds_data(function, model)
    return StatedModel.from_model(model)
