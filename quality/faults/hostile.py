"""Faults as somebody would plant them who knows how `verify` draws its inputs, a few of each class."""

from __future__ import annotations

from collections.abc import Iterator

import edits
import numpy as np
import onnx

from quality.faults.conditions import (
    above,
    all_of_the_mask,
    batch_and_length,
    clipped,
    half_initializers,
    long_and_large,
    multiple_of,
    nan_everywhere,
    narrowed,
    no_keys,
    one_head,
    one_of_many,
    where,
    without_nan,
    without_nan_in,
)
from quality.faults.planted import Fault, cached, call, edited, longer, spec
from sdpa_xp import masks

FORM = "primitive"


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
    for batch, least in ((1, 500), (5, 100)):
        edit = where(batch_and_length(batch, least))
        yield edited("sizes", f"1.5 times for B > {batch} and L >= {least}", call(), edit, FORM)
    yield edited("sizes", "1.5 times for L > 200 and large scores", call(), where(long_and_large), FORM)
    yield edited("sizes", "1.5 times for one query of many keys", longer(), where(one_of_many), FORM)
    for number in (1, 3, 8):
        edit = edits.changed_from("Mul", 1.5, "past_key", 2, "Equal", number)
        yield edited("sizes", f"1.5 times for P = {number}", cached(), edit, FORM)


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


KINDS = (of_sizes, of_values, of_nan, of_parts)
