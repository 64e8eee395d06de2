"""A model beyond the 2 GiB of protobuf, which refers to the caller's arrays until it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import onnx
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message
from onnx.model_container import ModelContainer

from sdpa_xp_export._model.weights import Weight

_OF_ONE_MESSAGE = tuple(name for name in dir(Message) if not name.startswith("_"))
"""The methods of every message of protobuf, such as `SerializeToString`."""


class LargeModel(ModelContainer):
    """A model with more than 1.75 GiB of initializers, which may not fit into one ONNX file of 2 GiB.

    `save`, `verify` and `verify_layer` take it like an onnx.ModelProto. The initializers of 1024 bytes or more
    are not part of the graph: they are the caller's arrays, which must not be written to before the model is
    saved. `save` refuses a model whose arrays were written to.

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
