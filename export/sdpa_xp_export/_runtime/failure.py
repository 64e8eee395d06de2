"""The error of a model that onnxruntime does not load or run."""

from __future__ import annotations


class ModelFailedError(ValueError):
    """onnxruntime cannot load or run a model: a fault of the model or of the release, not of the arguments."""
