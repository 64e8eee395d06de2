"""Models that are wrong, by class: what `verify` has to catch.

A fault is a model and what was done to it. It is either an edit of a right model, or a right model of another
call than its metadata state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any, TypeAlias

import edits
import numpy as np
import onnx
from edits import Edit

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention

Call: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[str, Call, Edit | Call]
"""A name, the call that the model states, and an edit of its model or the call that the model computes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A wrong model, which is built when it is needed."""

    kind: str
    """The class of the fault."""
    name: str
    right: Callable[[], onnx.ModelProto]
    wrong: Callable[[], onnx.ModelProto]


FORMS = ("attention", "tiled", "primitive")
"""The forms that state nearly every call."""
OURS = ("tiled", "primitive")
HALVES = ("float16", "bfloat16")


def spec(*shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, shape)


def call(dtype: str = "float32", **rules: Any) -> Call:
    """Two heads and open lengths, of as many keys as queries."""
    return dict.fromkeys(("query", "key", "value"), spec("B", 2, "L", 8, dtype=dtype)) | rules


def longer(dtype: str = "float32", **rules: Any) -> Call:
    """One key head for two query heads, and another number of keys than of queries."""
    key = spec("B", 1, "S", 8, dtype=dtype)
    return call(dtype) | {"key": key, "value": key} | rules


def cached(dtype: str = "float32", **rules: Any) -> Call:
    """A cache that the new keys are joined to."""
    past, new = (spec("B", 1, length, 8, dtype=dtype) for length in "PL")
    return call(dtype) | {"key": new, "value": new, "past_key": past, "past_value": past} | rules


def fault(kind: str, form: str, row: Row) -> Fault:
    """An edit of a right model, or a model of another call that has the metadata of the one it states."""
    name, stated, other = row
    right = partial(export_attention, **stated, form=form)

    def wrong() -> onnx.ModelProto:
        model = right()
        if callable(other):
            other(model)
            return model
        written = export_attention(**other, form=form)
        del written.metadata_props[:]
        written.metadata_props.extend(model.metadata_props)
        return written

    return Fault(kind, f"{form}: {name}", right, wrong)


def faults(kind: str, forms: Iterable[str], rows: Iterable[Row]) -> Iterator[Fault]:
    """Each of the rows in each of the forms."""
    rows = list(rows)
    return (fault(kind, form, row) for form in forms for row in rows)


def from_a_length_on(kind: str) -> Iterator[Fault]:
    """Right up to some length, batch or past, and wrong beyond; or wrong where a length is small."""
    causal, past = longer(is_causal=True), cached(is_causal=True)
    changes: list[tuple[Call, str, float, str, int, str, int]] = [
        *((call(), "Mul", 1.5, "query", 2, "Greater", length) for length in (5, 32, 100, 300, 1000, 1500)),
        *((causal, "Add", 0.1, "key", 2, "Greater", length) for length in (6, 60, 600, 1600)),
        *((call(), "Mul", 1.01, "query", 0, "Greater", batch) for batch in (2, 5)),
        *((call(), "Mul", 0.0, "query", 2, "Equal", length) for length in (1, 2, 5)),
        (past, "Mul", 0.9, "past_key", 2, "Less", 1),
        (past, "Mul", 0.9, "past_key", 2, "Greater", 40),
    ]
    rows = [
        (
            f"{operator} {number} where axis {axis} of {source} is {compare} {length}",
            stated,
            edits.changed_from(*change),
        )
        for stated, *change in changes
        for operator, number, source, axis, compare, length in [change]
    ]
    yield from faults(kind, FORMS, rows)
    fixed = dict.fromkeys(("query", "key", "value"), spec(1, 2, "L", 8)) | {"is_causal": True}
    for length in (5, 100, 1000):
        edit = edits.changed_from("Mul", 1.5, "query", 2, "Greater", length)
        yield fault(kind, "grouped_query", (f"1.5 times for L > {length}", fixed, edit))


def other_numbers(kind: str) -> Iterator[Fault]:
    """A mask or a bias with another number than the call's, or none."""
    causal, window = masks.causal(), masks.sliding_window
    pairs: list[tuple[Any, Any]] = [
        (window(5, 0), window(4, 0)),
        (window(255, 0), window(256, 0)),
        (window(256, 0), window(200, 0)),
        (window(256, 0), window(130, 0)),
        (window(256, 0), causal),
        (causal, window(256, 0)),
        (window(3, 701), window(3, 700)),
        (window(3, 300), window(3, None)),
        (masks.causal(200), causal),
        (causal, masks.causal(-1)),
        (masks.causal(-301), masks.causal(-300)),
        (causal | masks.prefix(101), causal | masks.prefix(100)),
        (causal | masks.prefix(50), causal),
        (masks.chunked(127), masks.chunked(128)),
        (causal & masks.chunked(600), causal),
        (masks.dilated(8), masks.dilated(9)),
        (window(9, 0) | masks.prefix(30), window(9, 0) & masks.prefix(30)),
        (masks.chunked(40), ~masks.chunked(40)),
        (causal, masks.causal("lower_right")),
        (masks.padding(41), masks.padding(40)),
    ]
    table = spec(32, 2)
    of_biases = [
        (biases.alibi(2), biases.alibi(2, offset=1)),
        (biases.relative(table, max_distance=61), biases.relative(table, max_distance=60)),
        (biases.relative(table), biases.relative(table, bidirectional=False)),
    ]
    turns = cycle(FORMS)  # what a model is tried with follows from its call, hardly from its form
    for stated, written in pairs:
        name = f"{written} for {stated}"
        of_mask = longer if "lower_right" in name or "padding" in name else call
        yield fault(kind, next(turns), (name, of_mask(attn_mask=stated), of_mask(attn_mask=written)))
    for stated, written in of_biases:
        yield fault(kind, next(turns), (f"{written} for {stated}", call(bias=stated), call(bias=written)))
    of_caches = [cached(attn_mask=window(width, 0)) for width in (40, 41)]
    yield from faults(kind, OURS, [("window 41 for 40 beside a cache", *of_caches)])


