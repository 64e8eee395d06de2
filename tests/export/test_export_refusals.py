"""What the exporter refuses: each message in the words of its rule, and each argument by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np
import onnx
import pytest
from internals import LONGEST_CALL, Runtime, backends, demo, from_json

from sdpa_xp import biases, masks, scaled_dot_product_attention, scaled_dot_product_attention_vjp
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify

Q = TensorSpec("float32", ("B", 8, "L", 64))
K = TensorSpec("float32", ("B", 2, "S", 64))


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


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"query": np.ones((2, 8, 3, 64))},
            TypeError,
            r"`query` must be a TensorSpec; got query=ndarray\. "
            r"Describe the array: TensorSpec\('float64', \(2, 8, 3, 64\)\)\. Write a name, such as 'L', for an open",
        ),
        ({"value": np.ones(3, complex)}, TypeError, "`value` must be a TensorSpec; got value=ndarray\\.$"),
        ({"key": ("B", 8, "S", 64)}, TypeError, r"got key=tuple\. Write TensorSpec\('float32', \('B', 8, 'S', 64\)\)"),
        ({"past_key": [[1.0]]}, TypeError, "`past_key` must be a TensorSpec; got past_key=list\\.$"),
        ({"past_value": [np.ones(3, bool)]}, TypeError, r"the array: TensorSpec\('bool', \(3,\)\)"),
        ({"query": TensorSpec("bool", ("B", 8, "L", 64))}, TypeError, "`query` must have a floating dtype"),
        ({"key": TensorSpec("float16", ("B", 2, "S", 64))}, TypeError, "`query` and `key` must have one dtype"),
        ({"attn_mask": np.ones((3, 5), int)}, TypeError, r"got attn_mask.dtype=int64\. Pass `attn_mask != 0` if"),
        ({"attn_mask": TensorSpec("uint8", ("L", "S"))}, TypeError, r"dtype=uint8\. Pass `attn_mask != 0` if 1"),
        ({"bias": np.ones((3, 5), int)}, TypeError, r"`bias` must be floating; got bias.dtype=int64\. Convert"),
        ({"bias": TensorSpec("bool", ("L", "S"))}, TypeError, "`bias` must have a floating dtype"),
        ({"attn_mask": TensorSpec("float64", ("L", "S"))}, TypeError, "`query` and `attn_mask` must have one dtype"),
        ({"query": f32(64)}, ValueError, "`query` must have at least 2 axes"),
        ({"query": "float32[B,8,L,64]"}, TypeError, r"Write TensorSpec\.parse\('float32\[B,8,L,64\]'\)"),
        ({"query": f32("B", "H", "L", 64)}, ValueError, r"the heads of `query` \(axis -3\) must be an int.*64\)\.$"),
        ({"query": f32("B", "L", 8, 64)}, ValueError, r"If heads are axis -2, pass `layout='\.\.\.LHE'`"),
        ({"layout": "...LHE"}, ValueError, r"If heads are axis -3, pass `layout='\.\.\.HLE'`"),
        ({"query": f32("B", 8, "L", "E")}, ValueError, r"the width of `query` \(axis -1\) must be an int"),
        ({"query": f32("B", 8, "L", 32)}, ValueError, r"must agree on axis -1 \(E\)"),
        ({"value": f32("B", 2, "T", 64)}, ValueError, r"`key` and `value` must agree on axis -2 \(S\).*'S'.*'T'"),
        ({"query": f32("B", 3, "L", 64)}, ValueError, "must be a multiple"),
        ({"query": f32("C", 8, "L", 64)}, ValueError, "leading axes of .* must broadcast"),
        ({"attn_mask": TensorSpec("bool", ("B", "S"))}, ValueError, "must broadcast.*None, None"),
        ({"attn_mask": TensorSpec("bool", ("L", "L"))}, ValueError, "`attn_mask` must broadcast"),
        ({"query": f32("H", "L", 64), "key": f32(2, "S", 64), "value": f32(2, "S", 64)}, ValueError, "the heads of `query`"),
        ({"opset": 26}, ValueError, "`opset` must be 17 to 25; no form supports 26"),
        ({"dropout_p": 0.5}, ValueError, "`dropout_p` must be 0, since a graph draws no random numbers"),
        ({"scale": 1e39}, ValueError, "`scale` must be finite in float32"),
        ({"softcap": 1e-50}, ValueError, "`softcap` must be 0 or at least"),
        ({"scale": float("nan")}, ValueError, "`scale` must be finite"),
        ({"sinks": [1.0] * 8}, TypeError, "`sinks` must be a TensorSpec or an array"),
        ({"outputs": 5}, ValueError, "`outputs` must be some of output, lse, weights, scores, row_max, entropy, key_sums, each at most once"),
        ({"outputs": ["output", ["lse"]]}, ValueError, "`outputs` must be some of"),
        ({"opset": 18.0}, TypeError, "`opset` must be an integer"),
        ({"opset": 24, "runtime": "onnxruntime>=1.23;cpu"}, ValueError, "`opset` 24 needs onnxruntime 1.24 or later"),
        ({"scale": "1"}, TypeError, "`scale` must be a real number"),
        ({"scale": f32("S", 1)}, ValueError, "`scale` must broadcast"),
        ({"softcap": -2}, ValueError, "`softcap` must be positive"),
        ({"is_causal": 1}, TypeError, "`is_causal` must be True or False"),
        ({"form": "contrib"}, ValueError, "`form` must be auto, attention, multi_head, grouped_query, tiled, primitive"),
        ({"form": "attention", "opset": 22}, ValueError, "`opset` must be 23 to 25 for form 'attention'"),
        ({"form": "primitive", "opset": 16}, ValueError, "`opset` must be 17 to 25"),
        ({"form": "primitive", "opset": "18"}, TypeError, "`opset` must be an integer"),
        ({"runtime": "tensorrt"}, ValueError, "`runtime` must be 'onnxruntime>=RELEASE;PROVIDER', the provider cpu, cuda, wasm, webgpu, web; 'openvino>=RELEASE;cpu'; or 'onnx'; got runtime='tensorrt'"),
        ({"runtime": np.ones(2)}, ValueError, r"'openvino>=RELEASE;cpu'; or 'onnx'; got runtime=array\(\[1\., 1\.\]\)"),
        ({"form": np.ones(2)}, ValueError, r"`form` must be auto, .*; got form=array\(\[1\., 1\.\]\)"),
        ({"softmax_dtype": np.ones(2)}, ValueError, r"no narrower than the scores; got softmax_dtype=array\(\[1\., 1\.\]\)"),
        ({"runtime": "openvino>=2026.4;gpu"}, ValueError, "'openvino>=RELEASE;cpu'; or 'onnx'; got runtime='openvino>=2026.4;gpu'"),
        ({"runtime": "openvino>=2025.1;cpu"}, ValueError, "a release that was tried, openvino>=2026.4 or later"),
        ({"runtime": "opnvino>=2026.4;cpu"}, ValueError, r"got runtime='opnvino>=2026\.4;cpu'\. The nearest is 'openvino'\.$"),
        ({"runtime": "Onnx"}, ValueError, r"The nearest is 'onnx'\.$"),
        ({"runtime": "onnxruntime>=1.30;wsm"}, ValueError, r"The nearest is 'wasm'\.$"),
        ({"runtime": "openvino>=2026.4;CPU"}, ValueError, r"The nearest is 'cpu'\.$"),
        ({"runtime": "onnxruntime>=1.28;gpu"}, ValueError, r"As in 'onnxruntime>=1\.28;cpu'\. Other providers"),
        ({"runtime": "onnxruntime==1.28;cpu"}, ValueError, r"As in 'onnxruntime>=1\.28;cpu'"),
        ({"runtime": "onnx>=1.23"}, ValueError, "'openvino>=RELEASE;cpu'; or 'onnx'; got"),
        ({"runtime": "onnx", "form": "multi_head"}, ValueError, "MultiHeadAttention is no operator of the standard, and `runtime` is onnx"),
        ({"runtime": "onnx", "form": "grouped_query"}, ValueError, "GroupQueryAttention is no operator of the standard, .*chooses 'tiled'"),
        ({"runtime": "openvino>=2026.4;cpu", "form": "grouped_query"}, ValueError, "OpenVINO cannot read GroupQueryAttention without its cache"),
        ({"runtime": "openvino>=2026.4;cpu", "softmax_dtype": "float64"}, TypeError, "`softmax_dtype` must not be float64 for openvino, since OpenVINO computes it in float32 on the CPU; got softmax_dtype=float64"),
        ({"runtime": "onnxruntime>=1.28;tpu"}, ValueError, "the provider cpu, cuda, wasm, webgpu, web"),
        ({"runtime": "onnxruntime>=1.16;cpu"}, ValueError, "a release that was tried, onnxruntime>=1.23"),
        ({"runtime": "onnxruntime>=1.26;cpu", "form": "attention"}, ValueError, "`form` cannot be 'attention': onnxruntime computes it right from 1.28 on.*`form='auto'` chooses 'tiled'"),
    ],
)  # fmt: skip
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
        ({"bias": np.ones((5, 5), np.float32)}, "An array has fixed lengths: pass a bias such as biases.alibi(heads), or TensorSpec('float32', ('L', 'S'))."),
        ({"attn_mask": np.ones((1, 3, 1, 1, 5), bool)}, ""),
        ({"attn_mask": TensorSpec("bool", ("A", "S"))}, ""),
    ],
)  # fmt: skip
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
        ("int4", (1, 2), ValueError, "`dtype` must be one of float16, .*, bool; got dtype='int4'"),
        ("complex64", (1, 2), ValueError, "`dtype` must be one of"),
        ("float32", ("P+", 2), ValueError, "must be an identifier, or a sum of them"),
        ("float32", (1.5, 2), TypeError, "`shape` must hold integers and names"),
        ("float32", (None, 2), TypeError, "must hold integers and names.*Write a name, such as 'L', for an open length"),
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
)  # fmt: skip
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


X = TensorSpec("float32", (2, 4, 6, 16))
OPEN = TensorSpec("float32", ("B", 4, "L", 16))
CACHE = {"past_key": X, "past_value": X}


def ints(*shape: int | str) -> TensorSpec:
    return TensorSpec("int64", shape)


def export(query: TensorSpec = X, **options: Any) -> onnx.ModelProto:
    return export_attention(query, query, query, **options)


def to_five_rows(x: Any) -> Any:
    return array_api_compat.array_namespace(x).broadcast_to(x, (2, 4, 5, 16))


REFUSED_CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "softmax_dtype": (lambda: export(softmax_dtype="float16"), ValueError, "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores; got softmax_dtype='float16'"),
    "narrower softmax_dtype": (lambda: export(TensorSpec("float64", (2, 4, 6, 16)), softmax_dtype="float32"), ValueError, "no narrower than the scores; got softmax_dtype='float32'"),
    "a mask of integers": (lambda: export(attn_mask=ints(6, 6)), TypeError, "`attn_mask` must be boolean (True = may attend) or floating (added to the scores); got attn_mask.dtype=int64"),
    "a scale in another dtype": (lambda: export(scale=TensorSpec("float64", (4, 1, 1))), TypeError, "`scale` must have the dtype of `query` or of the scores (float32); got scale.dtype=float64"),
    "sinks in another dtype": (lambda: export(sinks=np.ones(4)), TypeError, "`sinks` must have the dtype of `query` or of the scores (float32); got sinks.dtype=float64"),
    "sinks of another shape": (lambda: export(sinks=f32(3)), ValueError, "`sinks` must broadcast to (..., Hq)"),
    "the other half": (lambda: export(past_value=X), ValueError, "`past_key` and `past_value` must be given together"),
    "a cache of two lengths": (lambda: export(past_key=X, past_value=f32(2, 4, 7, 16)), ValueError, "`past_key` and `past_value` must have the same length; got past_key=6, past_value=7"),
    "lengths of a cache, each head": (lambda: export(**CACHE, past_lengths=ints(4)), ValueError, "`past_lengths` must have one integer per batch entry, (B,); got past_lengths.shape=(4,), batch=(2,)"),
    "lengths of two batch axes": (lambda: export(f32(3, 2, 4, 6, 16), past_key=f32(3, 2, 4, 6, 16), past_value=f32(3, 2, 4, 6, 16), past_lengths=ints(3, 2)), ValueError, "`past_lengths` must have one integer per batch entry, (B,)"),
    "lengths that are numbers": (lambda: export(**CACHE, past_lengths=f32(2)), TypeError, "`past_lengths` must hold integers; got past_lengths.dtype=float32"),
    "a cache of other heads": (lambda: export(past_key=f32(2, 2, 6, 16), past_value=X), ValueError, "`past_key` must have at least 3 axes, and the shape of `key` except for axis -2; got past_key.shape=(2, 2, 6, 16), key.shape=(2, 4, 6, 16)"),
    "a cache with heads last": (lambda: export(**CACHE | {"past_value": f32(2, 4, 6, 8)}, layout="...LHE"), ValueError, "`past_value` must have at least 3 axes, and the shape of `value` except for axis -3"),
    "a cache of 2 axes": (lambda: export(f32(6, 16), past_key=f32(6, 16), past_value=f32(6, 16)), ValueError, "`past_key` must have at least 3 axes"),
    "documents of more keys": (lambda: export_attention(OPEN, f32("B", 4, "S", 16), f32("B", 4, "S", 16), masks.document(ints("L"))), ValueError, "`attn_mask.query_ids` must have one integer for each token; got query_ids.shape=('L',), expected=('B', 'S'). If S is not L, pass the ids of the keys as `key_ids`."),
    "documents of other lengths": (lambda: export(attn_mask=masks.document(ints(6), ints(7))), ValueError, "`attn_mask.key_ids` must have one integer for each token; got key_ids.shape=(7,), expected=(2, 6)"),
    "documents of other batches": (lambda: export(attn_mask=masks.document(ints(3, 6))), ValueError, "`attn_mask.query_ids` must have one integer for each token; got query_ids.shape=(3, 6), expected=(2, 6)"),
    "lengths with a point": (lambda: export(attn_mask=masks.padding(f32(2))), TypeError, "`attn_mask.key_lengths` must hold integers; got attn_mask.key_lengths.dtype=float32"),
    "no length at all": (lambda: export(attn_mask=masks.padding("6")), TypeError, "`attn_mask.key_lengths` must be an integer, a list of them, or a TensorSpec; got attn_mask.key_lengths='6'"),
    "a mask that is none": (lambda: export(attn_mask="causal"), TypeError, "`attn_mask` must be a Mask, a TensorSpec or an array; got attn_mask='causal'"),
    "slopes wider than the scores": (lambda: export(bias=biases.alibi(np.ones(4))), TypeError, "`bias.slopes` must have the dtype of `query` or of the scores (float32); got bias.slopes.dtype=float64"),
    "a table wider than the scores": (lambda: export(bias=biases.relative(np.ones((16, 4)))), TypeError, "`bias.table` must have the dtype of `query` or of the scores (float32); got bias.table.dtype=float64"),
    "a bias that is none": (lambda: export(bias=1.0), TypeError, "`bias` must be a Bias, a TensorSpec or an array; got bias=1.0"),
    "a mask of a model that is none": (lambda: verify(export(), attn_mask=np.ones((6, 6), bool)), TypeError, "`attn_mask` must be a Mask or None; got attn_mask=numpy.ndarray"),
    "a kernel for a derivative": (lambda: to_onnx(lambda x: scaled_dot_product_attention_vjp(x, x, x, implementation="native")[0], X), ValueError, "`implementation` must be None or 'xp'"),
    "no common shape": (lambda: to_onnx(lambda x: x + np.ones((5, 1), np.float32), X), ValueError, "shapes must broadcast; a name broadcasts only with itself and with 1"),
    "no such shape": (lambda: to_onnx(to_five_rows, X), ValueError, "`x` must broadcast to `shape`; got x.shape=(2, 4, 6, 16), shape=(2, 4, 5, 16)"),
    "conditions of numbers": (lambda: export(attn_mask=masks.from_function(lambda b, h, i, j: i & j)), TypeError, "the function of `attn_mask` must return a condition; got its result=int64"),
    "a library of no name here": (lambda: backends.find_backends(["numpi"]), ValueError, "find: `backends` must be among numpy,"),
    "a library that is not here": (lambda: backends.find_backends(["cupy"]), ValueError, "find: `backends` must be installed and have a device here; got backend='cupy'. The command `sdpa-xp backends` lists those that are."),
    "a call that is too long": (lambda: from_json(" " * (LONGEST_CALL + 1), {}), ValueError, f"a call of {LONGEST_CALL + 1} characters, more than {LONGEST_CALL}"),
    "a list for a call": (lambda: from_json("[]", {}), ValueError, "no call"),
    "a call of a query alone": (lambda: from_json('{"query": "float32[2,3]"}', {}), ValueError, "no call"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_refused_call(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_the_longest_call_is_read() -> None:
    text = '{"query": "float32[2,3]", "key": "float32[2,3]", "value": "float32[2,3]"}'
    assert from_json(text.ljust(LONGEST_CALL), {}).query == f32(2, 3)


def test_the_folder_of_the_demo_holds_it(tmp_path: Path) -> None:
    (tmp_path / demo.PICTURE).write_text("")
    words = "a file of `output` must not exist yet.*Pass `overwrite=True` to replace it"
    with pytest.raises(FileExistsError, match=words):
        demo.check_folder(tmp_path, overwrite=False)
    demo.check_folder(tmp_path, overwrite=True)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read any file, so the error is made."""
    file = tmp_path / "model.onnx"
    file.write_bytes(b"onnx")

    def read_bytes(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    def opened(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(PermissionError, match=r"`model` must be readable \(.*ermission denied"):
        verify(file)


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
def test_an_odd_object_is_refused_by_name(
    function: Callable[..., Any], name: str, valid: dict[str, Any]
) -> None:
    arguments = valid | ({"model": export(form="primitive")} if "model" in valid else {}) | {name: Odd()}
    inputs = [arguments.pop("layer"), X] if function is to_onnx else []
    with pytest.raises((TypeError, ValueError), match=rf"^[\w.]+: .*`{name}\b.*Odd"):
        function(*inputs, **arguments)
