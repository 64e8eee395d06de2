"""Faults as somebody would plant them who knows how `verify` draws its inputs, a few of each class."""

from __future__ import annotations

from collections.abc import Iterator

import edits
import numpy as np
import onnx
from edits import Edit, add_constant, append, apply_where, read_instead

from quality.faults.planted import Fault, Row, cached, call, faults, longer, spec
from sdpa_xp import masks

BATCH, LENGTH = "<start = 0, end = 1>", "<start = 2, end = 3>"


def where(text: str, change: str = "Mul", number: float = 1.5, **numbers: float) -> Edit:
    """Change the output where `is_so` is True; the text computes it, from inputs and numbers."""

    def edit(model: onnx.ModelProto) -> None:
        append(model, text, **numbers)
        apply_where(model, change, number, "output")

    return edit


def is_at(size: str, number: int, stated: str) -> Edit:
    source, axis = size.split()
    return edits.changed_from("Mul", 1.5, source, int(axis), stated, number)


def of_sizes() -> Iterator[Row]:
    """Wrong for certain batches and lengths, or for both together."""
    for number in (3, 4, 6, 8):
        yield f"1.5 times for B = {number}", call(), is_at("query 0", number, "Equal")
        yield f"1.5 times for S = {number}", longer(), is_at("key 2", number, "Equal")
    for number in (1, 3, 8):
        yield f"1.5 times for P = {number}", cached(), is_at("past_key 2", number, "Equal")
    for name, number in (("query", 64), ("key", 64), ("key", 1024)):
        text = f"length = Shape {LENGTH} ({name})\nrest = Mod(length, divisor)\nis_so = Equal(rest, nothing)"
        edit = where(text, divisor=number, nothing=0)
        yield f"1.5 times for a multiple of {number} in {name}", longer(), edit
    text = f"""entries = Shape {BATCH} (query)
    queries = Shape {LENGTH} (query)
    are_many = Greater(entries, batch)
    are_long = Greater(queries, shorter)
    is_so = And(are_many, are_long)"""
    for batch, least in ((1, 500), (5, 100)):
        yield f"1.5 times for B > {batch} and L >= {least}", call(), where(text, batch=batch, shorter=least - 1)
    text = f"""largest = ReduceMax <keepdims = 0> (query)
    is_large = Greater(largest, above)
    queries = Shape {LENGTH} (query)
    is_long = Greater(queries, shorter)
    is_so = And(is_large, is_long)"""
    yield "1.5 times for L > 200 and large scores", call(), where(text, above=30.0, shorter=200)
    text = f"""queries = Shape {LENGTH} (query)
    keys = Shape {LENGTH} (key)
    is_one = Equal(queries, one)
    are_many = Greater(keys, many)
    is_so = And(is_one, are_many)"""
    yield "1.5 times for one query of many keys", longer(), where(text, one=1, many=200)


def clipped(name: str) -> Edit:
    """Keep an input between -6 and 6."""

    def edit(model: onnx.ModelProto) -> None:
        for limit, number in (("least", -6.0), ("most", 6.0)):
            add_constant(model, limit, number, np.float32)
        read_instead(model, {name: "near"}, f"near = Clip({name}, least, most)")

    return edit


def of_values() -> Iterator[Row]:
    """Wrong for certain values of the inputs."""
    for name in ("query", "key", "value"):
        yield f"{name} clipped at 6", call(), clipped(name)
        text = f"largest = ReduceMax <keepdims = 0> ({name})\nis_so = Greater(largest, above)"
        yield f"1.5 times where {name} is above 20", call(), where(text, above=20.0)
    for name, rules in (("bias", {"bias": spec("L", "L")}), ("sinks", {"sinks": spec(2)})):
        yield f"{name} clipped at 6", call(**rules), clipped(name)
    mask = call(attn_mask=spec("L", "L", dtype="bool"))
    for allowed, reduce, number in ((True, "ReduceMin", 1.0), (False, "ReduceMax", 0.0)):
        text = f"""numbers = Cast <to = 1> (attn_mask)
        reduced = {reduce} <keepdims = 0> (numbers)
        is_so = Equal(reduced, all_of_it)"""
        edit = where(text, "Add", all_of_it=number)
        yield f"1.5 more where the mask is {allowed} everywhere", mask, edit
    kind = onnx.TensorProto
    ids, offset = masks.document(spec("B", "L", dtype="int64")), masks.causal(spec("B", dtype="int64"))
    for name, of_integers, to in (
        ("query_ids", ids, kind.INT8),
        ("query_ids", ids, kind.FLOAT),
        ("offset", offset, kind.INT8),
        ("offset", offset, kind.INT16),
    ):
        what = f"{name} converted to {kind.DataType.Name(to).lower()}"
        yield what, call(attn_mask=of_integers), edits.rounded_input(name, to)


