"""Messages of the exporter, each in the words of its rule; and that each argument is refused by its name."""

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
from internals import LONGEST_CALL, backends, demo, from_json

from sdpa_xp import masks, scaled_dot_product_attention, scaled_dot_product_attention_vjp
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify

X = TensorSpec("float32", (2, 4, 6, 16))
OPEN = TensorSpec("float32", ("B", 4, "L", 16))
CACHE = {"past_key": X, "past_value": X}


def floats(*shape: int | str) -> TensorSpec:
    return TensorSpec("float32", shape)


def ints(*shape: int | str) -> TensorSpec:
    return TensorSpec("int64", shape)


def export(query: TensorSpec = X, **options: Any) -> onnx.ModelProto:
    return export_attention(query, query, query, **options)


def to_five_rows(x: Any) -> Any:
    return array_api_compat.array_namespace(x).broadcast_to(x, (2, 4, 5, 16))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "softmax_dtype": (
        lambda: export(softmax_dtype="float16"),
        ValueError,
        "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores; "
        "got softmax_dtype='float16'",
    ),
    "narrower softmax_dtype": (
        lambda: export(TensorSpec("float64", (2, 4, 6, 16)), softmax_dtype="float32"),
        ValueError,
        "no narrower than the scores; got softmax_dtype='float32'",
    ),
    "a mask of integers": (
        lambda: export(attn_mask=ints(6, 6)),
        TypeError,
        "`attn_mask` must be boolean (True = may attend) or floating (added to the scores); "
        "got attn_mask.dtype=int64",
    ),
    "a bias of integers": (
        lambda: export(bias=ints(6)),
        TypeError,
        "`bias` must be floating; got bias.dtype=int64",
    ),
    "a scale in another dtype": (
        lambda: export(scale=TensorSpec("float64", (4, 1, 1))),
        TypeError,
        "`scale` must have the dtype of `query` or of the scores (float32); got scale.dtype=float64",
    ),
    "sinks in another dtype": (
        lambda: export(sinks=np.ones(4)),
        TypeError,
        "`sinks` must have the dtype of `query` or of the scores (float32); got sinks.dtype=float64",
    ),
    "sinks of another shape": (
        lambda: export(sinks=floats(3)),
        ValueError,
        "`sinks` must broadcast to (..., Hq)",
    ),
    "half a cache": (
        lambda: export(past_key=X),
        ValueError,
        "`past_key` and `past_value` must be given together",
    ),
    "the other half": (
        lambda: export(past_value=X),
        ValueError,
        "`past_key` and `past_value` must be given together",
    ),
    "lengths of no cache": (
        lambda: export(past_lengths=ints(2)),
        ValueError,
        "`past_lengths` needs `past_key` and `past_value`; got past_lengths=int64[2].",
    ),
    "a cache of two lengths": (
        lambda: export(past_key=X, past_value=floats(2, 4, 7, 16)),
        ValueError,
        "`past_key` and `past_value` must have the same length; got past_key=6, past_value=7",
    ),
    "lengths of a cache, each head": (
        lambda: export(**CACHE, past_lengths=ints(4)),
        ValueError,
        "`past_lengths` must have one integer per batch entry, (B,); got past_lengths.shape=(4,), batch=(2,)",
    ),
    "lengths of two batch axes": (
        lambda: export(
            floats(3, 2, 4, 6, 16),
            past_key=floats(3, 2, 4, 6, 16),
            past_value=floats(3, 2, 4, 6, 16),
            past_lengths=ints(3, 2),
        ),
        ValueError,
        "`past_lengths` must have one integer per batch entry, (B,)",
    ),
    "lengths that are numbers": (
        lambda: export(**CACHE, past_lengths=floats(2)),
        TypeError,
        "`past_lengths` must hold integers; got past_lengths.dtype=float32",
    ),
    "a cache of other heads": (
        lambda: export(past_key=floats(2, 2, 6, 16), past_value=X),
        ValueError,
        "`past_key` must have at least 3 axes, and the shape of `key` except for axis -2; "
        "got past_key.shape=(2, 2, 6, 16), key.shape=(2, 4, 6, 16)",
    ),
    "a cache with heads last": (
        lambda: export(**CACHE | {"past_value": floats(2, 4, 6, 8)}, layout="...LHE"),
        ValueError,
        "`past_value` must have at least 3 axes, and the shape of `value` except for axis -3",
    ),
    "a cache of 2 axes": (
        lambda: export(floats(6, 16), past_key=floats(6, 16), past_value=floats(6, 16)),
        ValueError,
        "`past_key` must have at least 3 axes",
    ),
    "documents of more keys": (
        lambda: export_attention(
            OPEN, floats("B", 4, "S", 16), floats("B", 4, "S", 16), masks.document(ints("L"))
        ),
        ValueError,
        "`attn_mask.query_ids` must also have one integer for each key (S); got L=L, S=S. "
        "Pass the ids of the keys as `key_ids`.",
    ),
    "documents of other lengths": (
        lambda: export(attn_mask=masks.document(ints(6), ints(7))),
        ValueError,
        "`attn_mask.key_ids` must have one integer for each token; got key_ids.shape=(7,), expected=(2, 6)",
    ),
    "documents of other batches": (
        lambda: export(attn_mask=masks.document(ints(3, 6))),
        ValueError,
        "`attn_mask.query_ids` must have one integer for each token; "
        "got query_ids.shape=(3, 6), expected=(2, 6)",
    ),
    "lengths with a point": (
        lambda: export(attn_mask=masks.padding(floats(2))),
        TypeError,
        "`attn_mask.key_lengths` must hold integers; got attn_mask.key_lengths.dtype=float32",
    ),
    "no length at all": (
        lambda: export(attn_mask=masks.padding("6")),
        TypeError,
        "`attn_mask.key_lengths` must be an integer, a list of them, or a TensorSpec; "
        "got attn_mask.key_lengths='6'",
    ),
    "a mask that is none": (
        lambda: export(attn_mask="causal"),
        TypeError,
        "`attn_mask` must be a Mask, a TensorSpec or an array; got attn_mask='causal'",
    ),
    "a bias that is none": (
        lambda: export(bias=1.0),
        TypeError,
        "`bias` must be a Bias, a TensorSpec or an array; got bias=1.0",
    ),
    "a mask of a model that is none": (
        lambda: verify(export(), attn_mask=np.ones((6, 6), bool)),
        TypeError,
        "`attn_mask` must be a Mask or None; got attn_mask=numpy.ndarray",
    ),
    "a function without a graph": (
        lambda: to_onnx(lambda x: scaled_dot_product_attention_vjp(x, x, x)[0], X),
        TypeError,
        "a graph must be traced of scaled_dot_product_attention,",
    ),
    "another runtime": (
        lambda: export(runtime="onnxruntime>=1.28"),
        ValueError,
        "`runtime` must be 'onnxruntime>=RELEASE;PROVIDER', the provider cpu, web, cuda; "
        "got runtime='onnxruntime>=1.28'. As in 'onnxruntime>=1.28;cpu'.",
    ),
    "no common shape": (
        lambda: to_onnx(lambda x: x + np.ones((5, 1), np.float32), X),
        ValueError,
        "shapes must broadcast; a name broadcasts only with itself and with 1",
    ),
    "no such shape": (
        lambda: to_onnx(to_five_rows, X),
        ValueError,
        "`x` must broadcast to `shape`; got x.shape=(2, 4, 6, 16), shape=(2, 4, 5, 16)",
    ),
    "conditions of numbers": (
        lambda: export(attn_mask=masks.from_function(lambda b, h, i, j: i & j)),
        TypeError,
        "the function of `attn_mask` must return a condition; got its result=int64",
    ),
    "a library of no name here": (
        lambda: backends.find_backends(["numpi"]),
        ValueError,
        "find: `backends` must be among numpy,",
    ),
    "a library that is not here": (
        lambda: backends.find_backends(["cupy"]),
        ValueError,
        "find: `backends` must be installed and have a device here; got backend='cupy'",
    ),
    "a call that is too long": (
        lambda: from_json(" " * (LONGEST_CALL + 1), {}),
        ValueError,
        f"a call of {LONGEST_CALL + 1} characters, more than {LONGEST_CALL}",
    ),
    "a list for a call": (lambda: from_json("[]", {}), ValueError, "no call"),
    "a call of a query alone": (lambda: from_json('{"query": "float32[2,3]"}', {}), ValueError, "no call"),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_the_longest_call_is_read() -> None:
    text = '{"query": "float32[2,3]", "key": "float32[2,3]", "value": "float32[2,3]"}'
    assert from_json(text.ljust(LONGEST_CALL), {}).query == floats(2, 3)


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
