"""Models that are wrong, by class: what `verify` has to catch.

A fault is a model and what was done to it. It is either an edit of a right model, or a right model of another
call than its metadata state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any

import edits
import numpy as np
import onnx
from edits import Edit

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention


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
OF_STATISTICS = (("row_max", "Add", 1e-5), ("entropy", "Add", 1e-5), ("key_sums", "Mul", 1.00002))
"""What is done to an output: its name, an operator, and a number."""


def spec(*shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, shape)


def call(dtype: str = "float32", **rules: Any) -> dict[str, Any]:
    """Two heads and open lengths, of as many keys as queries."""
    qkv = spec("B", 2, "L", 8, dtype=dtype)
    return {"query": qkv, "key": qkv, "value": qkv, **rules}


def longer(dtype: str = "float32", **rules: Any) -> dict[str, Any]:
    """One key head for two query heads, and another number of keys than of queries."""
    key = spec("B", 1, "S", 8, dtype=dtype)
    return {"query": spec("B", 2, "L", 8, dtype=dtype), "key": key, "value": key, **rules}


def cached(dtype: str = "float32", **rules: Any) -> dict[str, Any]:
    """A cache that the new keys are joined to."""
    past = spec("B", 1, "P", 8, dtype=dtype)
    new = spec("B", 1, "L", 8, dtype=dtype)
    query = spec("B", 2, "L", 8, dtype=dtype)
    return {"query": query, "key": new, "value": new, "past_key": past, "past_value": past, **rules}


def edited(kind: str, name: str, arguments: dict[str, Any], edit: Edit, form: str) -> Fault:
    """A right model with an edit."""
    right = partial(export_attention, **arguments, form=form)

    def wrong() -> onnx.ModelProto:
        model = right()
        edit(model)
        return model

    return Fault(kind, f"{form}: {name}", right, wrong)


def mistaken(kind: str, name: str, stated: dict[str, Any], written: dict[str, Any], form: str) -> Fault:
    """A model of the call `written` that says that it computes the call `stated`."""
    right = partial(export_attention, **stated, form=form)

    def wrong() -> onnx.ModelProto:
        model, other = export_attention(**written, form=form), right()
        del model.metadata_props[:]
        model.metadata_props.extend(other.metadata_props)
        return model

    return Fault(kind, f"{form}: {name}", right, wrong)


def from_a_length_on() -> Iterator[Fault]:
    """Right up to some length, batch or past, and wrong beyond; or wrong where a length is small."""
    kind = "lengths"
    for form in FORMS:
        for length in (5, 32, 100, 300, 1000, 1500):
            edit = edits.changed_from("Mul", 1.5, "query", 2, "Greater", length)
            yield edited(kind, f"1.5 times for L > {length}", call(), edit, form)
        for length in (6, 60, 600, 1600):
            edit = edits.changed_from("Add", 0.1, "key", 2, "Greater", length)
            yield edited(kind, f"0.1 more for S > {length}", longer(is_causal=True), edit, form)
        for batch in (2, 5):
            edit = edits.changed_from("Mul", 1.01, "query", 0, "Greater", batch)
            yield edited(kind, f"1.01 times for B > {batch}", call(), edit, form)
        for length in (1, 2, 5):
            edit = edits.changed_from("Mul", 0.0, "query", 2, "Equal", length)
            yield edited(kind, f"0 for L = {length}", call(), edit, form)
        edit = edits.changed_from("Mul", 0.9, "past_key", 2, "Less", 1)
        yield edited(kind, "0.9 times without a past", cached(is_causal=True), edit, form)
        edit = edits.changed_from("Mul", 0.9, "past_key", 2, "Greater", 40)
        yield edited(kind, "0.9 times for P > 40", cached(is_causal=True), edit, form)
    fixed = spec(1, 2, "L", 8)
    grouped = {"query": fixed, "key": fixed, "value": fixed, "is_causal": True}
    for length in (5, 100, 1000):
        edit = edits.changed_from("Mul", 1.5, "query", 2, "Greater", length)
        yield edited(kind, f"1.5 times for L > {length}", grouped, edit, "grouped_query")


def other_numbers() -> Iterator[Fault]:
    """A mask or a bias with another number than the call's, or none."""
    kind = "numbers of masks and biases"
    table = spec(32, 2)
    pairs: list[tuple[str, Any, Any]] = [
        ("window 4 for 5", masks.sliding_window(5, 0), masks.sliding_window(4, 0)),
        ("window 256 for 255", masks.sliding_window(255, 0), masks.sliding_window(256, 0)),
        ("window 200 for 256", masks.sliding_window(256, 0), masks.sliding_window(200, 0)),
        ("window 130 for 256", masks.sliding_window(256, 0), masks.sliding_window(130, 0)),
        ("causal for a window of 256", masks.sliding_window(256, 0), masks.causal()),
        ("a window of 256 for causal", masks.causal(), masks.sliding_window(256, 0)),
        ("window 700 on the right for 701", masks.sliding_window(3, 701), masks.sliding_window(3, 700)),
        ("window without a right end", masks.sliding_window(3, 300), masks.sliding_window(3, None)),
        ("causal for causal(200)", masks.causal(200), masks.causal()),
        ("causal(-1) for causal", masks.causal(), masks.causal(-1)),
        ("causal(-300) for causal(-301)", masks.causal(-301), masks.causal(-300)),
        ("prefix 100 for 101", masks.causal() | masks.prefix(101), masks.causal() | masks.prefix(100)),
        ("no prefix of 50", masks.causal() | masks.prefix(50), masks.causal()),
        ("chunks of 128 for 127", masks.chunked(127), masks.chunked(128)),
        ("no chunks of 600", masks.causal() & masks.chunked(600), masks.causal()),
        ("steps of 9 for 8", masks.dilated(8), masks.dilated(9)),
        (
            "window & prefix for window | prefix",
            masks.sliding_window(9, 0) | masks.prefix(30),
            masks.sliding_window(9, 0) & masks.prefix(30),
        ),
        ("the mask turned round", masks.chunked(40), ~masks.chunked(40)),
        ("lower right for upper left", masks.causal(), masks.causal("lower_right")),
        ("padding 40 for 41", masks.padding(41), masks.padding(40)),
    ]
    turns = cycle(FORMS)  # what a model is tried with follows from its call, hardly from its form
    for (name, right, wrong), form in zip(pairs, turns, strict=False):
        make_call = longer if "lower right" in name or "padding" in name else call
        yield mistaken(kind, name, make_call(attn_mask=right), make_call(attn_mask=wrong), form)
    for (name, right_bias, wrong_bias), form in zip(
        (
            ("ALiBi from 1 on", biases.alibi(2), biases.alibi(2, offset=1)),
            (
                "distances up to 60 for 61",
                biases.relative(table, max_distance=61),
                biases.relative(table, max_distance=60),
            ),
            ("distances of one side", biases.relative(table), biases.relative(table, bidirectional=False)),
        ),
        turns,
        strict=False,
    ):
        yield mistaken(kind, name, call(bias=right_bias), call(bias=wrong_bias), form)
    for form in ("tiled", "primitive"):
        right, wrong = (cached(attn_mask=masks.sliding_window(width, 0)) for width in (40, 41))
        yield mistaken(kind, "window 41 for 40 beside a cache", right, wrong, form)


