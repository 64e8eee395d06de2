"""Each reason for which a form does not state a call, by a call that nothing else keeps from it.

A call that is refused for two reasons tests neither, so each case has a neighbour that the form takes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import OPTIONS, FormName, Runtime, checked_call, metadata_of
from short_runs import assert_right

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, forms, to_onnx
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

OLD, NEW, CUDA = "onnxruntime>=1.28;cpu", "onnxruntime>=1.31;cpu", "onnxruntime>=1.31;cuda"


def specs(*shapes: tuple[Any, ...], dtype: str = "float32") -> dict[str, Any]:
    return {
        name: TensorSpec(dtype, shape) for name, shape in zip(("query", "key", "value"), shapes, strict=True)
    }


def self_attention(
    *, batch: Any = 2, heads: int = 4, groups: int = 4, length: Any = 6, width: int = 16, dtype: str = "float32"
) -> dict[str, Any]:
    query, shared = (batch, heads, length, width), (batch, groups, length, width)
    return specs(query, shared, shared, dtype=dtype)


FLOAT = TensorSpec("float32", (6, 6))
CAUSAL = {"is_causal": True}
MORE_KEYS = specs((2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16))
ROOM = dict.fromkeys(("past_key", "past_value"), TensorSpec("float32", (2, 4, 6, 16))) | {
    "past_lengths": TensorSpec("int64", (2,))
}
"""A cache with room for as many keys as there are queries."""
ONE_KEY_BATCH = specs((2, 4, 6, 16), (1, 4, 6, 16), (1, 4, 6, 16))
WINDOWS = (
    masks.causal() & masks.sliding_window(3, None),
    masks.sliding_window(3, 0),
    masks.sliding_window(0, 0),
    masks.sliding_window(3, 2, offset=-2),
    masks.sliding_window(3, 0, offset="lower_right"),
    masks.causal() & masks.sliding_window(3, None, offset=1),
    masks.causal() & masks.sliding_window(2**29, None),
    masks.sliding_window(3, None) & masks.sliding_window(2, 0),
    masks.causal() & masks.causal(1) & masks.sliding_window(2, 5),
)
"""These end at the query's own key."""
TRIANGLES = (
    masks.causal("lower_right"),
    masks.sliding_window(None, 0),
    masks.sliding_window(None, 3, offset=-3),
    masks.causal() & masks.causal(2),
)
"""These are causal, where there are as many keys as queries."""

