"""The model that is verified: as it came, or from its file."""

from __future__ import annotations

import os

import onnx

from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp_export._files.loading import load
from sdpa_xp_export._model.external_data import check_holds_data
from sdpa_xp_export._model.large_model import LargeModel, Model
from sdpa_xp_export.forms import tiled


def loaded_model(function: str, model: object, rule: str) -> Model:
    """Return a model, or read it from the file of that path.

    Raises:
        TypeError: Neither a model nor a path; the message has `rule`.
        ValueError: The file is no ONNX model, or the model refers to external data.
        FileNotFoundError: No such file.
    """
    if isinstance(model, LargeModel):
        return model
    if isinstance(model, onnx.ModelProto):
        check_holds_data(function, model)
        return model
    if isinstance(model, str | os.PathLike):
        return load(function, model)
    raise ArgumentTypeError(function, rule, {"model": type(model).__name__})


def blocks_of(model: Model) -> list[int]:
    """Return the lengths of the blocks that a model cuts its queries into."""
    return [tiled.ROWS] if any(node.op_type in ("Scan", "Loop") for node in model.graph.node) else []
