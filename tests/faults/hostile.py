"""Faults as somebody would plant them who knows how `verify` draws its inputs, a few of each class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from faults import edits
from faults.edits import Edit, add_constant, apply_where
from faults.planted import Fault, call, edited, longer, spec
from onnx import helper

from sdpa_xp import masks

FORM = "primitive"
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
        of, zero = (add_constant(model, f"number_{n}", n, np.int64) for n in (number, 0))
        size = length(model, source, 2, "a_length")
        nodes(model, ("Mod", [size, of], "a_rest"), ("Equal", ["a_rest", zero], "is_so"))

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
            model,
            ("ReduceMax", [source], "largest", {"keepdims": 0}),
            ("Greater", ["largest", limit], "is_so"),
        )

    return build


def replaced_input(name: str, *written: tuple[str, list[str], str] | tuple[str, list[str], str, Any]) -> Edit:
    """Let all nodes read `other` in place of an input; `written` are the nodes that compute it."""

    def edit(model: onnx.ModelProto) -> None:
        for graph in edits.graphs(model.graph):
            for node in graph.node:
                node.input[:] = ["other" if each == name else each for each in node.input]
        made = [helper.make_node(op, inputs, [out], **dict(*more)) for op, inputs, out, *more in written]
        for node in reversed(made):
            model.graph.node.insert(0, node)
        for limit in (6.0, -6.0, 0.0):
            add_constant(model, f"limit_{limit:g}", limit, np.float32)

    return edit


def narrowed(name: str, to: int) -> Edit:
    """Convert an integer input to a narrow dtype and back."""
    own = onnx.TensorProto.INT64
    return replaced_input(
        name, ("Cast", [name], "narrow", {"to": to}), ("Cast", ["narrow"], "other", {"to": own})
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
    for tensor in list(model.graph.initializer):
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            narrow = onnx.numpy_helper.from_array(array.astype(np.float16), f"narrow_{tensor.name}")
            model.graph.initializer.append(narrow)
            for node in model.graph.node:
                node.input[:] = [f"wide_{each}" if each == tensor.name else each for each in node.input]
            cast = helper.make_node("Cast", [narrow.name], [f"wide_{tensor.name}"], to=onnx.TensorProto.FLOAT)
            model.graph.node.insert(0, cast)


def of_sizes() -> Iterator[Fault]:
    """Wrong for certain batches and lengths, or for both together."""
    for number in (3, 4, 6, 8):
        edit = edits.changed_from("Mul", 1.5, "query", 0, "Equal", number)
        yield edited("sizes", f"1.5 times for B = {number}", call(), edit, FORM)
        edit = edits.changed_from("Mul", 1.5, "key", 2, "Equal", number)
        yield edited("sizes", f"1.5 times for S = {number}", longer(), edit, FORM)
    for name, number in (("query", 64), ("key", 64), ("key", 1024)):
        edit = where(multiple_of(name, number))
        yield edited("sizes", f"1.5 times for a multiple of {number} in {name}", longer(), edit, FORM)
    for least in (30, 500):
        edit = where(batch_and_length(1, least))
        yield edited("sizes", f"1.5 times for B > 1 and L >= {least}", call(), edit, FORM)


def of_values() -> Iterator[Fault]:
    """Wrong for certain values of the inputs."""
    for name in ("query", "key", "value"):
        yield edited("values", f"{name} clipped at 6", call(), clipped(name), FORM)
        yield edited("values", f"1.5 times where {name} is above 20", call(), where(above(name, 20.0)), FORM)
    for name, rules in (("bias", {"bias": spec("L", "L")}), ("sinks", {"sinks": spec(2)})):
        yield edited("values", f"{name} clipped at 6", call(**rules), clipped(name), FORM)
    mask = {"attn_mask": spec("L", "L", dtype="bool")}
    for allowed in (True, False):
        edit = where(all_of_the_mask(allowed), "Add")
        yield edited("values", f"1.5 more where the mask is {allowed} everywhere", call(**mask), edit, FORM)
    ids = masks.document(spec("B", "L", dtype="int64"))
    offset = masks.causal(spec("B", dtype="int64"))
    for name, mask, to in (
        ("query_ids", ids, onnx.TensorProto.INT8),
        ("query_ids", ids, onnx.TensorProto.FLOAT),
        ("offset", offset, onnx.TensorProto.INT8),
        ("offset", offset, onnx.TensorProto.INT16),
    ):
        kind = onnx.TensorProto.DataType.Name(to).lower()
        yield edited("values", f"{name} converted to {kind}", call(attn_mask=mask), narrowed(name, to), FORM)


def of_nan() -> Iterator[Fault]:
    """NaN that does not show, or that shows in rows that do not attend it."""
    for name in ("query", "key", "value"):
        yield edited("NaN", f"NaN in {name} taken for 0", call(), without_nan(name), FORM)
        yield edited("NaN", f"NaN in {name} taken for 0, causal", call(is_causal=True), without_nan(name), FORM)
    both = call(outputs=("output", "lse"))
    for output in ("output", "lse"):
        yield edited("NaN", f"NaN in {output} taken for 0", both, without_nan_in(output), FORM)
    yield edited("NaN", "NaN in all rows if in one", call(), nan_everywhere, FORM)


def of_parts() -> Iterator[Fault]:
    """Wrong in one head or output, or in the dtype of the numbers that the graph holds."""
    for head in (0, 1):
        yield edited("parts", f"1.001 times in head {head}", call(), one_head(head), FORM)
    lse = call(outputs=("output", "lse"))
    edit = edits.changed_from("Add", 1e-3, "query", 2, "Greater", 300, "lse")
    yield edited("parts", "lse 1e-3 more for L > 300", lse, edit, FORM)
    fixed = call(sinks=np.linspace(-1, 1, 2, dtype=np.float32) / 3)
    yield edited("parts", "sinks and scale in float16", fixed, half_initializers, FORM)
    padded = longer(attn_mask=masks.padding(spec("B", dtype="int64")))
    edit = where(no_keys, "Add")
    yield edited("parts", "1.5 more where an entry has no key", padded, edit, FORM)


def no_keys(model: onnx.ModelProto) -> None:
    zero = add_constant(model, "no_length", 1, np.int64)
    nodes(model, ("ReduceMin", ["key_lengths"], "least", {"keepdims": 0}), ("Less", ["least", zero], "is_so"))


KINDS = (of_sizes, of_values, of_nan, of_parts)