def without_nan(name: str) -> Edit:
    """Take NaN in an input for 0."""

    def edit(model: onnx.ModelProto) -> None:
        add_constant(model, "nothing", 0.0, np.float32)
        read_instead(
            model, {name: "a_number"}, f"is_nan = IsNaN({name})", f"a_number = Where(is_nan, nothing, {name})"
        )

    return edit


def of_output(text: str, output: str = "output", **numbers: float) -> Edit:
    """Compute an output from what it was, `right`, in ONNX's text."""
    return lambda model: append(model, text.replace("right", edits.renamed_output(model, output)), **numbers)


def of_nan() -> Iterator[Row]:
    """NaN that does not show, or that shows in rows that do not attend it."""
    for name in ("query", "key", "value"):
        yield f"NaN in {name} taken for 0", call(), without_nan(name)
        yield f"NaN in {name} taken for 0, causal", call(is_causal=True), without_nan(name)
    for output in ("output", "lse"):
        text = f"is_nan = IsNaN(right)\n{output} = Where(is_nan, nothing, right)"
        edit = of_output(text, output, nothing=0.0)
        yield f"NaN in {output} taken for 0", call(outputs=("output", "lse")), edit
    text = """sum_of_all = ReduceSum <keepdims = 0> (right)
    nothing_or_nan = Mul(sum_of_all, nothing)
    output = Add(right, nothing_or_nan)"""
    yield "NaN in all rows if in one", call(), of_output(text, nothing=0.0)


def one_head(number: int) -> Edit:
    """Another factor for one head."""

    def edit(model: onnx.ModelProto) -> None:
        factors = np.where(np.arange(2) == number, 1.001, 1.0).reshape(1, 2, 1, 1)
        add_constant(model, "factors", factors, np.float32)
        of_output("output = Mul(right, factors)")(model)

    return edit


def half_initializers(model: onnx.ModelProto) -> None:
    """Hold each floating number of the graph in float16, and widen it where it is used."""
    for graph in edits.graphs(model.graph):
        for tensor in list(graph.initializer):
            array = onnx.numpy_helper.to_array(tensor)
            if array.dtype == np.float32:
                narrow, wide = f"narrow_{tensor.name}", f"wide_{tensor.name}"
                graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float16), narrow))
                for node in graph.node:
                    node.input[:] = [wide if source == tensor.name else source for source in node.input]
                graph.node.insert(0, onnx.helper.make_node("Cast", [narrow], [wide], to=onnx.TensorProto.FLOAT))


def of_parts() -> Iterator[Row]:
    """Wrong in one head or output, or in the dtype of the numbers that the graph holds."""
    for head in (0, 1):
        yield f"1.001 times in head {head}", call(), one_head(head)
    edit = edits.changed_from("Add", 1e-3, "query", 2, "Greater", 300, "lse")
    yield "lse 1e-3 more for L > 300", call(outputs=("output", "lse")), edit
    fixed = call(sinks=np.linspace(-1, 1, 2, dtype=np.float32) / 3)
    yield "sinks and scale in float16", fixed, half_initializers
    padded = longer(attn_mask=masks.padding(spec("B", dtype="int64")))
    text = "least = ReduceMin <keepdims = 0> (key_lengths)\nis_so = Less(least, one)"
    yield "1.5 more where an entry has no key", padded, where(text, "Add", one=1)


def hostile() -> list[Fault]:
    """All of them."""
    kinds = {"sizes": of_sizes, "values": of_values, "NaN": of_nan, "parts": of_parts}
    return [fault for kind, rows in kinds.items() for fault in faults(kind, ["primitive"], rows())]
