"""Write a model to a file: whole or not at all, and over another file only if told to."""

from __future__ import annotations

from pathlib import Path

import onnx

from sdpa_xp.checks import message
from sdpa_xp_export._files.model_files import write_model
from sdpa_xp_export._model.external_data import EXTERNAL_ABOVE, check_holds_data
from sdpa_xp_export._model.large_model import LargeModel, Model


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
    if not isinstance(model, LargeModel | onnx.ModelProto):
        rule = "`model` must be an onnx.ModelProto"
        raise TypeError(message("save", rule, {"type": type(model).__name__}))
    if not isinstance(model, LargeModel):
        check_holds_data("save", model)  # onnx would look for external data beside `path`
    return write_model(model, path, overwrite=overwrite, external_above=external_above)
