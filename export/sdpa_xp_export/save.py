"""Write a model to a file: whole or not at all, and over another file only if told to."""

from __future__ import annotations

import os
from numbers import Integral
from pathlib import Path

import onnx

from sdpa_xp._checks.keywords import check_flag, explains_keywords
from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp_export._files.model import EXTERNAL_ABOVE, LargeModel, Model, check_holds_data
from sdpa_xp_export._files.model_files import write_model


@explains_keywords
def save(
    model: Model,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    external_above: int = EXTERNAL_ABOVE,
) -> Path:
    """Write `model` to `path`, completely or not at all.

    A model of up to 2 GiB, the limit of protobuf, is one file. The initializers of a larger model are written
    to a second file in the same folder, `<name>.<32 hex digits>.data`, with a unique name. The model gets its
    name only after the data file is complete. So if a save is interrupted, the old model and its data are
    unchanged. When a model is replaced, its old data file is removed; when a save fails, its new data file is
    removed. If a process was killed during a save, the next save into the folder removes the files that it
    left. A file that replaces another one gets the same permissions, and so does its data file.

    Args:
        model: The result of `export_attention` or `to_onnx`; it is not changed.
        path: The file; its folder must exist. If it is a link, the file that it points to is written, and the
            link is kept. onnxruntime looks for external data in the folder of the path that you pass to it, so
            open such a model with the path that `save` returns.
        overwrite: Whether an existing file may be replaced.
        external_above: The largest size of initializers, in bytes, that are written to the model file itself.

    Returns:
        The path of the model file, with links resolved.

    Raises:
        TypeError: `model` is neither a ModelProto nor a LargeModel, `path` is not a path, `overwrite` is not a
            bool, or `external_above` is not an integer.
        ValueError: `model` refers to external data itself, its graph alone is over 2 GiB, or an array that a
            LargeModel refers to was written to; `path` holds what no file system can name.
        FileExistsError: A file is at `path` and `overwrite` is False. Or `path` is not a regular file, such as
            a folder. Or it is a link to another folder, and the file that it leads to does not exist. Or it is
            the data file of a model, or a file that an array of a LargeModel is mapped from.
        FileNotFoundError: The folder of `path` does not exist.
        OSError: The disk is full, or the folder cannot be written to.

    Examples:
        >>> import tempfile
        >>> from sdpa_xp_export import TensorSpec, export_attention
        >>> qkv = TensorSpec("float32", ("B", 8, "L", 64))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(
        ...         export_attention(qkv, qkv, qkv, is_causal=True),
        ...         f"{folder}/attention.onnx",
        ...     ).name
        'attention.onnx'
    """
    if not isinstance(model, LargeModel | onnx.ModelProto):
        rule = "`model` must be an onnx.ModelProto"
        raise ArgumentTypeError("save", rule, {"type": type(model).__name__})
    if not isinstance(model, LargeModel):
        check_holds_data("save", model)  # onnx would look for external data beside `path`
    replaces = check_flag("save", "overwrite", overwrite)
    if isinstance(external_above, bool) or not isinstance(external_above, Integral):
        got = {"external_above": repr(external_above)}
        raise ArgumentTypeError("save", "`external_above` must be an integer", got)
    return write_model(model, path, overwrite=replaces, external_above=external_above)
