"""A report says which onnxruntime ran a model, and whether it is older than the model's, or untried."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from command import printed, run
from internals import NEWEST_TRIED, newer_note, nodes_of_profile

from sdpa_xp_export import TensorSpec, export_attention, save, to_onnx, verify, verify_layer

QKV = TensorSpec("float32", (1, 2, 5, 8))
OLDER = "onnxruntime 1.23.2 is older than the file's onnxruntime>=1.28;cpu: results are not promised"

NEWER = f"onnxruntime 1.40.0 is newer than {NEWEST_TRIED}, the newest release that was tried"


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.23.2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(export_attention(QKV, QKV, QKV), tmp_path / "a.onnx")


def break_model(path: Path) -> None:
    """Let the file ask for an operator that no runtime has."""
    broken = onnx.load(path)
    broken.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(broken, path)


def test_the_first_line_names_the_release(model: Path) -> None:
    import onnxruntime

    report = verify(model)
    assert f"runs on onnxruntime {onnxruntime.__version__} (" in str(report)
    assert report.notes == ()
    first = run("verify", model)[1].splitlines()[0]
    assert first.endswith(f"on onnxruntime {onnxruntime.__version__}")


@pytest.mark.usefixtures("older")
def test_an_older_release(model: Path) -> None:
    report = verify(model)
    assert report.notes == (OLDER,)
    assert OLDER in " ".join(str(report).split())
    assert OLDER.replace(">", "&gt;").replace("'", "&#x27;") in report._repr_html_()
    page = model.with_name("r.html")
    out = printed("verify", model, "--html", page)
    assert OLDER in out.splitlines()
    assert OLDER.replace(">", "&gt;").replace("'", "&#x27;") in page.read_text()
    assert json.loads(run("verify", model, "--json")[1])["notes"] == [OLDER]
    layer = to_onnx(lambda x: x * 2, QKV)
    assert verify_layer(layer, lambda x: x * 2).notes == (OLDER,)


def test_a_release_that_was_not_tried(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.40.0")
    assert verify(model).notes == (NEWER,)
    out = printed("verify", model, "--require-runtime")
    assert NEWER in out.splitlines()
    layer = to_onnx(lambda x: x * 2, QKV)
    assert verify_layer(layer, lambda x: x * 2).notes == (NEWER,)
    break_model(model)
    assert NEWER in run("verify", model)[2]


def test_which_releases_are_newer() -> None:
    """Patch releases are taken to compute the same; a nightly release counts as its release."""
    major, minor = map(int, NEWEST_TRIED.split(".")[:2])
    for tried in (NEWEST_TRIED, f"{major}.{minor}.99", f"{major}.{minor}", f"{major}.{minor - 1}.0", "unknown"):
        assert newer_note(tried) == ""
    for newer in (f"{major}.{minor + 1}.0", f"{major}.{minor + 1}.0.dev20260101", f"{major + 1}.0.0"):
        assert newer_note(newer).startswith(f"onnxruntime {newer} is newer than {NEWEST_TRIED}")


def test_a_report_is_printed_in_lines(model: Path) -> None:
    first, *others = str(verify(model)).splitlines()
    assert ": agrees in " in first
    assert others
    assert max(map(len, (first, *others))) <= 76
    assert all(line.startswith("  ") and line[2] != " " for line in others)
    layer = str(verify_layer(to_onnx(lambda x: x * 2, QKV), lambda x: x * 2)).splitlines()
    assert len(layer) > 1
    assert max(map(len, layer)) <= 76


def test_a_release_that_is_required(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results agree, and the command fails, since the file is not for this release."""
    assert run("verify", model, "--require-runtime")[0] == 0
    monkeypatch.setattr("onnxruntime.__version__", "1.23.2")
    failure = OLDER.partition(": ")[0]
    code, out, _ = run("verify", model, "--require-runtime")
    assert code == 1
    assert {OLDER, f"FAILS: {failure}"} <= {*out.splitlines()}
    assert ": agrees in" in out
    page = model.with_name("r.html")
    code, out, _ = run("verify", model, "--require-runtime", "--json", "--html", page)
    facts = json.loads(out)
    assert (code, facts["failures"], facts["agrees"], facts["holds"]) == (1, [failure], True, False)
    assert facts["runtime"] == "onnxruntime>=1.28;cpu"
    assert "<li>onnxruntime 1.23.2 is older than the file" in page.read_text()


