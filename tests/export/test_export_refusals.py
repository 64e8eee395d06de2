"""What the exporter takes, and that it refuses each argument by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from internals import LONGEST_CALL, Runtime, from_json

from sdpa_xp import scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify


def f32(*shape: int | str) -> TensorSpec:
    return TensorSpec("float32", shape)


def test_a_runtime_with_the_name_that_onnxruntime_has() -> None:
    runtime = "onnxruntime>=1.28;CPUExecutionProvider"
    assert Runtime.parse("test", runtime) == Runtime.parse("test", "onnxruntime>=1.28;cpu")


def test_a_patch_release_is_kept() -> None:
    """A note compares all of it; that no graph was tried does not, since patches are taken to compute the same."""
    runtime = Runtime.parse("test", "openvino>=2026.4.2;cpu")
    assert str(runtime) == "openvino>=2026.4.2;cpu"
    assert runtime.untried_note == ""
    runtime = Runtime.parse("test", "onnxruntime>=1.28.1;cpu")
    assert [bool(runtime.older_note(release)) for release in ("1.27.5", "1.28.0", "1.28.1", "1.29.0")] == [
        True,
        True,
        False,
        False,
    ]
    assert [runtime.is_before(release) for release in ((1, 28), (1, 29))] == [False, True]
    assert Runtime.parse("test", "onnxruntime>=1.28.0;cpu") == Runtime.parse("test", "onnxruntime>=1.28;cpu")


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), np.ones(1, np.float32).dtype])
def test_a_spec_takes_the_dtype_of_an_array(dtype: Any) -> None:
    spec = TensorSpec(dtype, np.ones((2, 3)).shape)
    assert (spec, str(spec), repr(spec)) == (
        TensorSpec("float32", (2, 3)),
        "float32[2,3]",
        "TensorSpec(dtype='float32', shape=(2, 3))",
    )
    assert hash(spec) == hash(TensorSpec("float32", (2, 3)))


@pytest.mark.needs("torch")
def test_a_spec_takes_a_dtype_of_torch() -> None:
    import torch

    assert TensorSpec(torch.bfloat16, torch.ones(2, 3).shape) == TensorSpec("bfloat16", (2, 3))


def test_spec_text_both_ways() -> None:
    spec = TensorSpec("float16", ("B", 8, "L", 64))
    assert TensorSpec.parse(str(spec)) == spec
    assert TensorSpec.parse("bool[]") == TensorSpec("bool", ())
    assert TensorSpec.parse(" float16 [ B , 8,P + L ,64 ] ").shape == ("B", 8, "P+L", 64)


def test_lengths_may_be_integers_of_other_libraries() -> None:
    shape = TensorSpec("float32", (np.int64(3), np.uint8(4), "L")).shape
    assert shape == (3, 4, "L")
    assert [type(length) for length in shape] == [int, int, str]


X = TensorSpec("float32", (2, 4, 6, 16))


def export(query: TensorSpec = X, **options: Any) -> onnx.ModelProto:
    return export_attention(query, query, query, **options)


@pytest.mark.parametrize("text", [" " * (LONGEST_CALL + 1), "[]", '{"query": "float32[2,3]"}'])
def test_what_is_no_call_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="call"):
        from_json(text, {})


def test_the_longest_call_is_read() -> None:
    text = '{"query": "float32[2,3]", "key": "float32[2,3]", "value": "float32[2,3]"}'
    assert from_json(text.ljust(LONGEST_CALL), {}).query == f32(2, 3)


class Odd:
    """An object that is nothing that a function takes."""

    def __repr__(self) -> str:
        return "Odd()"


ARGUMENTS = [
    (function, name, valid)
    for function, valid in (
        (export_attention, {"query": X, "key": X, "value": X}),
        (to_onnx, {"layer": lambda x: scaled_dot_product_attention(x, x, x)}),
        (verify, {"model": None}),
        (TensorSpec, {"dtype": "float32", "shape": (2,)}),
    )
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
]
"""Each public function and each argument of it, beside arguments that are right."""


@pytest.mark.parametrize(
    ("function", "name", "valid"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_an_odd_object_is_refused(function: Callable[..., Any], name: str, valid: dict[str, Any]) -> None:
    arguments = valid | ({"model": export(form="primitive")} if "model" in valid else {}) | {name: Odd()}
    inputs = [arguments.pop("layer"), X] if function is to_onnx else []
    with pytest.raises((TypeError, ValueError), match=rf"^[\w.]+: .*`{name}\b.*Odd"):
        function(*inputs, **arguments)
