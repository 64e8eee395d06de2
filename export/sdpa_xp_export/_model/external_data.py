"""The numbers of a model apart from its graph: what protobuf, which ends at 2 GiB, cannot hold together.

Each large initializer becomes a reference to external data (ONNX, docs/ExternalData.md): a location, an
offset and a length; the caller says where the numbers go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import onnx
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.model_container import make_large_tensor_proto

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._model.large_model import LargeModel, Model, location
from sdpa_xp_export._model.weights import Weight

M = TypeVar("M", bound=Any)

Chunks: TypeAlias = Iterable[Any]
"""The bytes of one initializer, a part at a time."""
StoreChunks: TypeAlias = Callable[[Chunks], tuple[str, int, int]]
"""Stores the bytes of one initializer; returns the location, the offset there, and how many bytes they are."""

EXTERNAL_ABOVE = 2**31 - 2**28
"""Bytes of initializers that may stay in the model; the rest up to 2 GiB is for the graph."""

SMALLEST = 1024
"""Bytes of an initializer that is stored apart; shape inference has to see smaller ones."""


def with_weights(model: onnx.ModelProto, weights: Sequence[Weight], function: str) -> Model:
    """Put the weights into a model if it can hold them; else return a LargeModel that refers to them."""
    large = sum(weight.nbytes for weight in weights) + initializer_bytes(model) > EXTERNAL_ABOVE
    external = {weight.name: weight for weight in weights if large and weight.nbytes >= SMALLEST}
    for weight in weights:
        tensor = model.graph.initializer.add()
        if weight.name in external:
            tensor.CopyFrom(make_large_tensor_proto(location(weight.name), *weight.kind))
        else:
            weight.fill(tensor, function)
    return LargeModel(model, external) if large else model


def initializer_bytes(model: Model) -> int:
    """Return the number of bytes of all initializers."""
    external = model.weights.values() if isinstance(model, LargeModel) else ()
    return sum(weight.nbytes for weight in external) + sum(
        len(tensor.raw_data) for tensor in model.graph.initializer
    )


def with_data_apart(model: Model, store: StoreChunks) -> onnx.ModelProto:
    """initializer(raw_data) -> initializer(location, offset, length), for each of `SMALLEST` bytes or more.

    The model itself is not changed, and never copied whole: at most one initializer is in memory twice.
    """
    copy = _without_initializers(model)
    for tensor, chunks in _initializers(model, "save"):
        if chunks is None:
            copy.graph.initializer.append(tensor)
        else:
            copy.graph.initializer.append(_reference(tensor, *store(chunks)))
    return copy


def with_data_inside(model: Model) -> onnx.ModelProto:
    """Return a ModelProto that holds all numbers."""
    if isinstance(model, onnx.ModelProto):
        return model
    copy = _without_initializers(model)
    for tensor in model.graph.initializer:
        weight = model.weights.get(tensor.name)
        if weight is None:
            copy.graph.initializer.append(tensor)
        else:
            weight.fill(copy.graph.initializer.add(), "save")
    return copy


def initializers(model: Model) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the array of each initializer."""
    external = model.weights if isinstance(model, LargeModel) else {}
    for tensor in model.graph.initializer:
        large = external.get(tensor.name)
        yield tensor.name, numpy_helper.to_array(tensor) if large is None else large.array


def without_numbers(model: Model) -> onnx.ModelProto:
    """Replace each large initializer by an input of its dtype and shape: a checker can read such a model."""
    copy = _without_initializers(model)
    for tensor, chunks in _initializers(model, "check"):
        if chunks is None:
            copy.graph.initializer.append(tensor)
        else:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            copy.graph.input.append(info)
    return copy


def locations(model: onnx.ModelProto) -> set[str]:
    """Return the locations of the external data of the initializers."""
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def check_holds_data(function: str, model: onnx.ModelProto) -> None:
    """Refuse a model that refers to files, since their folder is not known."""
    outside = {
        entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"
    }
    if outside:
        rule, hint = "`model` must contain its data, not refer to files", "Read the model with onnx.load."
        raise ArgumentValueError(function, rule, {"external data": sorted(outside)}, hint)


def _tensors(part: Any) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in a part of a model, also in attributes, bodies of loops and functions."""
    if isinstance(part, onnx.TensorProto):
        yield part
        return
    for field, value in part.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _tensors(inner)


def _initializers(model: Model, function: str) -> Iterator[tuple[onnx.TensorProto, Chunks | None]]:
    """Yield each initializer, with its numbers if these are `SMALLEST` bytes or more, else None."""
    external = model.weights if isinstance(model, LargeModel) else {}
    for tensor in model.graph.initializer:
        if tensor.name in external:
            yield tensor, external[tensor.name].chunks(function)
        elif len(raw := tensor.raw_data) >= SMALLEST:
            yield tensor, [raw]
        else:
            yield tensor, None


def _reference(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> onnx.TensorProto:
    reference = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if tensor.HasField("doc_string"):
        reference.doc_string = tensor.doc_string
    reference.metadata_props.extend(tensor.metadata_props)
    reference.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        reference.external_data.add(key=key, value=str(value))
    return reference


def _without_initializers(model: Model) -> onnx.ModelProto:
    proto = model.model_proto if isinstance(model, LargeModel) else model
    copy = _all_but(proto, "graph")
    copy.graph.CopyFrom(_all_but(proto.graph, "initializer"))
    return copy


def _all_but(part: M, left_out: str) -> M:
    """Return a copy of a message without one of its fields, which is never copied."""
    copy: M = type(part)()
    for field, value in part.ListFields():
        if field.name == left_out:
            continue
        if isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        elif isinstance(value, str | bytes | int | float):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).extend(value)
    return copy
