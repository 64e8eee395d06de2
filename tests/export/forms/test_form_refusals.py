"""Each reason for which a form does not state a call, by a call that nothing else keeps from it.

A call that is refused for two reasons tests neither, so each case has a neighbour that the form takes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import OPTIONS, ExportCall, FormName, Runtime, checked_call, metadata_of
from refusals.transcript import HERE, answers
from short_runs import assert_right

import sdpa_xp_export
from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention, forms
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

NEW, CUDA = "onnxruntime>=1.31;cpu", "onnxruntime>=1.31;cuda"
TRANSCRIPT = HERE / "forms.txt"


def specs(*shapes: tuple[Any, ...], dtype: str = "float32") -> dict[str, Any]:
    return {n: TensorSpec(dtype, shape) for n, shape in zip(("query", "key", "value"), shapes, strict=True)}


def self_attention(
    *, batch: Any = 2, heads: int = 4, groups: int = 4, length: Any = 6, width: int = 16, dtype: str = "float32"
) -> dict[str, Any]:
    query, shared = (batch, heads, length, width), (batch, groups, length, width)
    return specs(query, shared, shared, dtype=dtype)


FLOAT = TensorSpec("float32", (6, 6))
CAUSAL = {"is_causal": True}
MORE_KEYS = specs((2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16))
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


@cache
def refused_calls() -> list[dict[str, Any]]:
    """The calls of the transcript, with their forms."""
    calls: list[dict[str, Any]] = []

    def export(*tensors: Any, **options: Any) -> None:
        calls.append(dict(zip(OPTIONS, tensors, strict=False)) | options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_xp_export, "export_attention", export)
        assert [*answers(TRANSCRIPT)]
    return [call for call in calls if "opset" not in call]


@pytest.mark.parametrize(
    ("form", "arguments"), [(form, arguments) for form, calls in TAKEN.items() for arguments in calls]
)
def test_taken(form: str, arguments: dict[str, Any]) -> None:
    model = export_attention(**arguments, form=form)
    assert metadata_of(model)["sdpa_xp.form"] == form


@cache
def joined_calls() -> list[ExportCall]:
    """The calls of each two of these together, where they are a call."""
    options = [arguments for calls in TAKEN.values() for arguments in calls] + refused_calls()
    calls = []
    for one, other in product(options, options):
        with suppress(TypeError, ValueError):
            arguments = {name: value for name, value in (one | other).items() if name in OPTIONS}
            calls.append(checked_call("test", **arguments))
    return calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_what_no_release_changes_is_said_first(form: FormName) -> None:
    """On every release the words of the newest one, if it refuses the call."""
    runtimes = [Runtime((1, minor), "cpu") for minor in (31, 28, 24, 23)]
    refusals = 0
    for call in joined_calls():
        newest, *older = (unsupported_reason(form, call, runtime) for runtime in runtimes)
        if newest is not None:
            assert {newest} == {*older}
            refusals += 1
    assert refusals > 100 or form == "primitive"


@pytest.mark.parametrize("opset", [None, 23, 24])
@pytest.mark.parametrize("number", range(len(refused_calls())))
def test_the_hint_is_what_auto_takes(number: int, opset: int | None) -> None:
    call = refused_calls()[number]
    if opset == 24 and ">=1.23" in call.get("runtime", ""):
        return
    with pytest.raises(ValueError, match="`form` cannot be") as caught:
        export_attention(**call, opset=opset)
    model = export_attention(**call | {"form": "auto"}, opset=opset)
    assert str(caught.value).endswith(f" `form='auto'` chooses {metadata_of(model)['sdpa_xp.form']!r}.")


@pytest.mark.parametrize("opset", [24, 25, 27])
@pytest.mark.parametrize("provider", ["cpu", "cuda", "webgpu"])
def test_the_hint_holds_in_the_release_that_it_names(provider: str, opset: int) -> None:
    """No hint names a release for an opset that was not tried with the provider in any."""
    call, hints = self_attention(length="L", groups=2), 0
    for form, options in product(FORMS, [{}, {"is_causal": True}, {"attn_mask": masks.sliding_window(3, 0)}]):
        options = {**call, **options, "opset": opset}
        try:
            export_attention(**options, form=form, runtime=f"onnxruntime>=1.23;{provider}")
        except ValueError as error:
            hint = re.search(r"`form='auto'` chooses '(\w+)' from onnxruntime ([\d.]+) on\.$", str(error))
            if hint is not None:
                model = export_attention(**options, runtime=f"onnxruntime>={hint[2]};{provider}")
                assert metadata_of(model)["sdpa_xp.form"] == hint[1]
                hints += 1
    assert hints > 0 or (provider == "cuda" and opset > 24)


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
    recorded = TRANSCRIPT.read_text()
    for reason in reasons():
        pattern = re.sub(r"\\\{.*?\\\}", ".*", re.escape(reason))
        assert re.search(f": {pattern}; got", recorded), f"no call is refused since {reason!r}"
