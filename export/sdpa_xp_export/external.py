"""The numbers of a model apart from its graph: what protobuf, which ends at 2 GiB, cannot hold together.

Each large initializer becomes a reference to external data (ONNX, docs/ExternalData.md): a location, an
offset and a length; where the numbers go is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import onnx
from google.protobuf.message import Message

M = TypeVar("M", bound=Any)

Place: TypeAlias = Callable[[bytes], tuple[str, int]]
"""Keeps the bytes of one initializer; says at which location, and at which offset there."""

EXTERNAL_ABOVE = 2**31 - 2**28
"""Bytes of initializers that stay in the model; what is left to 2 GiB is for the graph."""

SMALLEST = 1024
"""Bytes of an initializer that goes apart, as in onnx: shape inference has to see those that hold a shape."""


def held(model: onnx.ModelProto) -> int:
    """The bytes of the initializers together."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def apart(model: onnx.ModelProto, place: Place) -> onnx.ModelProto:
    """initializer(raw_data) -> initializer(location, offset, length), for each of `SMALLEST` bytes or more.

    The model itself is left as it is, and never copied whole: at most one initializer is in memory twice.
    """
    made = _without_initializers(model)
    for tensor in model.graph.initializer:
        raw = tensor.raw_data
        if len(raw) < SMALLEST:
            made.graph.initializer.append(tensor)
        else:
            made.graph.initializer.append(_reference(tensor, *place(raw), len(raw)))
    return made


def without_numbers(model: onnx.ModelProto) -> onnx.ModelProto:
    """initializer -> input of its dtype and shape, likewise: what a checker can read of a model of any size."""
    made = _without_initializers(model)
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) < SMALLEST:
            made.graph.initializer.append(tensor)
        else:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            made.graph.input.append(info)
    return made


def locations(model: onnx.ModelProto) -> set[str]:
    """Where the external data of the initializers is."""
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def _reference(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> onnx.TensorProto:
    made = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if tensor.HasField("doc_string"):
        made.doc_string = tensor.doc_string
    made.metadata_props.extend(tensor.metadata_props)
    made.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        made.external_data.add(key=key, value=str(value))
    return made


def _without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    made = _all_but(model, "graph")
    made.graph.CopyFrom(_all_but(model.graph, "initializer"))
    return made


def _all_but(message: M, left_out: str) -> M:
    """A copy of a message without one of its fields, which is not copied on the way."""
    made: M = type(message)()
    for field, value in message.ListFields():
        if field.name == left_out:
            continue
        if isinstance(value, Message):
            getattr(made, field.name).CopyFrom(value)
        elif isinstance(value, str | bytes | int | float):
            setattr(made, field.name, value)
        else:
            getattr(made, field.name).extend(value)
    return made
