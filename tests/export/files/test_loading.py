"""A file that anyone may have written is refused in one line, and before it costs memory."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from internals import HELD, MOST_TRIAL_NUMBERS, ExportCall, check_size, checked_call, load, peak_above
from onnx import TensorProto, helper, numpy_helper

from sdpa_xp import biases
from sdpa_xp_export import TensorSpec, export_attention, save

MODEL = export_attention(*[TensorSpec("float32", (2, 4))] * 3)
ARRAY = np.arange(16, dtype=np.float32).reshape(4, 4)

BIAS = biases.from_array(np.linspace(-1, 1, 32 * 32, dtype=np.float32).reshape(32, 32))


def identity(*tensors: TensorProto) -> onnx.ModelProto:
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [4, 4])
    graph = helper.make_graph([helper.make_node("Identity", ["array"], ["out"])], "one", [], [out])
    graph.initializer.extend(tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def referring(location: str, **more: object) -> TensorProto:
    """A tensor of 64 bytes that are somewhere else."""
    tensor = TensorProto(name="array", data_type=TensorProto.FLOAT, dims=[4, 4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data in it, and data beside it."""
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    for path in (inside / "a.data", inside / "sub" / "a.data", tmp_path / "secret.data"):
        path.write_bytes(ARRAY.tobytes())
    return inside


def written(folder: Path, model: onnx.ModelProto) -> Path:
    (folder / "a.onnx").write_bytes(model.SerializeToString())
    return folder / "a.onnx"


def refused(path: Path, rule: str, error: type[Exception] = ValueError) -> str:
    """The one line that `load` refuses it with."""
    with pytest.raises(
        error, match=f"^verify: `model` must {rule}.*; got model={re.escape(str(path))}"
    ) as caught:
        load("verify", path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    path = save(MODEL, tmp_path / "a.onnx")
    assert load("verify", path) == MODEL
    (tmp_path / "link.onnx").symlink_to("a.onnx")
    assert load("verify", str(tmp_path / "link.onnx")) == MODEL


@pytest.mark.parametrize(
    "more", [{}, {"offset": 0}, {"offset": 0, "length": 64}, {"length": 64, "checksum": "?"}]
)
@pytest.mark.parametrize("location", ["a.data", "sub/a.data", "./a.data"])
def test_external_data_is_read_into_the_model(folder: Path, location: str, more: dict[str, object]) -> None:
    path = written(folder, identity(referring(location, **more)))
    (folder.parent / "link.onnx").symlink_to(path)
    for file in (path, folder.parent / "link.onnx"):
        (tensor,) = load("verify", file).graph.initializer
        assert tensor.data_location == TensorProto.DEFAULT
        assert not tensor.external_data
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), ARRAY)


