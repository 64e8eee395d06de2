"""A model, its weights, and the metadata that the exporter writes into it.

protobuf ends at 2 GiB. Beyond that, a model refers to the caller's arrays until it is saved. Nothing else reads
or writes the metadata; anyone may have written those of a file.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import onnx
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message as ProtobufMessage
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.model_container import ModelContainer, make_large_tensor_proto

from sdpa_xp.errors import ArgumentValueError

from .._dtypes.dtype import ONNX_DTYPE

M = TypeVar("M", bound=Any)
T = TypeVar("T", list[Any], dict[str, Any])

COPIED_BELOW = 2**20
"""A smaller array, in bytes, is copied at once; a larger one is referred to, and must not be written to."""

CHUNK = 2**22
"""The count of numbers that are in memory twice while an array is written to a file."""

EXTERNAL_ABOVE = 2**31 - 2**28
"""Bytes of initializers that may stay in the model; the rest up to 2 GiB is for the graph."""

SMALLEST = 1024
"""Bytes of an initializer that is stored apart; shape inference has to see smaller ones."""

_OF_ONE_MESSAGE = tuple(name for name in dir(ProtobufMessage) if not name.startswith("_"))
"""The methods of every message of protobuf, such as `SerializeToString`."""

Chunks: TypeAlias = Iterable[Any]
"""The bytes of one initializer, a part at a time."""
LONGEST = 10_000_000
"""Characters of JSON that are read."""
LONGEST_FACT = 60
"""Characters of each fact of a verdict that are shown."""
_KEY = re.compile(r"(sdpa_xp\.([a-z]+))(?:\.([0-9a-f]{8}))?")


@dataclass(slots=True, eq=False)
class Weight:
    """An initializer: its name and its numbers, which must not change later."""

    name: str
    array: NDArray[Any]
    checksum: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.array.nbytes < COPIED_BELOW:
            self.array = self.array.copy()
        for chunk in self._read():
            self.checksum = zlib.crc32(chunk, self.checksum)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def kind(self) -> tuple[str, int, tuple[int, ...]]:
        """Return the name, the number that ONNX has for the dtype, and the shape."""
        data_type = helper.np_dtype_to_tensor_dtype(self.array.dtype.newbyteorder("="))
        return self.name, data_type, self.array.shape

    def chunks(self, function: str) -> Iterator[memoryview]:
        """Yield the bytes of the numbers in order, in memory that is used again; at the end, check them."""
        checksum = 0
        for chunk in self._read():
            checksum = zlib.crc32(chunk, checksum)
            yield chunk
        if checksum != self.checksum:
            rule = f"`{self.name}` must not be written to before the model is saved"
            hint = "The model refers to the array, which is large; export it again."
            raise ArgumentValueError(function, rule, {"shape": self.array.shape}, hint)

    def _read(self) -> Iterator[memoryview]:
        dtype = self.array.dtype
        little = dtype if dtype.isnative else dtype.newbyteorder("<")  # as ONNX
        # `tobytes` would copy the whole array, and a `memoryview` has no order C of one that is transposed.
        with np.nditer(
            self.array,
            flags=["external_loop", "buffered", "zerosize_ok"],
            order="C",
            op_dtypes=[little],
            casting="equiv",
            buffersize=CHUNK,
        ) as chunks:
            for chunk in map(np.asarray, chunks):
                yield np.ascontiguousarray(chunk).view(np.uint8).data


class LargeModel(ModelContainer):
    """A model with more than 1.75 GiB of initializers, which `save`, `verify` and `verify_layer` take.

    Initializers of 1024 bytes or more are the caller's arrays: do not write to them before you save it.

    Args:
        proto: The model without the numbers of its large initializers.
        weights: The large initializers, by name.

    Examples:
        >>> from sdpa_xp_export import LargeModel
        >>> issubclass(LargeModel, onnx.model_container.ModelContainer)
        True
    """

    def __init__(self, proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> None:
        super().__init__()
        self.model_proto = proto
        self.weights = dict(weights)
        # onnx's own methods of a container, such as `save`, look the arrays up by these locations.
        self.set_large_initializers({location(name): weight.array for name, weight in weights.items()})

    if not TYPE_CHECKING:  # a type checker would allow any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Say how a model is used that is too large for one onnx.ModelProto."""
            if name in _OF_ONE_MESSAGE:
                rule = f"the model is too large for one message, so it has no `{name}`"
                raise AttributeError(f"LargeModel: {rule}. Use save(model, path).")
            if name in onnx.ModelProto.DESCRIPTOR.fields_by_name:
                raise AttributeError(f"LargeModel: it has no `{name}`. Use model.model_proto.{name}.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph. Its large initializers have a dtype and a shape, but no numbers."""
        return self.model_proto.graph

    @property
    def metadata_props(self) -> RepeatedCompositeFieldContainer[onnx.StringStringEntryProto]:
        """The metadata that the exporter wrote, by name."""
        return self.model_proto.metadata_props

    @property
    def opset_import(self) -> RepeatedCompositeFieldContainer[onnx.OperatorSetIdProto]:
        """The opsets of the graph."""
        return self.model_proto.opset_import


Model: TypeAlias = onnx.ModelProto | LargeModel
"""An ONNX model; a LargeModel keeps weights over 2 GiB beside it."""


def location(name: str) -> str:
    """Return the location by which onnx marks an initializer whose numbers are in memory."""
    return f"#{name}"


def with_weights(model: onnx.ModelProto, weights: Sequence[Weight], function: str) -> Model:
    """Put the weights into a model if it can hold them; else return a LargeModel that refers to them."""
    large = sum(weight.nbytes for weight in weights) + initializer_bytes(model) > EXTERNAL_ABOVE
    external = {weight.name: weight for weight in weights if large and weight.nbytes >= SMALLEST}
    for weight in weights:
        if weight.name in external:
            model.graph.initializer.append(make_large_tensor_proto(location(weight.name), *weight.kind))
        else:
            name, data_type, dims = weight.kind
            raw = joined(weight.chunks(function))
            model.graph.initializer.add(name=name, data_type=data_type, dims=dims, raw_data=raw)
    return LargeModel(model, external) if large else model


def joined(chunks: Chunks) -> bytes:
    """Return the bytes of one initializer, and copy them once."""
    file = io.BytesIO()
    file.writelines(chunks)
    return file.getvalue()


def initializer_bytes(model: Model) -> int:
    """Return the number of bytes of all initializers."""
    external = model.weights.values() if isinstance(model, LargeModel) else ()
    return sum(weight.nbytes for weight in external) + sum(
        len(tensor.raw_data) for tensor in model.graph.initializer
    )


def initializers(model: Model) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the array of each initializer."""
    external = model.weights if isinstance(model, LargeModel) else {}
    for tensor in model.graph.initializer:
        large = external.get(tensor.name)
        yield tensor.name, numpy_helper.to_array(tensor) if large is None else large.array


def initializer_parts(model: Model, function: str) -> Iterator[tuple[onnx.TensorProto, Chunks | None]]:
    """Yield each initializer, with its numbers if these are `SMALLEST` bytes or more, else None."""
    external = model.weights if isinstance(model, LargeModel) else {}
    for tensor in model.graph.initializer:
        if tensor.name in external:
            yield tensor, external[tensor.name].chunks(function)
        elif len(raw := tensor.raw_data) >= SMALLEST:
            yield tensor, [raw]
        else:
            yield tensor, None


def without_numbers(model: Model) -> onnx.ModelProto:
    """Replace each large initializer by an input of its dtype and shape: a checker can read such a model."""
    copy = without_initializers(model)
    for tensor, chunks in initializer_parts(model, "check"):
        if chunks is None:
            copy.graph.initializer.append(tensor)
        else:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            copy.graph.input.append(info)
    return copy


def without_initializers(model: Model) -> onnx.ModelProto:
    """Return a copy of a model without its initializers, which are never copied."""
    proto = model.model_proto if isinstance(model, LargeModel) else model
    copy = all_but(proto, "graph")
    copy.graph.CopyFrom(all_but(proto.graph, "initializer"))
    return copy


def all_but(part: M, *left_out: str) -> M:
    """Return a copy of a message without some of its fields, which are never copied."""
    copy: M = type(part)()
    for stated, value in part.ListFields():
        if stated.name in left_out:
            continue
        if isinstance(value, str | bytes | int | float):
            setattr(copy, stated.name, value)
        else:
            getattr(copy, stated.name).MergeFrom(value)
    return copy


def check_holds_data(function: str, model: onnx.ModelProto) -> None:
    """Refuse a model that refers to files, since their folder is not known."""
    if outside := data_locations(model):
        rule, hint = "`model` must contain its data, not refer to files", "Read the model with onnx.load."
        raise ArgumentValueError(function, rule, {"external data": sorted(outside)}, hint)


def data_locations(model: onnx.ModelProto) -> set[str]:
    """Return the locations of the external data that a model refers to."""
    tensors = (part for part in messages(model) if isinstance(part, onnx.TensorProto))
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def messages(part: Any) -> Iterator[Any]:
    """Yield every message in a part of a model, also in attributes, bodies of loops and functions."""
    yield part
    for stated in part.DESCRIPTOR.fields:  # not ListFields, which copies the numbers of a tensor
        if stated.type == stated.TYPE_MESSAGE:
            value = getattr(part, stated.name)
            if not isinstance(value, ProtobufMessage):
                for inner in value:
                    yield from messages(inner)
            elif part.HasField(stated.name):
                yield from messages(value)


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


@dataclass(frozen=True, slots=True)
class StatedModel:
    """A model, and what its metadata state, which is read once. Anyone may have written them."""

    model: Model
    parts: Sequence[Metadata]
    """What each exported model states that was merged into this one."""
    names: Sequence[str]
    """The names of all metadata, for messages."""
    verdict: str
    """What an earlier verification found; empty if nothing."""

    @property
    def operators(self) -> set[str]:
        """The names of the operators, also in loops and functions."""
        whole = self.model if isinstance(self.model, onnx.ModelProto) else self.model.graph
        return {part.op_type for part in messages(whole) if isinstance(part, onnx.NodeProto)}

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the inputs and outputs."""
        values = [*self.model.graph.input, *self.model.graph.output]
        kinds = {value.type.tensor_type.elem_type for value in values}
        return {name for name, number in ONNX_DTYPE.items() if number in kinds}

    @classmethod
    def from_model(cls, model: Model) -> StatedModel:
        return cls(model, exported_models(model), sorted(metadata_of(model)), recorded_verdict(model))


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