def rules(kind: str) -> Iterator[Fault]:
    """A rule of the call that the graph leaves out, or has with another number."""
    for dtype in ("float32", *HALVES):
        of_dtype: list[Row] = [
            ("no softcap", call(dtype, softcap=30.0), call(dtype)),
            ("softcap 31 for 30", call(dtype, softcap=30.0), call(dtype, softcap=31.0)),
            ("scale 0.2 % off", call(dtype, scale=0.25), call(dtype, scale=0.2505)),
            ("no causal mask", call(dtype, is_causal=True), call(dtype)),
        ]
        yield from faults(kind, FORMS, [(f"{name} ({dtype})", *calls) for name, *calls in of_dtype])
    rows: list[Row] = [
        ("scale -0.25 for 0.25", call(scale=0.25), call(scale=-0.25)),
        ("scale 1e-5 off", call(scale=0.25), call(scale=0.2500025)),
        ("keys and values swapped", call(), edits.swapped_inputs("key", "value")),
        ("heads the other way round", call(), edits.reversed_axis(1)),
        ("batch the other way round", call(), edits.reversed_axis(0)),
        ("queries the other way round", call(), edits.reversed_axis(2)),
    ]
    yield from faults(kind, FORMS, rows)
    whole = dict.fromkeys(("query", "key", "value"), spec(2, 2, 9, 8))
    for form, stated in (("multi_head", whole), ("grouped_query", whole | {"is_causal": True})):
        fused: list[Row] = [
            ("the scale doubled", stated, edits.attribute("scale", 0.5)),
            ("1.001 times", stated, edits.changed_output("Mul", 1.001)),
            ("keys and values swapped", stated, edits.swapped_inputs("key", "value")),
        ]
        yield from faults(kind, [form], fused)
    sinks, bias = call(sinks=spec(2)), call(bias=spec("L", "L"))
    without: list[Row] = [
        ("sinks without effect", sinks, sinks | {"scale": 0.2}),
        ("the cap of a softcap after the bias", bias | {"softcap": 5.0}, bias),
    ]
    yield from faults(kind, OURS, without)


