"""The command line, as a user runs it: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdpa_xp_export import TensorSpec, agree, backends, demo, verify
from sdpa_xp_export.cli import main

SPECS = ["--query", "float32[B,8,L,64]", "--key", "float32[B,2,S,64]"]


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sdpa-xp", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
    printed = capsys.readouterr()
    return int(exited.value.code or 0), printed.out, printed.err


def test_export_then_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    code, out, _ = run(capsys, "export", *SPECS, "--attn-mask", "bool[B,1,1,S]", "--is-causal", "-o", path)
    assert code == 0
    assert "attention, opset 23 (the first form that is right here)" in out
    assert [value.name for value in onnx.load(path).graph.input] == ["query", "key", "value", "attn_mask"]

    code, out, _ = run(capsys, "verify", path)
    assert code == 0
    assert "CPUExecutionProvider" in out
    assert "attention: agrees in 6 runs" in out

    code, out, _ = run(capsys, "verify", path, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["agrees"] is True
    assert {placed["op"] for placed in report["placements"]} >= {"Attention"}


def test_verify_exits_1_on_a_wrong_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    run(capsys, "export", *SPECS, "-o", path)
    model = onnx.load(path)
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "scale":
            attribute.f = 2.0
    onnx.save(model, path)
    code, out, _ = run(capsys, "verify", path)
    assert code == 1
    assert "DISAGREES" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "--query", "float32[2", "--key", "float32[2,3]"], "TensorSpec: a spec is written"),
        (["export", *SPECS, "--softcap", "-1"], "export_attention: `softcap` must be positive"),
        (["export", *SPECS, "-o", "no/such/folder/a.onnx"], "save: the folder of `path` must exist"),
        (["export", "--query", "float32[2,3]"], "Missing option '--key'"),
        (["verify", "none.onnx"], "verify: `model` must be a file; got model=none.onnx"),
        (["verify", __file__], "`model` must be an ONNX model"),
        (["agree", "--backend", "tensorflow"], "`backends` must be among numpy"),
        (["agree", "--dtype", "int8", "--backend", "numpy"], "`dtype` must be one of"),
    ],
)
def test_bad_arguments_exit_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Any,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_export_does_not_overwrite(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("mine")
    code, _, err = run(capsys, "export", *SPECS, "-o", path)
    assert code == 2
    assert "--force" in err
    assert path.read_text() == "mine"
    assert run(capsys, "export", *SPECS, "-o", path, "--force")[0] == 0
    assert verify(path).agrees


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "backends", "--json")
    found = {(row["name"], row["device"]) for row in json.loads(out)}
    assert code == 0
    assert {("numpy", "cpu"), ("torch", "cpu"), ("onnxruntime", "CPUExecutionProvider")} <= found
    assert np.__version__ in run(capsys, "backends")[1]


def test_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "agree", "--backend", "numpy", "--backend", "torch", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {(row["backend"], row["implementation"]) for row in rows} == {
        ("numpy", "xp"),
        ("torch", "xp"),
        ("onnxruntime", "attention"),
        ("onnxruntime", "primitive"),
    }
    assert {row["dtype"] for row in rows} == {"float16", "float32", "float64"}
    assert all(row["agrees"] for row in rows)


def test_agree_exits_1_and_names_what_disagrees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdpa_xp.masks.bands.Band.on", lambda *_: True)
    code, out, _ = run(capsys, "agree", "--backend", "numpy", "--dtype", "float32")
    assert code == 1
    assert "DISAGREES: numpy xp float32 cpu: is_causal, all of it" in out


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find", lambda: backends.find(["numpy", "torch", "array-api-strict"]))
    code, out, _ = run(capsys, "demo", "-o", tmp_path / "out")
    assert code == 0
    assert "[CLS] it took one minute . [SEP] [PAD]" in out
    for name in ("numpy", "torch", "array-api-strict", "onnxruntime"):
        assert name in out
    assert (tmp_path / "out" / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert verify(tmp_path / "out" / "attention.onnx").agrees


def test_demo_exits_1_when_a_backend_disagrees(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = agree.sdpa_xp.scaled_dot_product_attention
    monkeypatch.setattr(demo, "find", lambda: backends.find(["numpy"]))
    monkeypatch.setattr(
        agree.sdpa_xp, "scaled_dot_product_attention", lambda *a, **k: wrong(*a, **k | {"attn_mask": None})
    )
    code, out, _ = run(capsys, "demo", "-o", tmp_path)
    assert code == 1
    assert "DISAGREES: numpy xp float32 cpu: layer 1, layer 2" in out


def test_console_script_without_the_extras() -> None:
    """Without typer it names the extra, and does not show a traceback."""
    script = "import sys; sys.modules['typer'] = None; import sdpa_xp_export.cli"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'sdpa_xp[cli,export]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_encoder_attends_to_no_padding() -> None:
    encoded = demo.encode()
    assert encoded.mask.shape == (2, 1, 1, 8)
    assert [layer.query.shape for layer in encoded.layers] == [(2, 12, 8, 32)] * 6
    assert TensorSpec("float32", encoded.layers[0].query.shape).shape == (2, 12, 8, 32)
    longer = demo.activations(demo.SENTENCES, multiple=16)
    for short, long in zip(encoded.layers, longer.layers, strict=True):
        np.testing.assert_allclose(short.query[:, :, :7], long.query[:, :, :7], rtol=0, atol=1e-5)


def test_demo_does_not_overwrite(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "attention.onnx").write_text("mine")
    code, _, err = run(capsys, "demo", "-o", tmp_path)
    assert code == 2
    assert "--force" in err
    assert (tmp_path / "attention.onnx").read_text() == "mine"


def test_help_shows_how_a_spec_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert "dtype[length,...]" in run(capsys, "export", "--help")[1]


def test_json_is_json_when_the_error_is_infinite(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    run(capsys, "export", *SPECS, "-o", path)
    model = onnx.load(path)
    model.graph.node.append(onnx.helper.make_node("Log", ["inner"], ["output"]))
    model.graph.node[0].output[0] = "inner"
    onnx.save(model, path)
    code, out, _ = run(capsys, "verify", path, "--json")
    assert code == 1
    report = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert report["runs"][0]["agreement"]["absolute"] is None
