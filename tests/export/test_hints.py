"""Messages for what users of NumPy, torch and onnx write first: each says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from internals import Weight, graph_namespace

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import LargeModel, TensorSpec, export_attention, jit, to_onnx

X = TensorSpec("float32", ("B", "L", 4))
QKV = TensorSpec("float32", ("B", 2, "L", 8))


def test_errors_about_other_strings_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"^arange\(\) not supported"):
        to_onnx(lambda x: x + np.arange("3"), TensorSpec("float32", (2, 4)))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gelu", r"Write 0\.5 \* x \* \(1\.0 \+ xp\.erf\("),
        ("transpose", r"xp\.permute_dims\(x, axes\)"),
        ("nonsense", r"the array API has none that does the same; `xp\.__all__` lists the functions\."),
    ],
)
def test_a_function_that_the_array_api_lacks(name: str, words: str) -> None:
    message = rf"^a value of a graph has no function `{name}`.*{words}"
    with pytest.raises(AttributeError, match=message):
        to_onnx(lambda x: getattr(x.__array_namespace__(), name)(x), X)
    assert not hasattr(graph_namespace, name)
    assert not hasattr(graph_namespace, "__nothing__")
    where = rf"^export_attention: the function of `attn_mask` .* can be traced to ONNX: .*no function `{name}`"
    mask = masks.from_function(lambda b, h, i, j: getattr(i.__array_namespace__(), name)(i) > j)
    with pytest.raises(TypeError, match=where):
        export_attention(QKV, QKV, QKV, mask)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reshape", r" Take functions .*, as xp = x\.__array_namespace__\(\), xp\.reshape\(x, shape\)\."),
        ("nonsense", " The namespace of a value has no `nonsense` and no replacement for it."),
        ("__nothing__", ""),
    ],
)
def test_an_attribute_that_a_value_lacks(name: str, hint: str) -> None:
    message = rf"^to_onnx: a value of a graph has no attribute '{name}'; got value=x\.{hint}$"
    with pytest.raises(AttributeError, match=message):
        to_onnx(lambda x: getattr(x, name), X)


def large_model() -> LargeModel:
    return LargeModel(onnx.ModelProto(ir_version=8), {"weight": Weight("weight", np.ones(4, np.float32))})


@pytest.mark.parametrize("name", ["SerializeToString", "SerializePartialToString", "ByteSize", "CopyFrom"])
def test_a_large_model_is_no_message(name: str) -> None:
    words = rf"the model is too large for one message, so it has no `{name}`\. Use save\(model, path\)\.$"
    with pytest.raises(AttributeError, match=f"^LargeModel: {words}"):
        getattr(large_model(), name)
    assert not hasattr(large_model(), name)


def test_what_a_large_model_has_elsewhere() -> None:
    with pytest.raises(AttributeError, match=r"no `ir_version`\. Use model\.model_proto\.ir_version\.$"):
        assert large_model().ir_version
    with pytest.raises(AttributeError, match=r"^'LargeModel' object has no attribute 'nonsense'$"):
        assert large_model().nonsense


PER_ENTRY = [
    (masks.padding, r'masks\.padding\(TensorSpec\("int64", \("B",\)\)\)'),
    (lambda ints: masks.padding(None, ints), r'masks\.padding\(None, TensorSpec\("int64", \("B",\)\)\)'),
    (masks.prefix, r'masks\.prefix\(TensorSpec\("int64", \("B",\)\)\)'),
    (masks.causal, r'offset=TensorSpec\("int64", \("B",\)\)'),
    (lambda ints: masks.sliding_window(2, 2, offset=ints), r'offset=TensorSpec\("int64", \("B",\)\)'),
]


@pytest.mark.parametrize("ints", [TensorSpec("int64", (2,)), np.array([1, 2]), [1, 2]])
@pytest.mark.parametrize(("mask", "hint"), PER_ENTRY)
def test_integers_for_another_batch(mask: Callable[[Any], Any], hint: str, ints: Any) -> None:
    words = (
        r"^export_attention: `attn_mask\.(\w+)` must have one integer for each batch entry; "
        rf"got attn_mask\.\1\.shape=\(2,\), batch=\('B',\)\. Write {hint}\.$"
    )
    with pytest.raises(ValueError, match=words):
        export_attention(QKV, QKV, QKV, mask(ints))


def test_integers_of_a_layer_for_another_batch() -> None:
    def layer(x: Any, lengths: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, masks.padding(lengths))

    with pytest.raises(ValueError, match=r'Write masks\.padding\(TensorSpec\("int64", \("B",\)\)\)\.$'):
        to_onnx(layer, QKV, TensorSpec("int64", ("N",)))
    with pytest.raises(ValueError, match=r"sum\(axis=-1\) counts"):  # a mask of 1s and 0s
        export_attention(QKV, QKV, QKV, masks.padding(TensorSpec("int64", ("B", "L"))))


@pytest.mark.parametrize(
    ("mask_mod", "words"),
    [
        (
            lambda b, h, i, j: i > j and j > 0,
            r": a value of a graph is neither true nor false .*with `where`\.$",
        ),
        (lambda b, h, i, j: i > j.foo, r": a value of a graph has no attribute 'foo'; got value=\w+\. [^;]*$"),
        (lambda b, h, i, j: i > [1][j.name], r"; got its error=list indices .* not str\. Use operators and"),
    ],
)
def test_an_error_in_a_function_of_the_indices_is_one_message(mask_mod: Any, words: str) -> None:
    start = r"^export_attention: the function of `attn_mask` must be one that can be traced to ONNX"
    with pytest.raises(TypeError, match=start + words) as caught:
        export_attention(QKV, QKV, QKV, masks.from_function(mask_mod))
    text = str(caught.value)
    assert text.count("; got ") <= 1
    assert text.count("export_attention: ") == 1
    assert ".." not in text.replace("...", "")


@pytest.mark.parametrize(
    ("dtype", "near"),
    [
        ("float", "float32"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("double", "float64"),
        ("bf16", "bfloat16"),
        ("int", "int64"),
        ("flaot32", "float32"),
        ("Float32", "float32"),
        ("complex64", None),
        ("float8", None),
        ("float128", None),
        ("int4", None),
        ("float322", "float32"),
        ("uint1", "uint16"),
    ],
)
def test_the_nearest_dtype(dtype: str, near: str | None) -> None:
    hint = f" The nearest is '{near}'\\." if near else ""
    with pytest.raises(
        ValueError, match=rf"^TensorSpec: `dtype` must be one of .*; got dtype='{dtype}'\.{hint}$"
    ):
        TensorSpec(dtype, ("B", 8))


NUMBERS: dict[str, Callable[[Any], object]] = {
    "size": masks.chunked,
    "step": masks.dilated,
    "left": lambda spec: masks.sliding_window(spec, 0),
    "max_distance": lambda spec: biases.relative(TensorSpec("float32", (8, 2)), max_distance=spec),
    "offset": lambda spec: biases.relative(TensorSpec("float32", (8, 2)), offset=spec),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("shape", [(), (2,), ("B",)])
def test_a_number_of_a_mask_or_a_bias_cannot_be_an_input(name: str, shape: tuple[int | str, ...]) -> None:
    """Neither with one element, nor with a length that only a run knows."""
    words = (
        rf"`{name}` must be an integer; .* An exported graph holds it as a number, so it cannot be an input\.$"
    )
    with pytest.raises(TypeError, match=words):
        NUMBERS[name](TensorSpec("int64", shape))


def test_a_runtime_that_the_shell_cut() -> None:
    """As `--runtime onnxruntime>=1.28;cpu` without quotes."""
    words = r"got runtime='onnxruntime'\. In a shell, quote it, as in 'onnxruntime>=1\.28;cpu': .* to a file\.$"
    with pytest.raises(ValueError, match=words):
        export_attention(QKV, QKV, QKV, runtime="onnxruntime")
    with pytest.raises(ValueError, match=r"got runtime='onnxruntime>=1\.28'\. As in ") as caught:
        export_attention(QKV, QKV, QKV, runtime="onnxruntime>=1.28")
    assert "In a shell" not in str(caught.value)


def test_an_older_release_was_not_tried() -> None:
    words = r"must be a release that was tried, .*1\.20;cpu'\. Older releases were not tried with any form\.$"
    with pytest.raises(ValueError, match=words):
        export_attention(QKV, QKV, QKV, form="primitive", runtime="onnxruntime>=1.20;cpu")


BOTH = "A `KVCache` holds both; an export has past_key=... and past_value=..."
ELSEWHERE = {
    "past_key_values": BOTH,
    "past": BOTH,
    "layer_past": BOTH,
    "kv_cache": BOTH,
    "opset_version": "Write opset=... instead.",
    "dynamic_axes": "Name open axes in a spec: TensorSpec('float32', ('B', 8, 'L', 64)).",
    "dynamic_shapes": "Name open axes in a spec: TensorSpec('float32', ('B', 8, 'L', 64)).",
    "input_names": "Leave it out: inputs and outputs have names already.",
    "output_names": "Leave it out: inputs and outputs have names already.",
    "key_padding_mask": "Write attn_mask=~key_padding_mask[:, None, None, :] instead: True means may attend.",
}


@pytest.mark.parametrize("keyword", ELSEWHERE)
def test_keywords_of_torch_and_of_hugging_face(keyword: str) -> None:
    with pytest.raises(TypeError, match=rf"^export_attention: there is no argument `{keyword}`") as error:
        export_attention(QKV, QKV, QKV, **{keyword: (QKV, QKV)})  # type: ignore[arg-type]
    assert str(error.value).endswith(f" {ELSEWHERE[keyword]}")


@pytest.mark.parametrize("keyword", ["opset_version", "dynamic_axes", "input_names"])
def test_keywords_of_an_exporter_are_none_of_a_layer(keyword: str) -> None:
    with pytest.raises(TypeError, match=r"^to_onnx: the arguments must fit `layer`; got its error=") as error:
        to_onnx(lambda x: x, X, **{keyword: 17})
    assert str(error.value).endswith(f" {ELSEWHERE[keyword]}")
    with pytest.raises(
        TypeError, match=r"Pass a TensorSpec for each array, and the other arguments as they are\.$"
    ):
        to_onnx(lambda x: x, X, zzz=17)


@pytest.mark.needs("torch")
def test_an_attention_layer_of_torch() -> None:
    """Its weights are loaded, whatever is wrong with the call; its signature of 300 letters is left out."""
    import torch

    attention = torch.nn.MultiheadAttention(64, 8, batch_first=True)
    x = TensorSpec("float32", ("B", "L", 64))
    hint = r"load its weights into one of sdpa_xp\.layers: MultiHeadAttention\.from_torch\(layer\)\.$"
    calls = {
        "missing": lambda: to_onnx(attention, x),
        "complete": lambda: to_onnx(attention, x, x, x),
        "jit": lambda: jit(attention)(torch.ones(2, 3, 64)),
    }
    for call in calls.values():
        with pytest.raises(TypeError, match=hint) as error:
            call()
        assert "key_padding_mask" not in str(error.value)
    with pytest.raises(TypeError, match=r"load its weights into one of sdpa_xp\.layers\.$"):
        to_onnx(torch.nn.Linear(64, 8), x)
