"""`verify(record=True)` writes its verdict into the metadata, for the graph that was verified and no other."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run
from internals import override, recorded_verdict
from onnx import compose, numpy_helper
from short_runs import leave_out_long_runs, run_each_model_once, try_short_lengths_alone

import sdpa_xp
from sdpa_xp import scaled_dot_product_attention
from sdpa_xp_export import LargeModel, TensorSpec, export_attention, save, to_onnx, verify, verify_layer

X = TensorSpec("float32", ("B", 2, "L", 8))
SINKS = np.linspace(-1, 1, 2, dtype=np.float32)
TABLE = np.linspace(-1, 1, 2 * 20 * 20, dtype=np.float32).reshape(2, 20, 20)
"""More than 1,024 bytes, so that it may be stored in a file of its own."""
FIXED = TensorSpec("float32", ("B", 2, 20, 8))
CALL = dict.fromkeys(("query", "key", "value"), FIXED) | {"bias": TABLE, "sinks": SINKS}
STALE = "the verdict in the metadata is stale: the graph has changed since"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict of a few runs, in this process: what it holds does not depend on how many there are."""
    run_each_model_once(monkeypatch)
    leave_out_long_runs(monkeypatch)
    try_short_lengths_alone(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a small and a large array."""
    model = export_attention(FIXED, FIXED, FIXED, bias=sdpa_xp.biases.from_array(TABLE), sinks=SINKS)
    return save(model, tmp_path / "a.onnx")


def verdicts(model: Any) -> list[dict[str, Any]]:
    return [json.loads(entry.value) for entry in model.metadata_props if ".verdict" in entry.key]


def recorded(model: Any, **rules: Any) -> str:
    """What a report says of the verdict in a model; empty if nothing."""
    notes = [note for note in verify(model, seed=1, **rules).notes if "the verdict" in note]
    return "".join(notes)


def test_it_is_written_when_asked_alone(path: Path) -> None:
    before = path.read_bytes()
    report = verify(path, seed=7)
    assert path.read_bytes() == before
    assert str(report) == str(verify(path, seed=7, record=True))
    (verdict,) = verdicts(onnx.load(path))
    worst = report.worst.agreement
    assert (verdict["agrees"], verdict["runs"], verdict["seed"]) == (True, len(report.runs), 7)
    assert (verdict["error"], verdict["bound"]) == (worst.absolute, worst.bound)
    assert (verdict["engine"], verdict["providers"]) == (report.engine, "CPUExecutionProvider")
    assert (verdict["version"], verdict["call_from_metadata"]) == (sdpa_xp.__version__, True)
    assert verdict["date"].endswith("+00:00")
    stated = recorded(path)
    start = f"the verdict in the metadata: agrees on {report.engine} (CPUExecutionProvider), "
    assert stated.startswith(f"{start}{len(report.runs)} runs, error ")
    assert stated.endswith(f", sdpa_xp {sdpa_xp.__version__}, {verdict['date']}")
    loaded = onnx.load(path)
    del loaded.metadata_props[-1]
    assert loaded == onnx.load_from_string(before)


@pytest.mark.parametrize("most", [2**20, 1_000])
def test_a_model_in_memory_takes_it_along(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that refers to its arrays, since it is too large."""
    override(monkeypatch, "EXTERNAL_ABOVE", most)
    model = export_attention(FIXED, FIXED, FIXED, bias=sdpa_xp.biases.from_array(TABLE))
    assert isinstance(model, LargeModel) is (most == 1_000)
    verify(model, seed=0)
    assert verdicts(model) == []
    verify(model, seed=0, record=True)
    assert "agrees" in recorded(model)
    for name, above in (("one.onnx", 2**20), ("two.onnx", 0)):
        assert "agrees" in recorded(save(model, tmp_path / name, external_above=above))


@pytest.mark.parametrize("tool", ["save", "onnx"])
def test_the_data_beside_a_model_stay(path: Path, tool: str) -> None:
    """Other models may use them, too."""
    if tool == "save":
        save(onnx.load(path), path, overwrite=True, external_above=0)
    else:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.data", size_threshold=0)
    copy = Path(shutil.copy(path, path.parent / "copy.onnx"))
    files = {file: file.stat().st_mtime_ns for file in path.parent.iterdir() if file != path}
    verify(path, seed=0, record=True)
    assert {file: file.stat().st_mtime_ns for file in path.parent.iterdir() if file != path} == files
    assert "agrees" in recorded(path)
    assert recorded(copy) == ""
    whole = onnx.load(path)
    onnx.save(onnx.ModelProto.FromString(whole.SerializeToString()), path.parent / "one.onnx")
    assert "agrees" in recorded(path.parent / "one.onnx")


def test_an_infinite_error_is_null(path: Path) -> None:
    """JSON has no infinity."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "sinks":
            tensor.CopyFrom(numpy_helper.from_array(np.full(2, np.nan, np.float32), "sinks"))
    assert not verify(model, call=CALL, seed=0, record=True).agrees
    (entry,) = (entry for entry in model.metadata_props if ".verdict" in entry.key)
    assert json.loads(entry.value, parse_constant=pytest.fail)["error"] is None
    assert "error infinite" in recorded(model, call=CALL)


def test_a_file_that_cannot_be_written_costs_no_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"^verify: `model` must be writable, with its folder"):
        verify(path, record=True, watch=lambda *_: pytest.fail("a run"))


def test_the_newest_takes_the_place_of_others(path: Path) -> None:
    for seed in (1, 2):
        verify(path, seed=seed, record=True)
        assert [verdict["seed"] for verdict in verdicts(onnx.load(path))] == [seed]


def changed_number(name: str, model: onnx.ModelProto) -> None:
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] += 1
    tensor.CopyFrom(numpy_helper.from_array(array, name))


EDITS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "a node": lambda model: setattr(model.graph.node[-1], "name", "other"),
    "the order": lambda model: model.graph.node.sort(key=lambda node: node.op_type),
    "an output": lambda model: model.graph.output[0].type.tensor_type.shape.dim[0].Clear(),
    "the opset": lambda model: setattr(model.opset_import[0], "version", 19),
    "a small array": lambda model: changed_number("sinks", model),
    "a large array": lambda model: changed_number("bias", model),
}
NO_EDITS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "nothing": lambda model: None,
    "another entry": lambda model: model.metadata_props.add(key="author", value="me"),
}


@pytest.mark.parametrize("name", [*EDITS, *NO_EDITS])
def test_an_edit_makes_it_stale(path: Path, name: str) -> None:
    verify(path, seed=0, record=True)
    model = onnx.load(path)
    (EDITS | NO_EDITS)[name](model)
    onnx.save(model, path)
    stated = recorded(path, call=CALL)
    assert (stated == STALE) is (name in EDITS), stated


def test_it_is_never_trusted(path: Path) -> None:
    """Anyone can write it, also for a wrong graph."""
    model = onnx.load(path)
    verify(model, seed=0, record=True)
    (verdict,) = verdicts(model)
    assert verdict["agrees"]
    changed_number("bias", model)
    report = verify(model, call=CALL, seed=0, record=True)
    assert not report.agrees
    assert STALE in report.notes
    (verdict,) = verdicts(model)
    assert (verdict["agrees"], verdict["call_from_metadata"]) == (False, False)
    entry = model.metadata_props[-1]
    entry.value = json.dumps(verdict | {"agrees": True})
    report = verify(model, call=CALL, seed=0)
    assert not report.agrees
    assert any(note.endswith(", for a call that was passed") for note in report.notes)


def read_as_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


OBJECTS = ["{}", '{"graph": []}', '{"runs": "' + "9" * 10**6 + '"}']


@pytest.mark.parametrize(
    ("text", "is_fresh"),
    [*((text, False) for text in ("", "[]", "{", "[" * 10**5, *OBJECTS)), *((text, True) for text in OBJECTS)],
)
def test_any_text_may_be_there(path: Path, text: str, is_fresh: bool) -> None:
    model = onnx.load(path)
    verify(model, seed=0, record=True)
    (verdict,) = verdicts(model)
    if is_fresh:
        fresh = {"graph": verdict["graph"], "engine": {"{runs}": [1]}, "error": None}
        text = json.dumps(json.loads(text) | fresh)
    model.metadata_props[-1].value = text
    stated = recorded(model)
    if not isinstance(read_as_json(text), dict) or text == "{}":
        assert stated == "the verdict in the metadata cannot be read"
    else:
        assert stated == STALE or stated.startswith("the verdict in the metadata: DISAGREES on ")
    assert len(stated) < 400


@pytest.mark.parametrize("is_causal", [True, False])
def test_verified_models_can_be_merged(is_causal: bool) -> None:
    """Also two that are equal, whose verdicts differ; then no verdict is one of the whole."""
    models = [export_attention(FIXED, FIXED, FIXED, is_causal=causal) for causal in (True, is_causal)]
    for seed, model in enumerate(models):
        verify(model, seed=seed, record=True)
    first, second = (compose.add_prefix(model, f"{name}_") for name, model in zip("ab", models, strict=True))
    merged = compose.merge_models(first, second, io_map=[("a_output", "b_query")])
    assert len(verdicts(merged)) == 2
    assert recorded_verdict(merged) == STALE


def test_a_failure_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        verify(path, seed=0, record=True)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


def test_a_file_that_changes_meanwhile_is_not_written(path: Path) -> None:
    other = export_attention(X, X, X)

    def watch(*_: object) -> None:
        save(other, path, overwrite=True)

    with pytest.raises(ValueError, match=r"^verify: `model` must not change while it is verified; its verd"):
        verify(path, seed=0, record=True, watch=watch)
    assert onnx.load(path) == other


def test_the_command_records_too(path: Path, tmp_path: Path) -> None:
    code, out, _ = run("verify", path, "--record")
    assert (code, f"recorded the verdict in {path}" in out) == (0, True)
    assert "the verdict in the metadata: agrees" in run("verify", path)[1]
    assert any("agrees" in note for note in json.loads(run("verify", path, "--json")[1])["notes"])

    def layer(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x)

    model, golden = tmp_path / "layer.onnx", tmp_path / "layer.npz"
    save(to_onnx(layer, X), model)
    verify_layer(model, layer, golden=golden)
    for _ in range(2):  # the golden file is of this model, whatever its metadata say
        assert run("verify", model, "--golden", golden, "--record")[0] == 0
    assert "call_from_metadata" not in verdicts(onnx.load(model))[0]
    assert any("the verdict in the metadata: agrees" in note for note in verify_layer(model, layer).notes)