def rules() -> Iterator[Fault]:
    """A rule of the call that the graph leaves out, or has with another number."""
    kind = "rules"
    for dtype in ("float32", "float16", "bfloat16"):
        for form in ("attention", "tiled", "primitive"):
            yield mistaken(kind, f"no softcap ({dtype})", call(dtype, softcap=30.0), call(dtype), form)
            yield mistaken(
                kind, f"softcap 31 for 30 ({dtype})", call(dtype, softcap=30.0), call(dtype, softcap=31.0), form
            )
            yield mistaken(
                kind, f"scale 0.2 % off ({dtype})", call(dtype, scale=0.25), call(dtype, scale=0.2505), form
            )
            yield mistaken(kind, f"no causal mask ({dtype})", call(dtype, is_causal=True), call(dtype), form)
    for form in FORMS:
        yield mistaken(kind, "scale -0.25 for 0.25", call(scale=0.25), call(scale=-0.25), form)
        yield mistaken(kind, "scale 1e-5 off", call(scale=0.25), call(scale=0.2500025), form)
        yield edited(kind, "keys and values swapped", call(), edits.swapped_inputs("key", "value"), form)
        yield edited(kind, "heads the other way round", call(), edits.reversed_axis(1), form)
        yield edited(kind, "batch the other way round", call(), edits.reversed_axis(0), form)
        yield edited(kind, "queries the other way round", call(), edits.reversed_axis(2), form)
    fixed = spec(2, 2, 9, 8)
    whole = {"query": fixed, "key": fixed, "value": fixed}
    for form, more in (("multi_head", {}), ("grouped_query", {"is_causal": True})):
        yield edited(kind, "the scale doubled", whole | more, edits.attribute("scale", 0.5), form)
        yield edited(kind, "1.001 times", whole | more, edits.changed_output("Mul", 1.001), form)
        yield edited(kind, "keys and values swapped", whole | more, edits.swapped_inputs("key", "value"), form)
    for form in ("tiled", "primitive"):
        sinks = spec(2)
        yield mistaken(kind, "sinks without effect", call(sinks=sinks), call(sinks=sinks, scale=0.2), form)
        yield mistaken(
            kind,
            "the cap of a softcap after the bias",
            call(softcap=5.0, bias=spec("L", "L")),
            call(bias=spec("L", "L")),
            form,
        )


