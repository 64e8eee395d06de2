"""Edits that make a model wrong under a condition, of lengths or of values, and edits of what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import edits
import numpy as np
import onnx
from edits import Edit, add_constant, apply_where
from onnx import helper

Build = Callable[[onnx.ModelProto], None]
"""Adds the nodes that compute the value `is_so`."""


def nodes(
    model: onnx.ModelProto, *written: tuple[str, list[str], str] | tuple[str, list[str], str, Any]
) -> None:
    """Append nodes: operator, inputs, output, and attributes."""
    for operator, inputs, output, *attributes in written:
        model.graph.node.append(helper.make_node(operator, inputs, [output], **dict(*attributes)))


def where(build: Build, change: str = "Mul", number: float = 1.5, output: str = "output") -> Edit:
    """Change an output where `is_so` is True."""

    def edit(model: onnx.ModelProto) -> None:
        build(model)
        apply_where(model, change, number, output)

    return edit


def length(model: onnx.ModelProto, source: str, axis: int, name: str) -> str:
    """The length of an axis of an input."""
    index = add_constant(model, f"axis_{axis}", axis, np.int64)
    nodes(model, ("Shape", [source], f"shape_of_{name}"), ("Gather", [f"shape_of_{name}", index], name))
    return name


def multiple_of(source: str, number: int) -> Build:
    """Where the length of an input is a multiple of a number."""

    def build(model: onnx.ModelProto) -> None:
        divisor, zero = (add_constant(model, f"number_{n}", n, np.int64) for n in (number, 0))
        size = length(model, source, 2, "a_length")
        nodes(model, ("Mod", [size, divisor], "a_rest"), ("Equal", ["a_rest", zero], "is_so"))

    return build


def batch_and_length(batch: int, least: int) -> Build:
    """Where the batch is larger than a number, and there are at least so many queries."""

    def build(model: onnx.ModelProto) -> None:
        limits = [add_constant(model, f"above_{n}", n, np.int64) for n in (batch, least - 1)]
        sizes = [length(model, "query", axis, f"size_{axis}") for axis in (0, 2)]
        nodes(
            model,
            ("Greater", [sizes[0], limits[0]], "many"),
            ("Greater", [sizes[1], limits[1]], "long"),
            ("And", ["many", "long"], "is_so"),
        )

    return build


def one_of_many(model: onnx.ModelProto) -> None:
    """Where there are one query and more than 200 keys."""
    one, many = (add_constant(model, f"number_{n}", n, np.int64) for n in (1, 200))
    nodes(
        model,
        ("Equal", [length(model, "query", 2, "queries"), one], "is_one"),
        ("Greater", [length(model, "key", 2, "keys"), many], "are_many"),
        ("And", ["is_one", "are_many"], "is_so"),
    )


def long_and_large(model: onnx.ModelProto) -> None:
    """Where there are more than 200 queries, and one of them has a number above 30."""
    limits = add_constant(model, "above", 30.0, np.float32), add_constant(model, "number_200", 200, np.int64)
    nodes(
        model,
        ("ReduceMax", ["query"], "largest", {"keepdims": 0}),
        ("Greater", ["largest", limits[0]], "is_large"),
        ("Greater", [length(model, "query", 2, "queries"), limits[1]], "is_long"),
        ("And", ["is_large", "is_long"], "is_so"),
    )


def all_of_the_mask(allowed: bool) -> Build:
    """Where the mask allows every pair, or none."""

    def build(model: onnx.ModelProto) -> None:
        kind = onnx.TensorProto.INT32
        one = add_constant(model, "a_one", 1, np.int32)
        nodes(model, ("Cast", ["attn_mask"], "as_numbers", {"to": kind}))
        if allowed:
            nodes(
                model,
                ("ReduceMin", ["as_numbers"], "least", {"keepdims": 0}),
                ("Equal", ["least", one], "is_so"),
            )
            return
        nodes(model, ("ReduceMax", ["as_numbers"], "most", {"keepdims": 0}), ("Less", ["most", one], "is_so"))

    return build


def above(source: str, number: float) -> Build:
    """Where an input has a number above another."""

    def build(model: onnx.ModelProto) -> None:
        limit = add_constant(model, "above", number, np.float32)
        nodes(
            model, ("ReduceMax", [source], "largest", {"keepdims": 0}), ("Greater", ["largest", limit], "is_so")
        )

    return build


def replaced_input(name: str, *written: tuple[str, list[str], str] | tuple[str, list[str], str, Any]) -> Edit:
    """Let all nodes read `other` in place of an input; `written` are the nodes that compute it."""

    def edit(model: onnx.ModelProto) -> None:
        for graph in edits.graphs(model.graph):
            for node in graph.node:
                node.input[:] = ["other" if source == name else source for source in node.input]
        new_nodes = [helper.make_node(op, inputs, [out], **dict(*more)) for op, inputs, out, *more in written]
        for node in reversed(new_nodes):
            model.graph.node.insert(0, node)
        for limit in (6.0, -6.0, 0.0):
            add_constant(model, f"limit_{limit:g}", limit, np.float32)

    return edit


def narrowed(name: str, to: int) -> Edit:
    """Convert an integer input to a narrow dtype and back."""
    wide = onnx.TensorProto.INT64
    return replaced_input(
        name, ("Cast", [name], "narrow", {"to": to}), ("Cast", ["narrow"], "other", {"to": wide})
    )


def clipped(name: str) -> Edit:
    """Keep an input between -6 and 6."""
    return replaced_input(name, ("Clip", [name, "limit_-6", "limit_6"], "other"))


def without_nan(name: str) -> Edit:
    """Take NaN in an input for 0."""
    return replaced_input(name, ("IsNaN", [name], "is_nan"), ("Where", ["is_nan", "limit_0", name], "other"))


def without_nan_in(output: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        inner = edits.renamed_output(model, output)
        zero = add_constant(model, "a_zero", 0.0, np.float32)
        nodes(model, ("IsNaN", [inner], "is_nan"), ("Where", ["is_nan", zero, inner], output))

    return edit


def nan_everywhere(model: onnx.ModelProto) -> None:
    """One NaN in an output makes all of it NaN."""
    inner = edits.renamed_output(model, "output")
    zero = add_constant(model, "a_zero", 0.0, np.float32)
    nodes(
        model,
        ("ReduceSum", [inner], "a_sum", {"keepdims": 0}),
        ("Mul", ["a_sum", zero], "zero_or_nan"),
        ("Add", [inner, "zero_or_nan"], "output"),
    )


def one_head(number: int) -> Edit:
    """Another factor for one head."""

    def edit(model: onnx.ModelProto) -> None:
        inner = edits.renamed_output(model, "output")
        factors = np.where(np.arange(2) == number, 1.001, 1.0).reshape(1, 2, 1, 1)
        nodes(model, ("Mul", [inner, add_constant(model, "factors", factors, np.float32)], "output"))

    return edit


def half_initializers(model: onnx.ModelProto) -> None:
    """Hold each floating number of the graph in float16, and widen it where it is used."""
    for graph in edits.graphs(model.graph):
        for tensor in list(graph.initializer):
            array = onnx.numpy_helper.to_array(tensor)
            if array.dtype == np.float32:
                narrow = onnx.numpy_helper.from_array(array.astype(np.float16), f"narrow_{tensor.name}")
                graph.initializer.append(narrow)
                wide = f"wide_{tensor.name}"
                for node in graph.node:
                    node.input[:] = [wide if source == tensor.name else source for source in node.input]
                graph.node.insert(0, helper.make_node("Cast", [narrow.name], [wide], to=onnx.TensorProto.FLOAT))


def no_keys(model: onnx.ModelProto) -> None:
    zero = add_constant(model, "no_length", 1, np.int64)
    nodes(model, ("ReduceMin", ["key_lengths"], "least", {"keepdims": 0}), ("Less", ["least", zero], "is_so"))
