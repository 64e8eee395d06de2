"""Bad arguments of the command line: one line, exit code 2, and no file."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import QKV, refused

CONFIGS = {
    "no TOML": ("query = ", "`--config` must be TOML (Invalid value"),
    "an unknown key": ("quary = 'float32[2,4]'", "a key of `--config` must be known; got name='quary'. The nearest is 'query'."),
    "a key far from any": ("zzz = 1", "There are query, key, value"),
    "a flag's name": ("is-causal = true", "The nearest is 'is_causal'."),
    "force": ("force = true", "a key of `--config` must be known; got name='force'"),
    "a number for a spec": ("query = 3", "query in `--config` must be of type str; got setting=3"),
    "a word for a flag": ("is_causal = 'yes'", "is_causal in `--config` must be of type bool; got setting='yes'"),
    "a flag for a number": ("scale = true", "scale in `--config` must be of type int or float or str; got setting=True"),
    "a flag for an opset": ("opset = true", "opset in `--config` must be of type int; got setting=True"),
    "no query": ("key = 'float32[2,4]'", "`--query` must be given; got --key='float32[2,4]'. Write it as --query 'float32[B,8,L,64]', or pass --config with"),
    "no encoding": (b"query = '\xff'", "`--config` must be TOML ('utf-8' codec"),
    "deep": ("query = " + "[" * 100_000, "`--config` must be TOML ("),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), CONFIGS.values(), ids=CONFIGS)
def test_refused_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | bytes, words: str
) -> None:
    config = tmp_path / "attention.toml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in refused(capsys, "export", "--config", config, "-o", tmp_path / "a.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["attention.toml"]


REFUSED: dict[str, tuple[list[str], str]] = {
    "a broken spec": (["--query", "float32[2", "--key", "float32[2,3]"], "export: `--query` must be a spec: a dtype, and its lengths in brackets; got --query='float32[2'. As in"),
    "a length below 0": (["--query", "float32[B,-1]", "--key", "float32[2,3]"], "export: `--query` must be a spec: a length in its shape must be at least 0; got --query='float32[B,-1]'"),
    "a spec's dtype": (["--query", "float3[2,3]", "--key", "float32[2,3]"], "export: `--query` must be a spec: its dtype must be one of"),
    "no folder": ([*QKV, "-o", "no/such/folder/a.onnx"], "export: the folder of `--output` must exist; got --output="),
    "a broken spec alone": (["--key", "float32[2"], "export: `--key` must be a spec: a dtype"),
    "nothing": ([], "export: `--query` must be given. Write it as --query 'float32"),
    "no file": (["--config", "none.toml"], "export: `--config` must be a file; got --config=none.toml. There is no file /"),
    "a misspelt mask": ([*QKV, "--attn-mask", "causl()"], "(no function 'causl', the nearest is 'causal')"),
    "a bare word": ([*QKV, "--attn-mask", "causal"], "as in causal(...)"),
    "a bias for a mask": ([*QKV, "--attn-mask", "alibi(8)"], "no function 'alibi' here, since it is for `--bias`"),
    "scale": ([*QKV, "--scale", "large"], "export: `--scale` must be a number or a spec: a dtype, and its lengths in brackets; got --scale='large'"),
    "dtype": ([*QKV, "--dtype", "float8"], "export: `--dtype` must be one of float16, bfloat16, float32, float64"),
    "a dtype that none is like": ([*QKV, "--dtype", "float8"], "float64; got --dtype='float8'.\n"),
    "a dtype of torch": ([*QKV, "--dtype", "half"], "got --dtype='half'. The nearest is 'float16'."),
    "dtype of integers": (["--query", "int64[2,3]", "--key", "int64[2,3]", "--dtype", "float32"], "`--query` must have a floating dtype; got --query.dtype=int64"),
    "a form that cannot state the call": ([*QKV, "--form", "multi_head", "--is-causal"], "export: `--form` cannot be 'multi_head'"),
    "the form that can": ([*QKV, "--form", "multi_head", "--is-causal"], "`--form='auto'` chooses '"),
    "a release": ([*QKV, "--form", "attention", "--runtime", "onnxruntime>=1.23;cpu"], "and `--runtime` is onnxruntime>=1.23;cpu"),
    "form": ([*QKV, "--form", "fancy"], "`--form` must be auto, "),
    "a misspelt form": ([*QKV, "--form", "tile"], "The nearest is 'tiled'."),
    "opset, a word": ([*QKV, "--opset", "new"], "export: `--opset` must be an integer; got --opset='new'."),
    "softcap, a word": ([*QKV, "--softcap", "x"], "export: `--softcap` must be a number; got --softcap='x'."),
    "an unknown flag": ([*QKV, "--fom", "auto"], "No such option: --fom (Possible options: --force, --form). See sdpa-xp export --help."),
    "a second word": ([*QKV, "more"], "unexpected extra argument"),
    "two lines": ([*QKV, "--attn-mask", "no\nsuch\x1b[31m"], r"got --attn-mask='no\nsuch\x1b[31m'"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "export", *arguments)
    assert list(tmp_path.iterdir()) == []