def large_scores() -> Iterator[Fault]:
    """Right for ordinary scores, and wrong for large ones."""
    kind = "large scores"
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        for number, above in ((0.0, 30.0), (1.1, 30.0), (1.01, 50.0)):
            edit = edits.changed_beside_large_scores(number, above)
            for form in ("primitive", "tiled") if dtype != "bfloat16" else ("attention", "primitive"):
                yield edited(
                    kind, f"{number} times where a query is above {above} ({dtype})", call(dtype), edit, form
                )
    for dtype in ("float32", "float16", "bfloat16"):
        for form in ("tiled", "primitive"):
            yield edited(kind, f"scores cut off at 80 ({dtype})", call(dtype), edits.clipped_scores(80.0), form)
    for least in (-200.0, -1e4):
        for form in ("tiled", "primitive"):
            edit = edits.number_for(-np.inf, least)
            yield edited(kind, f"{least:g} for -inf", call(is_causal=True), edit, form)
            yield edited(kind, f"{least:g} for -inf (bfloat16)", call("bfloat16", is_causal=True), edit, form)


def sentinels() -> Iterator[Fault]:
    """A finite number in place of -inf, such as CUDA's kernels have: right until scores exceed it."""
    kind = "sentinels"
    numbers = {"float32": -1e30, "bfloat16": -1e30, "float16": -65504.0}
    for dtype, number in numbers.items():
        boolean = call(dtype, attn_mask=spec("B", 1, "L", "L", dtype="bool"))
        padded = longer(dtype, attn_mask=masks.padding(spec("B", dtype="int64")))
        window = call(dtype, attn_mask=masks.sliding_window(40, 0))
        for name, arguments in (("mask", boolean), ("window", window), ("padding", padded)):
            edit, what = edits.number_for(-np.inf, number), f"{number:g} for the -inf of a {name} ({dtype})"
            yield from (edited(kind, what, arguments, edit, form) for form in ("tiled", "primitive"))
            if (
                dtype == "float32" and name != "padding"
            ):  # the graph for CUDA, as far as the CPU has a kernel for it
                on_cuda = {**arguments, "runtime": "onnxruntime>=1.28;cuda"}
                yield edited(kind, what, on_cuda, edit, "attention")
        bias, second = (spec(*shape, dtype=dtype) for shape in (("L", "L"), ("B", 1, "L", "L")))
        for name, source, arguments in (
            ("a bias", "bias", call(dtype, bias=bias)),
            ("two biases", "attn_mask", call(dtype, attn_mask=second, bias=bias)),
        ):
            edit, what = (
                edits.empty_from(source, number),
                f"rows of {name} up to {number:g} are empty ({dtype})",
            )
            yield from (edited(kind, what, arguments, edit, form) for form in FORMS)


def precision() -> Iterator[Fault]:
    """Fewer bits than the call asks for, and errors that only a sharp bound sees."""
    kind = "precision"
    half = onnx.TensorProto.FLOAT16
    for form in FORMS:
        for name in ("query", "key", "value"):
            yield edited(kind, f"{name} rounded to float16", call(), edits.rounded_input(name, half), form)
        yield edited(kind, "1e-5 more", call(), edits.changed_output("Add", 1e-5), form)
        yield edited(kind, "1.0001 times", call(), edits.changed_output("Mul", 1.0001), form)
    for form in ("tiled", "primitive"):
        wide = call(softmax_dtype="float64")
        yield mistaken(kind, "float32 for softmax_dtype float64", wide, call(), form)
        single = onnx.TensorProto.FLOAT
        for name in ("query", "value"):
            yield edited(
                kind,
                f"float64 {name} rounded to float32",
                call("float64"),
                edits.rounded_input(name, single),
                form,
            )
        for dtype in ("float16", "bfloat16"):
            yield edited(kind, f"1.02 times ({dtype})", call(dtype), edits.changed_output("Mul", 1.02), form)
    weights = call(outputs=("output", "weights"))
    yield edited(kind, "weights 1e-7 more", weights, edits.changed_output("Add", 1e-7, "weights"), "primitive")
    yield edited(
        kind,
        "weights 1e-7 more, causal",
        weights | {"is_causal": True},
        edits.changed_output("Add", 1e-7, "weights"),
        "primitive",
    )
    yield edited(
        kind, "weights 1.00002 times", weights, edits.changed_output("Mul", 1.00002, "weights"), "primitive"
    )
    lse = call(outputs=("output", "lse"))
    yield edited(kind, "lse 1e-5 more", lse, edits.changed_output("Add", 1e-5, "lse"), "primitive")
    yield edited(
        kind, "lse of base 2", lse, edits.changed_output("Mul", 1.4426950408889634, "lse"), "primitive"
    )
    scores = call(outputs=("output", "scores"))
    yield edited(kind, "scores 1e-4 more", scores, edits.changed_output("Add", 1e-4, "scores"), "primitive")
    statistics = call(outputs=("row_max", "entropy", "key_sums"))
    for form, (name, operator, number) in product(("tiled", "primitive"), OF_STATISTICS):
        edit = edits.changed_output(operator, number, name)
        yield edited(kind, f"{name} {operator} {number}", statistics, edit, form)
    past = cached(is_causal=True)
    for form in ("tiled", "primitive"):
        edit = edits.changed_output("Mul", 1 + 2**-23, "present_key")
        yield edited(kind, "present_key off by a rounding", past, edit, form)


