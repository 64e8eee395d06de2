"""Edits of a model that make it wrong: of its nodes, of its numbers, and from some length on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Edit = Callable[[onnx.ModelProto], None]


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and the bodies of its loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph, and of the bodies of its loops."""
    return [node for part in graphs(graph) for node in part.node]


def add_constant(model: onnx.ModelProto, name: str, value: Any, dtype: Any) -> str:
    """Give the model a number of that name; returns the name."""
    if all(tensor.name != name for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def renamed_output(model: onnx.ModelProto, output: str) -> str:
    """Let the node that computes `output` write to another name, which is returned."""
    inner = f"right_{output}"
    for node in model.graph.node:
        node.output[:] = [inner if name == output else name for name in node.output]
        node.input[:] = [inner if name == output else name for name in node.input]
    return inner


def dtype_of(model: onnx.ModelProto, output: str = "output") -> Any:
    (value,) = (value for value in model.graph.output if value.name == output)
    return helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def changed_output(change: str, number: float, output: str = "output") -> Edit:
    """Multiply an output, or add to it."""

    def edit(model: onnx.ModelProto) -> None:
        inner = renamed_output(model, output)
        _apply(model, change, number, inner, output, output)

    return edit


def changed_from(
    change: str, number: float, source: str, axis: int, compare: str, length: int, output: str = "output"
) -> Edit:
    """Multiply an output, or add to it, where a length of an input is above, below or equal to a number.

    `compare` is "Greater", "Less" or "Equal".
    """

    def edit(model: onnx.ModelProto) -> None:
        (value,) = (value for value in model.graph.input if value.name == source)
        index = axis % len(value.type.tensor_type.shape.dim)
        names = [
            add_constant(model, "an_axis", index, np.int64),
            add_constant(model, "a_number", length, np.int64),
        ]
        model.graph.node.extend(
            [
                helper.make_node("Shape", [source], ["a_shape"]),
                helper.make_node("Gather", ["a_shape", names[0]], ["a_length"]),
                helper.make_node(compare, ["a_length", names[1]], ["is_so"]),
            ]
        )
        apply_where(model, change, number, output)

    return edit


def changed_beside_large_scores(number: float, above: float) -> Edit:
    """Multiply the output where the query has a number above `above`."""

    def edit(model: onnx.ModelProto) -> None:
        limit = add_constant(model, "above", above, np.float32)
        model.graph.node.extend(
            [
                helper.make_node("Cast", ["query"], ["wide_query"], to=onnx.TensorProto.FLOAT),
                helper.make_node("Abs", ["wide_query"], ["sizes"]),
                helper.make_node("ReduceMax", ["sizes"], ["largest"], keepdims=0),
                helper.make_node("Greater", ["largest", limit], ["is_so"]),
            ]
        )
        apply_where(model, "Mul", number, "output")

    return edit


def apply_where(model: onnx.ModelProto, change: str, number: float, output: str) -> None:
    """Change an output where the value `is_so` is True."""
    inner = renamed_output(model, output)
    dtype = np.float64 if dtype_of(model, output) == np.float64 else np.float32
    neutral = add_constant(model, "no_change", 1.0 if change == "Mul" else 0.0, dtype)
    changed = add_constant(model, "change", number, dtype)
    model.graph.node.append(helper.make_node("Where", ["is_so", changed, neutral], ["a_change"]))
    _apply(model, change, None, inner, output, output)


def _apply(model: onnx.ModelProto, change: str, number: float | None, inner: str, to: str, output: str) -> None:
    """Add `to` = `inner` with the change, whose number may be a value `a_change`; half precision in float32."""
    dtype, factor = dtype_of(model, output), "a_change"
    wide = dtype in (np.float32, np.float64)
    if number is not None:
        add_constant(model, factor, number, dtype if wide else np.float32)
    if wide:
        model.graph.node.append(helper.make_node(change, [inner, factor], [to]))
        return
    stated = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model.graph.node.extend(
        [
            helper.make_node("Cast", [inner], ["in_float32"], to=onnx.TensorProto.FLOAT),
            helper.make_node(change, ["in_float32", factor], ["changed"]),
            helper.make_node("Cast", ["changed"], [to], to=stated),
        ]
    )


def attribute(name: str, value: float) -> Edit:
    """Change an attribute of the fused operator."""

    def edit(model: onnx.ModelProto) -> None:
        attributes = [a for node in model.graph.node for a in node.attribute if a.name == name]
        for present in attributes:
            present.CopyFrom(helper.make_attribute(name, value))
        if not attributes:
            fused = next(node for node in model.graph.node if "Attention" in node.op_type)
            fused.attribute.append(helper.make_attribute(name, value))

    return edit


def number_for(old: float, new: float) -> Edit:
    """Change each number of the model that is `old`, also -inf."""

    def edit(model: onnx.ModelProto) -> None:
        count = 0
        for graph in graphs(model.graph):
            for tensor in graph.initializer:
                array = numpy_helper.to_array(tensor)
                if array.dtype.kind not in "fi" or array.size > 4:
                    continue
                places = array == old if np.isinf(old) else np.isclose(array.astype(np.float64), old, rtol=1e-3)
                if places.any():
                    tensor.CopyFrom(
                        numpy_helper.from_array(np.where(places, new, array).astype(array.dtype), tensor.name)
                    )
                    count += 1
        assert count, f"no {old}"

    return edit


def empty_from(bias: str, sentinel: float) -> Edit:
    """Return 0 for rows whose biases are all at most a number, as a kernel does that has no -inf."""

    def edit(model: onnx.ModelProto) -> None:
        inner = renamed_output(model, "output")
        limit = add_constant(model, "sentinel", sentinel, np.float32)
        zero = add_constant(model, "nothing", 0.0, np.float32)
        stated = helper.np_dtype_to_tensor_dtype(np.dtype(dtype_of(model)))
        axes = add_constant(model, "last", [-1], np.int64)
        model.graph.node.extend(
            [
                helper.make_node("Cast", [bias], ["wide_bias"], to=onnx.TensorProto.FLOAT),
                helper.make_node("ReduceMax", ["wide_bias", axes], ["largest_bias"]),
                helper.make_node("LessOrEqual", ["largest_bias", limit], ["is_empty"]),
                helper.make_node("Cast", [inner], ["wide_output"], to=onnx.TensorProto.FLOAT),
                helper.make_node("Where", ["is_empty", zero, "wide_output"], ["emptied"]),
                helper.make_node("Cast", ["emptied"], ["output"], to=stated),
            ]
        )

    return edit


def swapped_inputs(one: str, other: str) -> Edit:
    """Let every node read one input of the graph in place of the other."""

    def edit(model: onnx.ModelProto) -> None:
        swap = {one: other, other: one}
        for graph in graphs(model.graph):
            for node in graph.node:
                node.input[:] = [swap.get(name, name) for name in node.input]

    return edit


def rounded_input(name: str, to: int) -> Edit:
    """Round an input to a narrower dtype before it is used."""

    def edit(model: onnx.ModelProto) -> None:
        (value,) = (value for value in model.graph.input if value.name == name)
        wide = value.type.tensor_type.elem_type
        for graph in graphs(model.graph):
            for node in graph.node:
                node.input[:] = ["rounded" if source == name else source for source in node.input]
        model.graph.node.insert(0, helper.make_node("Cast", ["narrow"], ["rounded"], to=wide))
        model.graph.node.insert(0, helper.make_node("Cast", [name], ["narrow"], to=to))

    return edit


def reversed_axis(axis: int, output: str = "output") -> Edit:
    """Turn an output round along an axis."""

    def edit(model: onnx.ModelProto) -> None:
        inner = renamed_output(model, output)
        ends = (("starts", -1), ("ends", np.iinfo(np.int64).min), ("axes", axis), ("steps", -1))
        names = [add_constant(model, name, [number], np.int64) for name, number in ends]
        model.graph.node.append(helper.make_node("Slice", [inner, *names], [output]))

    return edit


def clipped_scores(most: float) -> Edit:
    """Limit the scores before each Softmax, as if their exponentials would be too large."""

    def edit(model: onnx.ModelProto) -> None:
        count = 0
        for graph in graphs(model.graph):
            for index, node in reversed(list(enumerate(graph.node))):
                if node.op_type == "Softmax":
                    limit = f"limit_{count}"
                    graph.initializer.append(numpy_helper.from_array(np.asarray(most, np.float32), limit))
                    clipped = f"clipped_{count}"
                    graph.node.insert(index, helper.make_node("Min", [node.input[0], limit], [clipped]))
                    node.input[0] = clipped
                    count += 1
        assert count

    return edit


def finfo_min_for_inf(model: onnx.ModelProto) -> None:
    """What makes an empty row the mean of the values instead of 0, once nothing blanks it afterwards."""
    least = np.asarray(np.finfo(np.float32).min)
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            if np.isneginf(numpy_helper.to_array(tensor)).all():
                tensor.CopyFrom(numpy_helper.from_array(least.astype(np.float32), tensor.name))
        for blanked in graph.node:
            if blanked.op_type == "Where" and {value.name for value in graph.output} & {*blanked.output}:
                blanked.op_type, blanked.input[:] = "Identity", [blanked.input[1]]


def let_nan_through(model: onnx.ModelProto) -> None:
    """Read the keys and values themselves, and not the ones with 0 where no query attends."""
    blanked = {}
    for node in model.graph.node:
        for name in node.input:
            if node.op_type == "Where" and name in ("key", "value"):
                blanked[node.output[0]] = name
    assert blanked
    for graph in graphs(model.graph):
        for node in graph.node:
            node.input[:] = [blanked.get(name, name) for name in node.input]


def changed_initializer(index: int = 0, by: float = 1e-3) -> Edit:
    """Change one number of the largest floating initializer."""

    def edit(model: onnx.ModelProto) -> None:
        floats = [x for x in model.graph.initializer if numpy_helper.to_array(x).dtype.kind == "f"]
        largest = max(floats, key=lambda x: numpy_helper.to_array(x).size)
        array = numpy_helper.to_array(largest).copy()
        array.flat[index] += by
        largest.CopyFrom(numpy_helper.from_array(array, largest.name))

    return edit


def metadata(old: str, new: str) -> Edit:
    """Change the text of the call in the metadata."""

    def edit(model: onnx.ModelProto) -> None:
        (entry,) = (entry for entry in model.metadata_props if entry.key.startswith("sdpa_xp.call."))
        assert old in entry.value, entry.value
        entry.value = entry.value.replace(old, new)

    return edit


def turned_mask(model: onnx.ModelProto) -> None:
    """True means masked."""
    for graph in graphs(model.graph):
        for node in graph.node:
            node.input[:] = ["turned" if name == "attn_mask" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Not", ["attn_mask"], ["turned"]))


def first_block_again(model: onnx.ModelProto) -> None:
    """Every block of queries takes itself for the first one that the loop computes."""
    add_constant(model, "zero", [0], np.int64)
    body = list(graphs(model.graph))[1]
    goes_on = _copied_with_what_it_needs(
        body, body.output[0].name
    )  # of the true blocks, or the loop never ends
    next(node for node in body.node if node.op_type == "Mul").input[1] = "zero"
    body.output[0].name = goes_on


def _copied_with_what_it_needs(graph: onnx.GraphProto, name: str) -> str:
    """Copy the nodes that compute a value, and return the name of the copy."""
    names = {name}
    for node in reversed(graph.node):
        if names & {*node.output}:
            names |= {*node.input}
    copies = [node for node in graph.node if names & {*node.output}]
    renamed = {output: f"copy of {output}" for node in copies for output in node.output}
    for node in copies:
        inputs, outputs = ([renamed.get(x, x) for x in side] for side in (node.input, node.output))
        graph.node.append(helper.make_node(node.op_type, inputs, outputs))
        graph.node[-1].attribute.extend(node.attribute)
    return renamed[name]