@pytest.mark.parametrize("stated", [None, "onnxruntime"])
def test_a_file_that_is_for_no_release(model: Path, stated: str | None) -> None:
    loaded = onnx.load(model)
    (entry,) = (entry for entry in loaded.metadata_props if entry.key.startswith("sdpa_xp.runtime."))
    entry.value = str(stated)
    if stated is None:
        loaded.metadata_props.remove(entry)
    onnx.save(loaded, model)
    assert verify(model).runtime == ""
    code, out, _ = run("verify", model, "--require-runtime")
    assert code == 1
    assert "FAILS: the file does not state the runtime that it is for" in out


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("name", ["a", "", 'a "b\\', "\x1b\n", '","args" :', "é"])
def test_the_names_of_nodes_in_a_profile(name: str, escaped: bool) -> None:
    """onnxruntime before 1.31 writes them as they are. Each node is named once, by its kernel."""
    written = json.dumps(name, ensure_ascii=False)[1:-1] if escaped else name
    event = '{{"cat" : "{}","name" :"{}","args" : {}}}'.format
    run_on = '{{"op_name" : "Cast","provider" : "{}"}}'.format
    fence = event("Node", "a_fence_before", '{"op_name" : "Cast"}')
    events = ["{}", event("Session", "start", run_on("none")), fence]
    events += [event("Node", f"{written}_kernel_time", run_on("CPU"))] * 2
    events += [event("Node", "b_kernel_time", run_on("CUDA"))]
    expected = [(name, "Cast", "CPU"), ("b", "Cast", "CUDA")]
    assert nodes_of_profile("[\n" + ",\n".join(events) + "]\n") == expected


def test_a_file_for_another_provider() -> None:
    """On the CPU a float16 Attention overflows, and bfloat16 has few kernels."""
    on_cuda = "onnxruntime>=1.28;cuda"
    note = f"the file is for {on_cuda}: results on CPUExecutionProvider are not promised"
    half, wide = TensorSpec("float16", (1, 2, 3, 8)), TensorSpec("bfloat16", (1, 2, 3, 8))
    report = verify(export_attention(half, half, half, form="attention", runtime=on_cuda), provider="cpu")
    assert not report.agrees
    assert report.notes[0] == note
    assert any("overflow in float16" in known for known in report.notes[1:])
    with pytest.raises(ValueError, match=rf"^verify: onnxruntime must load `model`.* {note}\.$"):
        verify(export_attention(wide, wide, wide, form="attention", runtime=on_cuda), provider="cpu")
    layer = to_onnx(lambda x: x * 2, half, runtime=on_cuda)
    assert verify_layer(layer, lambda x: x * 2, provider="cpu").notes == (note,)
    for provider in ("cpu", "wasm"):  # WebAssembly has the CPU's kernels
        model = export_attention(half, half, half, runtime=f"onnxruntime>=1.28;{provider}")
        assert verify(model, provider="cpu").notes == ()


def test_a_model_that_does_not_run_exits_1(model: Path) -> None:
    break_model(model)
    code, out, err = run("verify", model)
    assert (code, out) == (1, "")
    assert err.startswith("sdpa-xp: verify: onnxruntime must load `model`")
    assert "older" not in err


@pytest.mark.usefixtures("older")
def test_the_error_names_the_older_release(model: Path) -> None:
    break_model(model)
    code, _, err = run("verify", model)
    assert code == 1
    assert OLDER in err