TAKEN: dict[str, list[dict[str, Any]]] = {
    "attention": [
        specs(("B", 4, "L", 16), ("B", 2, "S", 16), ("B", 2, "S", 5)),
        self_attention() | {"bias": FLOAT, "attn_mask": masks.padding([4, 6])},
        self_attention(dtype="float16"),
    ],
    "multi_head": [
        self_attention(),
        self_attention() | CAUSAL,
        *(self_attention() | {"attn_mask": mask} for mask in TRIANGLES),
        MORE_KEYS,
        self_attention(batch="B", length="L") | {"runtime": NEW},
    ],
    "grouped_query": [
        self_attention(groups=2, length="L") | CAUSAL,
        self_attention(groups=2) | CAUSAL | {"softcap": 2.0, "sinks": np.ones(4, np.float32)},
        *(self_attention() | {"attn_mask": mask} for mask in WINDOWS),
        self_attention(dtype="float16") | CAUSAL | {"runtime": CUDA},
    ],
    "tiled": [self_attention() | {"outputs": ("output", "lse")}],
}
"""Calls of each form that it states: what is refused below differs from one of them in one thing."""

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("attention", specs(*[(3, 2, 4, 6, 16)] * 3), "ai.onnx Attention takes at most 4 axes"),
    ("attention", ONE_KEY_BATCH, "ai.onnx Attention does not broadcast the batch of query, key and value"),
    ("attention", self_attention(dtype="float64"), "onnxruntime computes a float64 Attention to float32 accuracy"),
    ("attention", self_attention() | {"softmax_dtype": "float64"}, "onnxruntime computes a float64 Attention to float32 accuracy"),
    ("attention", self_attention(dtype="float64") | {"softcap": 0.1, "runtime": "onnx"}, "ai.onnx Attention has a float32 `softcap`, and this one is no float32"),
    ("attention", self_attention() | {"sinks": np.ones(4, np.float32)}, "ai.onnx Attention has no sinks"),
    *(
        (
            "attention",
            self_attention() | {"outputs": outputs},
            "ai.onnx Attention returns no lse, and its weights and scores differ from the library's",
        )
        for outputs in (("lse",), ("output", "lse"), ("output", "weights"), ("scores",))
    ),
    ("attention", self_attention() | {"bias": biases.from_function(lambda s, b, h, i, j: s * 2) + np.ones(6, np.float32)}, "ai.onnx Attention cannot apply a function to the scores"),
    *(
        (form, arguments | more, words)
        for form, more in (("multi_head", {}), ("grouped_query", CAUSAL))
        for arguments, words in (
            (specs(*[(4, 6, 16)] * 3), "com.microsoft operators take 4 axes with one batch"),
            (ONE_KEY_BATCH, "com.microsoft operators take 4 axes with one batch"),
            (self_attention(dtype="float64"), "com.microsoft operators do not take float64"),
            (self_attention() | {"softmax_dtype": "float64"}, "com.microsoft operators do not take float64"),
            (self_attention() | {"outputs": ("lse",)}, "com.microsoft operators return only the output"),
            (
                self_attention() | {"outputs": ("output", "lse")},
                "com.microsoft operators return only the output",
            ),
            (
                self_attention() | {"bias": FLOAT},
                "com.microsoft operators give NaN for a row that a bias masks",
            ),
            (
                self_attention() | {"scale": np.ones((4, 1, 1), np.float32)},
                "com.microsoft operators take a scale that is a number",
            ),
            (self_attention() | {"scale": 0.0}, "com.microsoft operators read a scale of 0 as no scale"),
        )
    ),
    ("multi_head", self_attention(groups=2), "MultiHeadAttention has no grouped heads"),
    ("multi_head", self_attention() | {"softcap": 2.0}, "MultiHeadAttention has neither a soft cap nor sinks"),
    ("multi_head", self_attention() | {"sinks": np.ones(4, np.float32)}, "MultiHeadAttention has neither a soft cap nor sinks"),
    *(
        (
            "multi_head",
            arguments,
            "MultiHeadAttention gives NaN for empty rows, and misplaces the diagonal where L is not S",
        )
        for arguments in (
            MORE_KEYS | CAUSAL,
            self_attention() | {"attn_mask": masks.padding([4, 6])},
            self_attention() | {"attn_mask": masks.causal() & masks.padding([4, 6])},
            self_attention() | {"attn_mask": masks.causal(1)},
            self_attention() | {"attn_mask": masks.sliding_window(3, 0)},
            self_attention() | {"attn_mask": masks.sliding_window(None, 1)},
            self_attention() | {"attn_mask": masks.causal([0, 0])},
            MORE_KEYS | {"attn_mask": masks.causal("lower_right")},
            self_attention() | CAUSAL | ROOM,
        )
    ),
    *(
        (
            "multi_head",
            self_attention(**open_length) | {"runtime": OLD},
            "before onnxruntime 1.31 it takes no empty batch, so the lengths must be numbers",
        )
        for open_length in ({"batch": "B"}, {"length": "L"})
    ),
    *(
        ("grouped_query", arguments, "GroupQueryAttention is written only for as many keys as queries")
        for arguments in (MORE_KEYS | CAUSAL, MORE_KEYS | {"attn_mask": masks.causal("lower_right")})
    ),
    ("grouped_query", self_attention() | {"past_key": TensorSpec("float32", (2, 4, 3, 16))} | {"past_value": TensorSpec("float32", (2, 4, 3, 16)), "is_causal": True}, "the exporter writes GroupQueryAttention without its cache inputs"),
    *(
        ("grouped_query", arguments, "GroupQueryAttention is causal")
        for arguments in (
            self_attention(groups=2),
            self_attention(groups=2, length="L"),
            self_attention() | {"attn_mask": masks.sliding_window(3, 1)},
            self_attention() | {"attn_mask": masks.sliding_window(3, None)},
            self_attention() | {"attn_mask": masks.sliding_window(3, 0, offset=1)},
            self_attention() | {"attn_mask": masks.causal(1)},
            self_attention() | {"attn_mask": masks.causal([0, 0])},
            self_attention() | {"attn_mask": masks.padding([4, 6])},
        )
    ),
    *(
        (
            "grouped_query",
            self_attention() | {"attn_mask": masks.causal() & mask},
            "GroupQueryAttention supports only the causal mask and one causal window",
        )
        for mask in (
            masks.padding([4, 6]),
            masks.prefix(3),
            masks.sliding_window(3, None, offset=[1, 0]),
            masks.sliding_window(3, None, offset=4),
            masks.sliding_window(2, None) & masks.padding([4, 6]),
            masks.causal([1, 2]),
        )
    ),
    ("grouped_query", self_attention() | CAUSAL | {"attn_mask": masks.sliding_window(3, None), "runtime": "onnxruntime>=1.23;cpu"}, "a window of GroupQueryAttention has one key less from onnxruntime 1.24 on than before, so that a graph is right from 1.24 on at the earliest, and `runtime` is onnxruntime>=1.23;cpu"),
    *(
        ("grouped_query", arguments | CAUSAL, "GroupQueryAttention takes one width, a multiple of 8")
        for arguments in (
            specs((2, 4, 6, 16), (2, 4, 6, 16), (2, 4, 6, 8)),
            specs(*[(2, 4, 6, 12)] * 3),
        )
    ),
    ("grouped_query", self_attention() | CAUSAL | {"runtime": CUDA}, "GroupQueryAttention has no float32 kernel on CUDA, so onnxruntime would run it on the CPU"),
    ("grouped_query", self_attention() | CAUSAL | {"sinks": np.ones((2, 4), np.float32)}, "GroupQueryAttention takes sinks of shape (Hq,)"),
    ("grouped_query", self_attention(batch="B") | CAUSAL, "GroupQueryAttention takes no empty batch, so the batch must be a number"),
    *(
        (
            "tiled",
            self_attention() | {"outputs": outputs},
            "weights and scores are L x S arrays, which its blocks avoid",
        )
        for outputs in (("weights",), ("output", "scores"))
    ),
]  # fmt: skip


