"""What the exporter refuses, each by a message that names the argument."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from internals import Runtime

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention

Q = TensorSpec("float32", ("B", 8, "L", 64))
K = TensorSpec("float32", ("B", 2, "S", 64))


def f32(*shape: int | str) -> TensorSpec:
    return TensorSpec("float32", shape)


def test_a_runtime_with_the_name_that_onnxruntime_has() -> None:
    runtime = "onnxruntime>=1.28;CPUExecutionProvider"
    assert Runtime.parse("test", runtime) == Runtime.parse("test", "onnxruntime>=1.28;cpu")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": np.ones((2, 8, 3, 64))}, TypeError, "`query` must be a TensorSpec; got query=ndarray"),
        ({"query": TensorSpec("bool", ("B", 8, "L", 64))}, TypeError, "`query` must have a floating dtype"),
        ({"key": TensorSpec("float16", ("B", 2, "S", 64))}, TypeError, "`query` and `key` must have one dtype"),
        (
            {"attn_mask": np.ones((3, 5), int)},
            TypeError,
            r"got attn_mask.dtype=int64\. Pass `attn_mask != 0` if",
        ),
        (
            {"attn_mask": TensorSpec("uint8", ("L", "S"))},
            TypeError,
            r"dtype=uint8\. Pass `attn_mask != 0` if 1",
        ),
        ({"bias": np.ones((3, 5), int)}, TypeError, r"`bias` must be floating; got bias.dtype=int64\. Convert"),
        ({"bias": TensorSpec("bool", ("L", "S"))}, TypeError, "`bias` must have a floating dtype"),
        (
            {"attn_mask": TensorSpec("float64", ("L", "S"))},
            TypeError,
            "`query` and `attn_mask` must have one dtype",
        ),
        ({"query": f32(64)}, ValueError, "`query` must have at least 2 axes"),
        ({"query": "float32[B,8,L,64]"}, TypeError, r"Write TensorSpec\.parse\('float32\[B,8,L,64\]'\)"),
        (
            {"query": f32("B", "H", "L", 64)},
            ValueError,
            r"the heads of `query` \(axis -3\) must be an int.*64\)\.$",
        ),
        ({"query": f32("B", "L", 8, 64)}, ValueError, r"If heads are axis -2, pass layout='\.\.\.LHE'"),
        ({"layout": "...LHE"}, ValueError, r"If heads are axis -3, pass layout='\.\.\.HLE'"),
        ({"query": f32("B", 8, "L", "E")}, ValueError, r"the width of `query` \(axis -1\) must be an int"),
        ({"query": f32("B", 8, "L", 32)}, ValueError, r"must agree on axis -1 \(E\)"),
        (
            {"value": f32("B", 2, "T", 64)},
            ValueError,
            r"`key` and `value` must agree on axis -2 \(S\).*'S'.*'T'",
        ),
        ({"query": f32("B", 3, "L", 64)}, ValueError, "must be a multiple"),
        ({"query": f32("C", 8, "L", 64)}, ValueError, "leading axes of .* must broadcast"),
        ({"attn_mask": TensorSpec("bool", ("B", "S"))}, ValueError, "must broadcast.*None, None"),
        ({"attn_mask": TensorSpec("bool", ("L", "L"))}, ValueError, "`attn_mask` must broadcast"),
        (
            {"query": f32("H", "L", 64), "key": f32(2, "S", 64), "value": f32(2, "S", 64)},
            ValueError,
            "the heads of `query`",
        ),
        ({"opset": 25}, ValueError, "`opset` must be 17 to 24; no form supports 25"),
        ({"dropout_p": 0.5}, ValueError, "`dropout_p` must be 0, since a graph draws no random numbers"),
        ({"scale": 1e39}, ValueError, "`scale` must be finite in float32"),
        ({"softcap": 1e-50}, ValueError, "`softcap` must be 0 or at least"),
        ({"scale": float("nan")}, ValueError, "`scale` must be finite"),
        ({"sinks": [1.0] * 8}, TypeError, "`sinks` must be a TensorSpec or an array"),
        (
            {"outputs": 5},
            ValueError,
            "`outputs` must be some of output, lse, weights, scores, each at most once",
        ),
        ({"outputs": ["output", ["lse"]]}, ValueError, "`outputs` must be some of"),
        ({"opset": 18.0}, TypeError, "`opset` must be an integer"),
        (
            {"opset": 24, "runtime": "onnxruntime>=1.23;cpu"},
            ValueError,
            "`opset` 24 needs onnxruntime 1.24 or later",
        ),
        ({"scale": "1"}, TypeError, "`scale` must be a real number"),
        ({"scale": f32("S", 1)}, ValueError, "`scale` must broadcast"),
        ({"softcap": -2}, ValueError, "`softcap` must be positive"),
        ({"is_causal": 1}, TypeError, "`is_causal` must be True or False"),
        (
            {"form": "contrib"},
            ValueError,
            "`form` must be auto, attention, multi_head, grouped_query, tiled, primitive",
        ),
        ({"form": "attention", "opset": 22}, ValueError, "`opset` must be 23 to 24 for form 'attention'"),
        ({"form": "primitive", "opset": 16}, ValueError, "`opset` must be 17 to 24"),
        ({"form": "primitive", "opset": "18"}, TypeError, "`opset` must be an integer"),
        ({"runtime": "tensorrt"}, ValueError, "`runtime` must be 'onnxruntime>=RELEASE;PROVIDER'"),
        ({"runtime": "onnxruntime>=1.28;tpu"}, ValueError, "the provider cpu, web, cuda"),
        ({"runtime": "onnxruntime>=1.16;cpu"}, ValueError, "a release that was tried, onnxruntime>=1.23"),
        (
            {"runtime": "onnxruntime>=1.26;cpu", "form": "attention"},
            ValueError,
            "`form` cannot be 'attention': onnxruntime computes it right from 1.28 on.*form='auto' chooses 'tiled'",
        ),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"query": Q, "key": K, "value": K} | change
    with pytest.raises(error, match=f"^export_attention: .*{words}"):
        export_attention(**arguments)


def test_lengths_of_a_cache_that_is_not_given() -> None:
    text = "export_attention: `past_lengths` needs `past_key` and `past_value`; got past_lengths=int32[B]."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        export_attention(Q, K, K, past_lengths=TensorSpec("int32", ("B",)))
    with pytest.raises(ValueError, match="`past_key` and `past_value` must be given together"):
        export_attention(Q, K, K, past_key=f32("B", 2, "P", 64), past_lengths=TensorSpec("int32", ("B",)))


ARRAY = "An array has fixed lengths: pass a mask such as masks.causal(), or TensorSpec('bool', {})."


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"attn_mask": np.ones((5, 5), bool)}, ARRAY.format("('L', 'S')")),
        ({"attn_mask": masks.from_array(np.ones((5, 5), bool)) & masks.causal()}, ARRAY.format("('L', 'S')")),
        ({"attn_mask": np.ones((3, 1, 1, 5), bool)}, ARRAY.format("('B', 1, 1, 'S')")),
        (
            {"bias": np.ones((5, 5), np.float32)},
            "An array has fixed lengths: pass a bias such as biases.alibi(heads), "
            "or TensorSpec('float32', ('L', 'S')).",
        ),
        ({"attn_mask": np.ones((1, 3, 1, 1, 5), bool)}, ""),  # more axes than the scores
        ({"attn_mask": TensorSpec("bool", ("A", "S"))}, ""),
    ],
)
def test_an_array_for_named_lengths(arguments: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError, match=r"`(attn_mask|bias)` must broadcast to ") as error:
        export_attention(Q, K, K, **arguments)
    assert str(error.value).endswith(f"'L', 'S'). {hint}".rstrip())


def test_an_array_for_fixed_lengths_gets_no_hint_of_names() -> None:
    q = f32(2, 8, 4, 64)
    with pytest.raises(ValueError, match=r"`attn_mask` must broadcast.*=\(2, 8, 4, 4\)\.$"):
        export_attention(q, q, q, np.ones((5, 5), bool))


@pytest.mark.parametrize(
    ("dtype", "shape", "error", "words"),
    [
        (
            "int4",
            (1, 2),
            ValueError,
            "`dtype` must be one of float16, .*, bool; got dtype='int4'",
        ),
        ("complex64", (1, 2), ValueError, "`dtype` must be one of"),
        ("float32", ("P+", 2), ValueError, "must be an identifier, or a sum of them"),
        ("float32", (1.5, 2), TypeError, "`shape` must hold integers and names"),
        (
            "float32",
            (None, 2),
            TypeError,
            "must hold integers and names.*Write a name, such as 'L', for an open length",
        ),
        ("float32", (-1, 2), ValueError, "at least 0.*Write a name, such as 'L', for an open length"),
        ("float32", (True, 2), TypeError, "`shape` must hold integers and names"),
        ("float32", "ab", TypeError, "`shape` must be a tuple"),
        ("float32", 5, TypeError, "`shape` must be a tuple"),
        ("float32", ("a b", 2), ValueError, "must be an identifier"),
        ("float32", (2**63, 2), ValueError, r"at most 2\*\*63 - 1.*Write a name"),
        ("float32", (f"L+{2**63}", 2), ValueError, "must be an identifier, or a sum"),
        ("float32", ("B 8", 2), ValueError, "must be an identifier, or a sum.*A comma separates lengths"),
        (np.complex64, (1, 2), ValueError, "`dtype` must be one of"),
        (None, (1, 2), ValueError, "`dtype` must be one of"),
        (float, (1, 2), ValueError, "`dtype` must be one of"),
    ],
)
def test_spec_refused(dtype: Any, shape: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^TensorSpec: .*{words}"):
        TensorSpec(dtype, shape)


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
    for text in ("float32", "float32[2", "float32(2,3)", "[2]", "float32[2,,3]"):
        with pytest.raises(ValueError, match="must be a dtype, and its lengths in brackets"):
            TensorSpec.parse(text)
    assert TensorSpec.parse(" float16 [ B , 8,P + L ,64 ] ").shape == ("B", 8, "P+L", 64)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("float32[B,1 2,L,6 4]", r"\('B', '1 2', 'L', '6 4'\)"), ("float32[B 8,L,64]", r"\('B 8', 'L', 64\)")],
)
def test_a_space_within_a_length_is_a_comma_that_is_missing(text: str, shape: str) -> None:
    with pytest.raises(ValueError, match=f"must be an identifier.*got shape={shape}. A comma separates"):
        TensorSpec.parse(text)


def test_lengths_may_be_integers_of_other_libraries() -> None:
    shape = TensorSpec("float32", (np.int64(3), np.uint8(4), "L")).shape
    assert shape == (3, 4, "L")
    assert [type(length) for length in shape] == [int, int, str]


def test_a_call_of_attention_has_no_empty_axis() -> None:
    with pytest.raises(ValueError, match=r"export_attention: the lengths of `query` must be at least 1.*'L'"):
        export_attention(f32(2, 8, 0, 64), K, K)
