"""`sdpa-xp export`: what it writes from flags and from a file, what it prints, what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import QKV, printed, refused, run
from internals import metadata_of
from short_runs import assert_right

from sdpa_xp_export import verify

CONFIG = """
query = "float32[B,2,L,8]"
key = "float32[B,1,S,8]"
attn_mask = "causal('lower_right') & padding(int64[B])"
scale = 0.25
outputs = ["output", "lse"]
form = "primitive"
output = "from-file.onnx"
"""


def call_of(path: Path) -> dict[str, Any]:
    """The call that a model was written for."""
    metadata = metadata_of(onnx.load(path))
    call: dict[str, Any] = json.loads(metadata["sdpa_xp.call"])
    return call


def test_prints_what_was_chosen_and_why(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    runtime = "onnxruntime>=1.30;cpu"
    out = printed("export", *QKV, "--form", "primitive", "--opset", 18, "--runtime", runtime, "-o", path)
    assert out.splitlines() == [
        f"wrote {path}",
        "form: primitive (asked for)",
        "opset: 18",
        f"runtime: {runtime}",
        f"next: sdpa-xp verify {path}",
    ]
    assert onnx.load(path).opset_import[0].version == 18


@pytest.mark.parametrize(
    ("runtime", "flags"),
    [
        ("onnx", " --engine reference"),
        ("openvino>=2026.4;cpu", " --engine openvino"),
        ("onnxruntime>=1.30;wasm", " --provider wasm"),
        ("onnxruntime>=1.30;webgpu", " --provider webgpu"),
        ("onnxruntime>=1.30;web", " --provider wasm"),
        ("onnxruntime>=1.28;cuda", ""),
    ],
)
def test_the_next_command_verifies_in_the_program_of_a_model(tmp_path: Path, runtime: str, flags: str) -> None:
    _, out, _ = run("export", *QKV, "--runtime", runtime, "-o", tmp_path / "a.onnx")
    assert out.endswith(f"next: sdpa-xp verify {tmp_path / 'a.onnx'}{flags}\n")


def test_keys_are_those_of_self_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--key`. The next command is one that a shell reads as it stands, whatever the file is called."""
    monkeypatch.chdir(tmp_path)
    for name, read in (("a b.onnx", "a b.onnx"), ("-a.onnx", str(tmp_path / "-a.onnx"))):
        out = printed("export", "--query", "float32[B,8,L,64]", f"--output={name}")
        assert shlex.split(out.splitlines()[-1]) == ["next:", "sdpa-xp", "verify", read]
        call = call_of(tmp_path / name)
        assert {call[tokens] for tokens in ("query", "key", "value")} == {"float32[B,8,L,64]"}


def test_the_help_names_shapes() -> None:
    words = " ".join(run("export", "--help")[1].split())
    assert "--sinks <spec> One logit for each query head, dtype[Hq], such as float32[8]." in words
    assert "--past-lengths <spec> The number of tokens in a cache with free space, such as int64[B]." in words


def test_json_for_scripts(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    arguments = ["--attn-mask", "bool[B,1,1,S]", "--outputs", "output,lse", "--form", "primitive", "--json"]
    out = printed("export", *QKV, *arguments, "-o", path)
    facts = json.loads(out)
    graph = onnx.load(path).graph
    assert facts == {
        "path": str(path),
        "form": "primitive",
        "reason": "asked for",
        "opset": onnx.load(path).opset_import[0].version,
        "runtime": "onnxruntime>=1.28;cpu",
        "inputs": {
            "query": "float32[B,8,L,64]",
            "key": "float32[B,2,S,64]",
            "value": "float32[B,2,S,64]",
            "attn_mask": "bool[B,1,1,S]",
        },
        "outputs": {"output": "float32[B,8,L,64]", "lse": "float32[B,8,L]"},
        "nodes": len(graph.node),
    }


def test_the_reason_names_flags(tmp_path: Path) -> None:
    """As the metadata name keywords: here why `auto` passed a form over."""
    runtime = "onnxruntime>=1.23;cpu"
    few = ["--query", "float32[1,1,2,4]", "--key", "float32[1,1,3,4]"]
    out = printed("export", *few, "--runtime", runtime, "-o", tmp_path / "a.onnx")
    assert f"and `--runtime` is {runtime}" in out


FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "spec for a mask": (["--attn-mask", "bool[B,1,1,S]"], {"attn_mask": "bool[B,1,1,S]"}),
    "masks": (
        ["--attn-mask", "causal('lower_right') & padding(int64[B])"],
        {"attn_mask": "(causal(offset='lower_right') & padding(key_lengths=int64[B], query_lengths=None))"},
    ),
    "biases": (["--bias", "alibi(8)"], {"bias": "alibi(slopes=8, offset=0)"}),
    "is_causal": (["--is-causal"], {"is_causal": True}),
    "scale": (["--scale", "-0.5"], {"scale": -0.5}),
    "scale, learned": (["--scale", "float32[8,1,1]"], {"scale": "float32[8,1,1]"}),
    "softcap": (["--softcap", "5"], {"softcap": 5.0}),
    "sinks": (["--sinks", "float32[8]"], {"sinks": "float32[8]"}),
    "softmax_dtype": (["--softmax-dtype", "float64"], {"softmax_dtype": "float64"}),
    "outputs": (["--outputs", "lse, output"], {"outputs": ["lse", "output"]}),
    "value": (["--value", "float32[B,2,S,16]"], {"value": "float32[B,2,S,16]"}),
    "dtype": (["--dtype", "float16"], {"query": "float16[B,8,L,64]", "value": "float16[B,2,S,64]"}),
}