@pytest.mark.parametrize("step", ["is_file", "read_bytes"])
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def forbidden(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied", "/elsewhere")

    save(MODEL, tmp_path / "a.onnx")
    monkeypatch.setattr(Path, step, forbidden)
    refused(tmp_path / "a.onnx", r"be readable \(Permission denied\)", PermissionError)


NO_MODELS = {
    "garbage": b"garbage",
    "graph": MODEL.graph.SerializeToString(),
    "tensor": numpy_helper.from_array(ARRAY).SerializeToString(),
    "key": MODEL.SerializeToString().replace(b"sdpa_xp.form", b"sdpa_xp.\xff\xffrm"),
    "location": identity(referring("location")).SerializeToString().replace(b"location", b"loca\xffion"),
    "long": b"\x3a\x80\x80\x80\x80\x10",  # a graph of 4 GiB, by its own account
}


@pytest.mark.parametrize("content", NO_MODELS.values(), ids=NO_MODELS)
def test_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    refused(tmp_path / "a.onnx", r"be an ONNX model \(")


@pytest.mark.parametrize(
    "tensor",
    [
        referring("a.data", length=60),
        TensorProto(name="array", data_type=1, dims=[10**6, 10**6]),
        TensorProto(name="array", data_type=99, dims=[1], raw_data=b"1234"),
        TensorProto(name="array", dims=[1], raw_data=b"1234"),
    ],
)
def test_tensors_that_are_not_as_they_say(folder: Path, tensor: TensorProto) -> None:
    refused(written(folder, identity(tensor)), "hold tensors as they say")


def test_external_data_is_found_wherever_it_is(folder: Path) -> None:
    """Where onnx looks for it, and where onnxruntime alone would."""
    outside = referring("../secret.data")
    constant = helper.make_node("Constant", [], ["array"], value=outside)
    inner = helper.make_graph([constant], "inner", [], [])
    loop = helper.make_node("Loop", ["", ""], ["array"], body=inner)
    function = helper.make_function("f", "f", [], ["array"], [constant], [helper.make_opsetid("", 17)])
    models = [identity(numpy_helper.from_array(ARRAY, "array")) for _ in range(5)]
    models[0].graph.node.append(constant)
    models[1].graph.node.append(loop)
    models[2].functions.append(function)
    models[3].graph.sparse_initializer.add().values.CopyFrom(outside)
    models[4].training_info.add().algorithm.initializer.append(outside)
    for model in models:
        refused(written(folder, model), "keep its external data in its own folder")
    models[1].graph.node[1].attribute[0].g.node[0].attribute[0].t.CopyFrom(referring("a.data"))
    tensor_proto = (
        load("verify", written(folder, models[1])).graph.node[1].attribute[0].g.node[0].attribute[0].t
    )
    np.testing.assert_array_equal(numpy_helper.to_array(tensor_proto), ARRAY)


def test_sizes_are_bounded_before_anything_is_read(folder: Path) -> None:
    path = folder / "large.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    assert peak(path, "be at most 2147483647 bytes; got") < 2**26
    with (folder / "large.data").open("wb") as file:
        file.truncate(2**30)
    tensor = referring("large.data")
    tensor.dims[:] = [2**14, 2**14]
    path = written(folder, identity(tensor, tensor, tensor))  # the same bytes three times
    assert peak(path, "be at most 2147483647 bytes with its external data; got") < 2**26
    with pytest.raises(ValueError, match="63 bytes"):
        load("verify", written(folder, identity(referring("a.data"))), largest=63)


def peak(path: Path, rule: str) -> int:
    def load_it() -> None:
        with pytest.raises(ValueError, match=f"verify: `model` must {rule}"):
            load("verify", path)

    _, peak_bytes = peak_above(load_it)
    return peak_bytes or 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_refused_or_read(tmp_path: Path, seed: int) -> None:
    """Nothing but the errors that `load` promises, and no warning."""
    path, rng = tmp_path / "a.onnx", random.Random(seed)
    model = export_attention(*[TensorSpec("float32", (32, 8))] * 3, bias=BIAS)
    model.graph.initializer.append(referring("a.onnx", offset=0, length=64))
    whole = model.SerializeToString()
    messages: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(500):
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 3, 30])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                load("verify", path)
                messages.append("")
            except (ValueError, OSError) as error:
                messages.append(str(error))
    refusals = [message for message in messages if message]
    assert 0 < len(refusals) < len(messages)
    assert all(re.fullmatch("verify: `model` must .*", message) for message in refusals)


def call(query: str, key: str, value: str | None = None, **more: Any) -> ExportCall:
    specs = [TensorSpec.parse(spec) for spec in (query, key, value or key)]
    return checked_call("verify", *specs, **more)


def test_the_bound_is_met() -> None:
    exact = call("float32[2,3,5,7]", "float32[2,3,11,7]", "float32[2,3,11,13]")
    inputs = 2 * 3 * (5 * 7 + 11 * 7 + 11 * 13)
    of_one_query, output = HELD * 2 * 3 * 11, 2 * 3 * 5 * 13
    check_size(exact, inputs + of_one_query + output)
    with pytest.raises(ValueError, match=r"numbers=2\.98e"):
        check_size(exact, inputs + of_one_query + output - 1)
    for many_scores in ("float32[1,8,4096,64]", "float32[B,8,4096,64]", "float32[1,1,40000,8]"):
        check_size(call(many_scores, many_scores))
    assert MOST_TRIAL_NUMBERS == 2**28
    cached = TensorSpec("float32", ("B", 2, "P", 4))
    check_size(call("float32[B,2,L,4]", "float32[B,2,L,4]", past_key=cached, past_value=cached))