def test_the_batch_that_was_given_is_shown() -> None:
    """Also for a layer, whose attention has values instead of specs."""
    qkv = TensorSpec("float32", ("B", 4, "L", 16))
    words = r"so the batch must be a number; got form=grouped_query, query\.shape=\('B', 4, 'L', 16\)\. "
    with pytest.raises(ValueError, match=words):
        export_attention(qkv, qkv, qkv, is_causal=True, form="grouped_query")
    with pytest.raises(ValueError, match=words):
        to_onnx(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True), qkv, form="grouped_query")


@pytest.mark.parametrize(
    ("form", "arguments"), [(form, arguments) for form, calls in TAKEN.items() for arguments in calls]
)
def test_taken(form: str, arguments: dict[str, Any]) -> None:
    model = export_attention(**arguments, form=form)
    assert metadata_of(model)["sdpa_xp.form"] == form


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_what_no_release_changes_is_said_first(form: FormName) -> None:
    """On every release the words of the newest one, if it refuses the call."""
    options = [arguments for calls in TAKEN.values() for arguments in calls]
    options += [arguments for _, arguments, _ in REFUSED]
    refusals = 0
    for one, other in product(options, options):
        arguments = {name: value for name, value in (one | other).items() if name in OPTIONS}
        try:
            call = checked_call("test", **arguments)
        except (TypeError, ValueError):
            continue  # no call
        newest, *older = (
            unsupported_reason(form, call, Runtime((1, minor), "cpu")) for minor in (31, 28, 24, 23)
        )
        if newest is not None:
            assert {newest} == {*older}
            refusals += 1
    assert refusals > 100 or form == "primitive"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "ai.onnx Attention has no sinks"),
        ({"opset": 24}, "ai.onnx Attention has no sinks"),
        ({"opset": 22}, "`opset` must be 23 to 24 for form 'attention'"),
        ({"sinks": None}, "onnxruntime computes it right from 1.28 on"),
        ({"sinks": None, "form": "primitive", "opset": 24}, "`opset` 24 needs onnxruntime 1.24 or later"),
    ],
)
def test_whoever_raises_the_release_meets_no_other_reason(change: dict[str, Any], words: str) -> None:
    said: dict[str, Any] = {"form": "attention", "sinks": np.ones(4, np.float32)} | change
    specs = self_attention().values()
    with pytest.raises(ValueError, match=words):
        export_attention(*specs, **said, runtime="onnxruntime>=1.23;cpu")
    sinks = said.pop("sinks")
    with pytest.raises(ValueError, match=words):
        to_onnx(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, sinks=sinks),
            *specs,
            **said,
            runtime="onnxruntime>=1.23;cpu",
        )