def large_scores(kind: str) -> Iterator[Fault]:
    """Right for ordinary scores, and wrong for large ones."""
    for dtype in ("float32", *HALVES, "float64"):
        rows = [
            (
                f"{number} times where a query is above {above} ({dtype})",
                call(dtype),
                edits.changed_beside_large_scores(number, above),
            )
            for number, above in ((0.0, 30.0), (1.1, 30.0), (1.01, 50.0))
        ]
        yield from faults(kind, OURS if dtype != "bfloat16" else ("attention", "primitive"), rows)
        if dtype != "float64":
            yield from faults(
                kind, OURS, [(f"scores cut off at 80 ({dtype})", call(dtype), edits.clipped_scores(80.0))]
            )
    for dtype, least in product(("float32", "bfloat16"), (-200.0, -1e4)):
        row = f"{least:g} for -inf ({dtype})", call(dtype, is_causal=True), edits.number_for(-np.inf, least)
        yield from faults(kind, OURS, [row])


def sentinels(kind: str) -> Iterator[Fault]:
    """A finite number in place of -inf, such as CUDA's kernels have: right until scores exceed it."""
    for dtype, number in {"float32": -1e30, "bfloat16": -1e30, "float16": -65504.0}.items():
        stated = {
            "mask": call(dtype, attn_mask=spec("B", 1, "L", "L", dtype="bool")),
            "window": call(dtype, attn_mask=masks.sliding_window(40, 0)),
            "padding": longer(dtype, attn_mask=masks.padding(spec("B", dtype="int64"))),
        }
        for name, of_mask in stated.items():
            what, edit = f"{number:g} for the -inf of a {name} ({dtype})", edits.number_for(-np.inf, number)
            yield from faults(kind, OURS, [(what, of_mask, edit)])
            if (
                dtype == "float32" and name != "padding"
            ):  # the graph for CUDA, where the CPU has a kernel for it
                yield fault(kind, "attention", (what, of_mask | {"runtime": "onnxruntime>=1.28;cuda"}, edit))
        bias, second = (spec(*shape, dtype=dtype) for shape in (("L", "L"), ("B", 1, "L", "L")))
        rows: list[Row] = [
            (
                f"rows of {name} up to {number:g} are empty ({dtype})",
                of_biases,
                edits.empty_from(source, number),
            )
            for name, source, of_biases in (
                ("a bias", "bias", call(dtype, bias=bias)),
                ("two biases", "attn_mask", call(dtype, attn_mask=second, bias=bias)),
            )
        ]
        yield from faults(kind, FORMS, rows)


def precision(kind: str) -> Iterator[Fault]:
    """Fewer bits than the call asks for, and errors that only a sharp bound sees."""
    half, single, changed = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, edits.changed_output
    rounded: list[Row] = [
        (f"{name} rounded to float16", call(), edits.rounded_input(name, half))
        for name in ("query", "key", "value")
    ]
    small: list[Row] = [
        ("1e-5 more", call(), changed("Add", 1e-5)),
        ("1.0001 times", call(), changed("Mul", 1.0001)),
    ]
    yield from faults(kind, FORMS, rounded + small)
    statistics = call(outputs=("row_max", "entropy", "key_sums"))
    of_both: list[Row] = [
        ("float32 for softmax_dtype float64", call(softmax_dtype="float64"), call()),
        *(
            (f"float64 {name} rounded to float32", call("float64"), edits.rounded_input(name, single))
            for name in ("query", "value")
        ),
        *((f"1.02 times ({dtype})", call(dtype), changed("Mul", 1.02)) for dtype in HALVES),
        *(
            (f"{name} {operator} {number}", statistics, changed(operator, number, name))
            for name, operator, number in (
                ("row_max", "Add", 1e-5),
                ("entropy", "Add", 1e-5),
                ("key_sums", "Mul", 1.00002),
            )
        ),
        ("present_key off by a rounding", cached(is_causal=True), changed("Mul", 1 + 2**-23, "present_key")),
    ]
    yield from faults(kind, OURS, of_both)
    weights, lse, scores = (call(outputs=("output", name)) for name in ("weights", "lse", "scores"))
    others: list[Row] = [
        ("weights 1e-7 more", weights, changed("Add", 1e-7, "weights")),
        ("weights 1e-7 more, causal", weights | {"is_causal": True}, changed("Add", 1e-7, "weights")),
        ("weights 1.00002 times", weights, changed("Mul", 1.00002, "weights")),
        ("lse 1e-5 more", lse, changed("Add", 1e-5, "lse")),
        ("lse of base 2", lse, changed("Mul", 1.4426950408889634, "lse")),
        ("scores 1e-4 more", scores, changed("Add", 1e-4, "scores")),
    ]
    yield from faults(kind, ["primitive"], others)


