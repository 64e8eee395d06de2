"""Read a model from a file that anyone may have written."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from sdpa_xp.checks import message


def load(function: str, path: Path) -> onnx.ModelProto:
    """The model in the file `path`."""
    if not path.is_file():
        raise FileNotFoundError(message(function, "`model` must be a file", {"model": path}))
    try:
        return onnx.load(path, format="protobuf")
    except (DecodeError, onnx.checker.ValidationError) as error:
        rule = "`model` must be an ONNX model"
        raise ValueError(message(function, rule, {"model": path})) from error
