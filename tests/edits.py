"""Edits of a model that make it wrong: of its nodes, of its numbers, and from some length on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


def append(model: onnx.ModelProto, text: str, **numbers: float | list[int]) -> None:
    """Append nodes in ONNX's text, a line each: `output = Operator <attributes> (inputs)`.

    A number becomes an initializer of its name: a float of float32, integers of int64.
    """
    for name, number in numbers.items():
        add_constant(model, name, number, np.float32 if isinstance(number, float) else np.int64)
    model.graph.node.extend(onnx.parser.parse_node(line.strip()) for line in text.strip().splitlines())


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
        text = f"a_length = Shape <start = {axis}, end = {axis + 1}> ({source})"
        append(model, f"{text}\nis_so = {compare} (a_length, a_number)", a_number=length)
        apply_where(model, change, number, output)

    return edit


def changed_beside_large_scores(number: float, above: float) -> Edit:
    """Multiply the output where the query has a number above `above`."""

    def edit(model: onnx.ModelProto) -> None:
        append(
            model,
            """wide_query = Cast <to = 1> (query)
            sizes = Abs(wide_query)
            largest = ReduceMax <keepdims = 0> (sizes)
            is_so = Greater(largest, above)""",
            above=above,
        )
        apply_where(model, "Mul", number, "output")

    return edit


def apply_where(model: onnx.ModelProto, change: str, number: float, output: str) -> None:
    """Change an output where the value `is_so` is True."""
    inner = renamed_output(model, output)
    dtype = np.float64 if dtype_of(model, output) == np.float64 else np.float32
    neutral = add_constant(model, "no_change", 1.0 if change == "Mul" else 0.0, dtype)
    changed = add_constant(model, "change", number, dtype)
    append(model, f"a_change = Where(is_so, {changed}, {neutral})")
    _apply(model, change, None, inner, output, output)


def _apply(model: onnx.ModelProto, change: str, number: float | None, inner: str, to: str, output: str) -> None:
    """Add `to` = `inner` with the change, whose number may be a value `a_change`; half precision in float32."""
    dtype, factor = dtype_of(model, output), "a_change"
    wide = dtype in (np.float32, np.float64)
    if number is not None:
        add_constant(model, factor, number, dtype if wide else np.float32)
    if wide:
        append(model, f"{to} = {change}({inner}, {factor})")
        return
    append(
        model,
        f"""in_float32 = Cast <to = 1> ({inner})
        changed = {change}(in_float32, {factor})
        {to} = Cast <to = {helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}> (changed)""",
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
        append(
            model,
            f"""wide_bias = Cast <to = 1> ({bias})
            largest_bias = ReduceMax(wide_bias, last)
            is_empty = LessOrEqual(largest_bias, sentinel)
            wide_output = Cast <to = 1> ({inner})
            emptied = Where(is_empty, nothing, wide_output)
            output = Cast <to = {helper.np_dtype_to_tensor_dtype(np.dtype(dtype_of(model)))}> (emptied)""",
            sentinel=sentinel,
            nothing=0.0,
            last=[-1],
        )

    return edit


def read_instead(model: onnx.ModelProto, others: Mapping[str, str], *first: str) -> None:
    """Let all nodes read other values in place of some; `first` are nodes that compute them, in ONNX's text."""
    for node in nodes(model.graph):
        node.input[:] = [others.get(name, name) for name in node.input]
    for text in reversed(first):
        model.graph.node.insert(0, onnx.parser.parse_node(text))


def swapped_inputs(one: str, other: str) -> Edit:
    """Let every node read one input of the graph in place of the other."""
    return lambda model: read_instead(model, {one: other, other: one})


def rounded_input(name: str, to: int) -> Edit:
    """Round an input to a narrower dtype before it is used."""

    def edit(model: onnx.ModelProto) -> None:
        (value,) = (value for value in model.graph.input if value.name == name)
        narrow = f"narrow = Cast <to = {to}> ({name})"
        wide = f"wide = Cast <to = {value.type.tensor_type.elem_type}> (narrow)"
        read_instead(model, {name: "wide"}, narrow, wide)

    return edit


def reversed_axis(axis: int, output: str = "output") -> Edit:
    """Turn an output round along an axis."""

    def edit(model: onnx.ModelProto) -> None:
        inner = renamed_output(model, output)
        ends = {"starts": [-1], "ends": [np.iinfo(np.int64).min], "axes": [axis], "steps": [-1]}
        append(model, f"{output} = Slice({inner}, starts, ends, axes, steps)", **ends)

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
    wheres = [node for node in model.graph.node if node.op_type == "Where"]
    blanked = {node.output[0]: name for node in wheres for name in node.input if name in ("key", "value")}
    assert blanked
    read_instead(model, blanked)


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
    read_instead(model, {"attn_mask": "turned"}, "turned = Not(attn_mask)")


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