def masked(kind: str) -> Iterator[Fault]:
    """Rows without a key, NaN that nobody attends, and masks that are read wrongly."""
    boolean = call(attn_mask=spec("B", 1, "L", "L", dtype="bool"))
    hidden = call(attn_mask=spec("B", 1, 1, "L", dtype="bool"))
    number, ids = spec("B", dtype="int64"), masks.document(spec("B", "L", dtype="int64"))
    padded = longer(attn_mask=masks.padding(number))
    offset = masks.causal(number)
    yield from faults(kind, OURS, [("empty rows are means", boolean, edits.finfo_min_for_inf)])
    of_nan: list[Row] = [
        ("NaN behind a padding", padded, edits.let_nan_through),
        ("NaN behind a mask", hidden, edits.let_nan_through),
    ]
    yield from faults(kind, ("attention", "primitive"), of_nan)
    lower_right = longer(attn_mask=masks.causal("lower_right") & masks.padding(number))
    beyond = "an offset that is ignored beyond the diagonal"
    rows: list[Row] = [
        ("the mask turned round", boolean, edits.turned_mask),
        ("a causal mask beside the padding", padded, lower_right),
        (beyond, call(attn_mask=offset), call(attn_mask=offset & masks.causal(3))),
        ("documents with a causal mask", call(attn_mask=ids), call(attn_mask=ids & masks.causal())),
    ]
    yield from faults(kind, FORMS, rows)
    blocked = {
        "causal": longer(is_causal=True),
        "window": call(attn_mask=masks.sliding_window(2, 0)),
        "causal and padded": padded | {"is_causal": True},
    }
    again = [
        (f"each block of queries is the first, {name}", x, edits.first_block_again)
        for name, x in blocked.items()
    ]
    yield from faults(kind, ["tiled"], again)


def files(kind: str) -> Iterator[Fault]:
    """Metadata and numbers of the call that were changed in the file."""
    bias = biases.from_array(np.linspace(-1, 1, 32, dtype=np.float32))
    with_bias = dict.fromkeys(("query", "key", "value"), spec("B", 2, 32, 8)) | {"bias": bias}
    rows: list[Row] = [
        (f"{new} for {old} in the metadata", call(), edits.metadata(old, new))
        for old, new in (
            ("float32[B,2,L,8]", "float16[B,2,L,8]"),
            ("[B,2,L,8]", "[B,4,L,8]"),
            ('"is_causal": false', '"is_causal": true'),
        )
    ]
    rows += [(f"number {index} of a bias", with_bias, edits.changed_initializer(index)) for index in (0, 17)]
    yield from faults(kind, FORMS, rows)
    sinks = call(sinks=np.linspace(-1, 1, 2, dtype=np.float32))
    yield from faults(kind, OURS, [("a number of the sinks", sinks, edits.changed_initializer(1))])


KINDS = {
    "lengths": from_a_length_on,
    "numbers of masks and biases": other_numbers,
    "rules": rules,
    "large scores": large_scores,
    "sentinels": sentinels,
    "precision": precision,
    "what is masked": masked,
    "the file": files,
}


def planted() -> list[Fault]:
    """All of them."""
    return [planted_fault for kind, of_kind in KINDS.items() for planted_fault in of_kind(kind)]
