"""What the exporter writes into a model beside its graph. Nothing else reads or writes the metadata."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import onnx
from onnx import helper

from .model import Model, all_but, initializer_parts, without_initializers

T = TypeVar("T", list[Any], dict[str, Any])
LONGEST = 10_000_000
"""Characters of JSON that are read."""
LONGEST_FACT = 60
"""Characters of each fact of a verdict that are shown."""
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


def record_verdict(model: Model, verdict: Mapping[str, Any]) -> None:
    """Write what a verification found, in place of what an earlier one did."""
    text = json.dumps(verdict, allow_nan=False)
    for entry in _verdicts(model):
        model.metadata_props.remove(entry)
    # Its own digest in the key, since equal models that were verified twice may be merged.
    key = f"sdpa_xp.verdict.{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    model.metadata_props.add(key=key, value=text)


def recorded_verdict(model: Model) -> str:
    """Return what a model says of an earlier verification; empty if nothing. Anyone may have written it."""
    verdicts = [_read(entry.value, dict) for entry in _verdicts(model)]
    if not verdicts:
        return ""
    graph = graph_digest(model)
    verdict = next((verdict for verdict in verdicts if verdict.get("graph") == graph), None)
    if not any(verdicts):
        return "the verdict in the metadata cannot be read"
    if verdict is None:
        return "the verdict in the metadata is stale: the graph has changed since"
    of_another = ", for a call that was passed" if verdict.get("call_from_metadata") is False else ""
    says = "agrees" if verdict.get("agrees") is True else "DISAGREES"
    run = "on {engine} ({providers}), {runs} runs, error {error}, bound {bound}, sdpa_xp {version}, {date}"
    facts = defaultdict(str)
    for name, fact in verdict.items():
        shown = f"{fact:.2g}" if isinstance(fact, float) else str(fact)[:LONGEST_FACT]
        facts[name] = "infinite" if fact is None else shown
    return f"the verdict in the metadata: {says} {run.format_map(facts)}{of_another}"


def graph_digest(model: Model) -> str:
    """Return the SHA-256 of a model without its metadata, also if its numbers are in another file."""
    bare = without_initializers(model)
    del bare.metadata_props[:]
    hashed = hashlib.sha256(bare.SerializeToString(deterministic=True))
    for tensor, chunks in initializer_parts(model, "verify"):
        # Tools state the place of the numbers in several ways.
        bare_tensor = all_but(tensor, "raw_data", "external_data", "data_location")
        hashed.update(bare_tensor.SerializeToString(deterministic=True))
        for chunk in [tensor.raw_data] if chunks is None else chunks:
            hashed.update(chunk)
    return hashed.hexdigest()


def _verdicts(model: Model) -> list[onnx.StringStringEntryProto]:
    keys = ((entry, _KEY.fullmatch(entry.key)) for entry in model.metadata_props)
    return [entry for entry, key in keys if key and key[2] == "verdict"]


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