@pytest.mark.parametrize("opset", [None, 23, 24])
@pytest.mark.parametrize(("form", "arguments", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_and_the_hint_is_what_auto_takes(
    form: str, arguments: dict[str, Any], words: str, opset: int | None
) -> None:
    if opset == 24 and arguments.get("runtime") == "onnxruntime>=1.23;cpu":
        return
    got = f"got form={form}, query.shape={arguments['query'].shape}."
    with pytest.raises(
        ValueError, match=f"`form` cannot be '{form}': {re.escape(f'{words}; {got}')}"
    ) as caught:
        export_attention(**arguments, form=form, opset=opset)
    model = export_attention(**arguments, opset=opset)
    form_of_auto = metadata_of(model)["sdpa_xp.form"]
    assert str(caught.value).endswith(f" `form='auto'` chooses {form_of_auto!r}.")


def test_the_hint_names_the_release_that_loads_the_opset() -> None:
    words = "`form='auto'` chooses 'primitive' from onnxruntime 1.24 on"
    said: dict[str, Any] = {"sinks": np.ones(4, np.float32), "opset": 24, "runtime": "onnxruntime>=1.23;cpu"}
    with pytest.raises(ValueError, match=words):
        export_attention(**self_attention(), **said, form="attention")


@pytest.mark.parametrize("mask", [*WINDOWS, *TRIANGLES], ids=str)
@pytest.mark.parametrize("length", [6, 40, "L"])
def test_windows_that_end_at_the_own_key_are_right(mask: Any, length: int | str) -> None:
    x = self_attention(length=length)
    assert_right(export_attention(**x, attn_mask=mask, form="grouped_query"))
    if mask in TRIANGLES:
        assert_right(export_attention(**x, attn_mask=mask, form="multi_head", runtime=NEW))


def reasons() -> Iterator[str]:
    """The texts that `unsupported_reason` of each form returns, with {} for what is filled in.

    The releases of a form, about which choice.py speaks, are tested in test_releases.py.
    """
    for path in Path(str(forms.__file__)).parent.glob("*.py"):
        if path.stem == "choice":
            continue
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and function.name == "_unsupported_reason":
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant | ast.JoinedStr):
                        text = ast.unparse(node.value)
                        if text != "None":
                            yield str(eval(re.sub(r"^f(.)", r"\1", text)))


def test_each_reason_has_a_case() -> None:
    tested = {words for _, _, words in REFUSED}
    for reason in reasons():
        pattern = re.sub(r"\\\{.*?\\\}", ".*", re.escape(reason))
        assert any(re.fullmatch(pattern, words) for words in tested), f"no call is refused since {reason!r}"