@pytest.mark.parametrize(("flags", "stated"), FLAGS.values(), ids=FLAGS)
def test_flags(tmp_path: Path, flags: list[str], stated: dict[str, Any]) -> None:
    path = tmp_path / "a.onnx"
    printed("export", *QKV, *flags, "-o", path)
    assert call_of(path).items() >= stated.items()
    assert_right(onnx.load(path))


def test_layout_and_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    specs = {
        "query": "float32[B,L,4,8]",
        "key": "float32[B,L,2,8]",
        "past-key": "float32[B,P,2,8]",
        "past-value": "float32[B,P,2,8]",
    }
    flags = [part for name, spec in specs.items() for part in (f"--{name}", spec)]
    printed("export", *flags, "--layout", "...LHE", "--dtype", "float64", "-o", path)
    assert call_of(path)["layout"] == "...LHE"
    assert call_of(path)["past_key"] == "float64[B,P,2,8]"
    assert_right(onnx.load(path))


@pytest.mark.usefixtures("short_verify")
def test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`output` in it is relative to the working directory, as the flag is."""
    (tmp_path / "settings").mkdir()
    config = tmp_path / "settings" / "attention.toml"
    config.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    printed("export", "--config", config)
    path = tmp_path / "from-file.onnx"
    assert call_of(path)["scale"] == 0.25
    assert call_of(path)["outputs"] == ["output", "lse"]
    assert call_of(path)["attn_mask"].startswith("(causal(offset='lower_right') & padding(")
    assert verify(path, provider="cpu").form == "primitive"


def test_flags_override_the_file(tmp_path: Path) -> None:
    config, path = tmp_path / "attention.toml", tmp_path / "flag.onnx"
    config.write_text(CONFIG + "is_causal = true\n")
    flags = ["--no-is-causal", "--scale", "0", "--outputs", "output", "--opset", "19", "-o", path]
    assert run("export", "--config", config, *flags)[0] == 0
    assert call_of(path)["scale"] == 0
    assert call_of(path)["is_causal"] is False
    assert "outputs" not in call_of(path)  # the default
    assert onnx.load(path).opset_import[0].version == 19
    assert sorted(file.name for file in tmp_path.iterdir()) == ["attention.toml", "flag.onnx"]


def test_the_default_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "attention.onnx"
    path.write_text("mine")
    refused("export", *QKV)
    assert path.read_text() == "mine"
    assert run("export", *QKV, "-o", "other.onnx")[0] == 0
    assert run("export", *QKV, "--force")[0] == 0
    assert_right(onnx.load(path))


def test_control_characters_of_a_path_are_spelt_out(tmp_path: Path) -> None:
    out = printed("export", *QKV, "-o", tmp_path / "a\x1b[31m :smile: [b].onnx")
    assert out.startswith(f"wrote {tmp_path}/a\\x1b[31m :smile: [b].onnx\n")


@pytest.mark.parametrize("text", [b"query = ", b"query = '\xff'", b"query = " + b"[" * 100_000])
def test_a_file_that_is_no_toml(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(text)
    assert "must be TOML" in refused("export", "--config", tmp_path / "a.toml")