def masked() -> Iterator[Fault]:
    """Rows without a key, NaN that nobody attends, and masks that are read wrongly."""
    kind = "what is masked"
    boolean = call(attn_mask=spec("B", 1, "L", "L", dtype="bool"))
    padded = longer(attn_mask=masks.padding(spec("B", dtype="int64")))
    for form in ("tiled", "primitive"):
        yield edited(kind, "empty rows are means", boolean, edits.finfo_min_for_inf, form)
    for form in ("attention", "primitive"):
        yield edited(kind, "NaN behind a padding", padded, edits.let_nan_through, form)
        hidden = call(attn_mask=spec("B", 1, 1, "L", dtype="bool"))
        yield edited(kind, "NaN behind a mask", hidden, edits.let_nan_through, form)
    for form in FORMS:
        yield edited(kind, "the mask turned round", boolean, edits.turned_mask, form)
        other = longer(attn_mask=masks.causal("lower_right") & masks.padding(spec("B", dtype="int64")))
        yield mistaken(kind, "a causal mask beside the padding", padded, other, form)
        offset = spec("B", dtype="int64")
        yield mistaken(
            kind,
            "an offset that is ignored beyond the diagonal",
            call(attn_mask=masks.causal(offset)),
            call(attn_mask=masks.causal(offset) & masks.causal(3)),
            form,
        )
        ids = spec("B", "L", dtype="int64")
        yield mistaken(
            kind,
            "documents with a causal mask",
            call(attn_mask=masks.document(ids)),
            call(attn_mask=masks.document(ids) & masks.causal()),
            form,
        )

    for name, blocked in (
        ("causal", longer(is_causal=True)),
        ("window", call(attn_mask=masks.sliding_window(2, 0))),
        ("causal and padded", padded | {"is_causal": True}),
    ):
        block = f"each block of queries is the first, {name}"
        yield edited(kind, block, blocked, edits.first_block_again, "tiled")


def files() -> Iterator[Fault]:
    """Metadata and numbers of the call that were changed in the file."""
    kind = "the file"
    for form in FORMS:
        yield edited(
            kind,
            "float16 for float32 in the metadata",
            call(),
            edits.metadata("float32[B,2,L,8]", "float16[B,2,L,8]"),
            form,
        )
        yield edited(
            kind, "4 heads for 2 in the metadata", call(), edits.metadata("[B,2,L,8]", "[B,4,L,8]"), form
        )
        yield edited(
            kind,
            "causal in the metadata alone",
            call(),
            edits.metadata('"is_causal": false', '"is_causal": true'),
            form,
        )
        bias = biases.from_array(np.linspace(-1, 1, 32, dtype=np.float32))
        fixed = spec("B", 2, 32, 8)
        call_with_bias = {"query": fixed, "key": fixed, "value": fixed, "bias": bias}
        for index in (0, 17):
            yield edited(
                kind, f"number {index} of a bias", call_with_bias, edits.changed_initializer(index), form
            )
    sinks = np.linspace(-1, 1, 2, dtype=np.float32)
    for form in ("tiled", "primitive"):
        yield edited(kind, "a number of the sinks", call(sinks=sinks), edits.changed_initializer(1), form)


KINDS = (from_a_length_on, other_numbers, rules, large_scores, sentinels, precision, masked, files)


def planted() -> list[Fault]:
    """All of them."""
    return [fault for kind in KINDS for fault in kind()]
