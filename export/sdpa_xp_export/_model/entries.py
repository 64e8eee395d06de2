"""The metadata that the exporter writes into a model, under keys that no other model has."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

import onnx
from onnx import helper

from sdpa_xp_export._model.large_model import Model

_KEY = re.compile(r"(sdpa_xp\.[a-z]+)(?:\.([0-9a-f]{8}))?")


def write_metadata(model: onnx.ModelProto, metadata: Mapping[str, str], *, graph: onnx.ModelProto) -> None:
    """Write entries under their names and a digest of them and of a graph, as `sdpa_xp.form.3f2a9c1b`.

    Equal keys then have equal values, which `onnx.compose.merge_models` needs.
    """
    hashed = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    hashed.update(graph.SerializeToString(deterministic=True))
    digest = hashed.hexdigest()[:8]
    helper.set_model_props(model, {f"{name}.{digest}": value for name, value in metadata.items()})


def exported_models(model: Model) -> list[dict[str, str]]:
    """Return the entries of each exported model that was merged into this one, by their names."""
    models: dict[str, dict[str, str]] = {}
    for entry in model.metadata_props:
        if key := _KEY.fullmatch(entry.key):  # a file of an older exporter has no digest in its keys
            models.setdefault(key[2] or "", {})[key[1]] = entry.value
    return [*models.values()]


def metadata_of(model: Model) -> dict[str, str]:
    """Return all metadata of a model, those that the exporter wrote by their names."""
    entries = {entry.key: entry.value for entry in model.metadata_props}
    return {key[1] if (key := _KEY.fullmatch(name)) else name: value for name, value in entries.items()}
