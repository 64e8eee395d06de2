"""What the exporter writes into a model beside its graph. Nothing else reads or writes the metadata."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import onnx
from onnx import helper

from .model import Model

T = TypeVar("T", list[Any], dict[str, Any])
LONGEST = 10_000_000
"""Characters of JSON that are read."""
_KEY = re.compile(r"(sdpa_xp\.([a-z]+))(?:\.([0-9a-f]{8}))?")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What one exported model states; empty if it does not. Anyone may have written the file."""

    version: str = ""
    call: str = ""
    """The options of the call, as JSON; a layer has none."""
    digest: str = ""
    """The SHA-256 of the call and its numbers."""
    form: str = ""
    reason: str = ""
    forms: str = ""
    """The form and the reason of each attention in a layer, as JSON."""
    runtime: str = ""
    numbers: str = ""
    """The numbers of the calls in a layer, as JSON."""
    arguments: str = ""
    """The names of the arguments that `to_onnx` was given, as JSON."""
    math: str = ""

    @property
    def chosen(self) -> Iterator[tuple[str, str]]:
        """The form of each attention, and the reason for it."""
        if self.form:
            yield self.form, self.reason
        for choice in _read(self.forms, list):
            if isinstance(choice, dict):
                yield str(choice.get("form", "")), str(choice.get("reason", ""))

    @property
    def fixed_arguments(self) -> list[str]:
        """The names of the arguments that `to_onnx` was given."""
        return [*map(str, _read(self.arguments, list))]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call, not yet checked."""
        return _read(self.call, dict)

    def write(self, model: onnx.ModelProto, graph: onnx.ModelProto) -> None:
        """Write entries under their names and a digest of them and of a graph, as `sdpa_xp.form.3f2a9c1b`.

        Equal keys then have equal values, which `onnx.compose.merge_models` needs.
        """
        entries = {f"sdpa_xp.{name}": text for name, text in asdict(self).items() if text}
        hashed = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
        hashed.update(graph.SerializeToString(deterministic=True))
        digest = hashed.hexdigest()[:8]
        helper.set_model_props(model, {f"{name}.{digest}": text for name, text in entries.items()})


def exported_models(model: Model) -> list[Metadata]:
    """Return what each exported model states that was merged into this one."""
    models: dict[str, dict[str, str]] = {}
    for entry in model.metadata_props:
        key = _KEY.fullmatch(entry.key)
        if key and key[2] in Metadata.__slots__:  # a file of an older exporter has no digest in its keys
            models.setdefault(key[3] or "", {})[key[2]] = entry.value
    return [Metadata(**entries) for entries in models.values()]


def metadata_of(model: Model) -> dict[str, str]:
    """Return all metadata of a model, those that the exporter wrote by their names."""
    entries = {entry.key: entry.value for entry in model.metadata_props}
    return {key[1] if (key := _KEY.fullmatch(name)) else name: value for name, value in entries.items()}


def _read(text: str, kind: type[T]) -> T:
    """Return a list or a dictionary that was written as JSON; an empty one if this text is none."""
    try:
        read = json.loads(text) if len(text) <= LONGEST else None
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, kind) else kind()
