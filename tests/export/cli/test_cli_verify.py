"""`sdpa-xp verify`: the table, JSON and the page, and what makes it fail."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from command import printed, refused, run

from sdpa_xp_export import verify
from sdpa_xp_export.report import Placement

FIXED = ["--query", "float32[2,8,5,64]", "--key", "float32[2,2,9,64]"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is right."""
    path = tmp_path / "a.onnx"
    mask = ["--attn-mask", "bool[2,1,1,9]", "--is-causal"]
    run("export", *FIXED, *mask, "--form", "attention", "-o", path)
    return path


@pytest.fixture
def wrong(model: Path) -> Path:
    """The same with another scale than it states."""
    loaded = onnx.load(model)
    scales = [
        node_attribute
        for node in loaded.graph.node
        for node_attribute in node.attribute
        if node_attribute.name == "scale"
    ]
    for scale in scales:
        scale.f = 2.0
    assert scales
    onnx.save(loaded, model)
    return model


@pytest.fixture
def fallen_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where CUDA has no kernel for a node."""

    def elsewhere(*arguments: Any, **keywords: Any) -> Any:
        report = verify(*arguments, **keywords)
        placed = Placement("shape_of_it", "Shape", "CPUExecutionProvider", "CUDAExecutionProvider")
        return replace(report, placements=(*report.placements, placed))

    monkeypatch.setattr("sdpa_xp_export.cli.verify.verify", elsewhere)


def test_verdict(model: Path) -> None:
    out = printed("verify", model)
    verdict, closest, error, *special, rows, call, nodes, seed = out.splitlines()
    assert verdict == f"attention: agrees in 22 runs on onnxruntime {onnxruntime.__version__}"
    assert closest.startswith("closest to its bound: output of query[2,8,5,64] key[2,2,9,64]")
    assert re.fullmatch(r"  on CPUExecutionProvider, error \S+, bound \S+", error)
    assert [line.split(":")[0] for line in special[:1]] in ([], ["with special inputs"])
    assert rows == "rows compared: 1,760 of 1,760"
    assert call == "the call was read from the metadata"
    assert nodes.endswith("all on CPUExecutionProvider")
    assert "math mode" not in out
    assert seed == "seed: 0 (--seed 0 repeats these runs)"
    assert max(map(len, out.splitlines())) < 80


def test_says_why_only_a_part_of_the_rows_was_compared(tmp_path: Path) -> None:
    path = tmp_path / "long.onnx"
    run("export", "--query", "float32[1,4,1031,8]", "-o", path)
    _, out, _ = run("verify", path)
    assert re.search(r"^rows compared: [\d,]+ of \S+ \(a sample of .*; --thorough compares more\)$", out, re.M)


def test_table_of_runs(model: Path) -> None:
    """Without the columns that are the same in each run."""
    out = printed("verify", model, "--runs")
    lines = [line.split() for line in out.splitlines()]
    assert ["lengths", "error", "bound", "agrees", "rows", "ms", "peak", "MB"] in lines
    ordinary = [line for line in lines if line[:1] == ["query[2,8,5,64]"] and line[1][-1] == "]"]
    assert len(ordinary) == 3
    assert all(line[4:8] == ["yes", "80", "of", "80"] for line in ordinary)
    assert "attention: agrees in 22 runs" in out


def test_a_call_in_a_file(model: Path) -> None:
    """The form in it is no part of the call."""
    text = 'query = "float32[2,8,5,64]"\nkey = "float32[2,2,9,64]"\nattn_mask = "bool[2,1,1,9]"\n'
    stated = model.with_name("call.toml")
    stated.write_text(text + 'is_causal = true\nform = "tiled"\n')
    out = printed("verify", model, "--call", stated)
    assert "the call was read from the file of --call" in out
    stated.write_text(text)
    assert run("verify", model, "--call", stated)[0] == 1


def test_thorough(tmp_path: Path) -> None:
    path, spec = tmp_path / "a.onnx", "float32[1,1,2,4]"
    run("export", "--query", spec, "--key", spec, "-o", path)
    out = printed("verify", path, "--thorough")
    assert "agrees in" in out


def test_json(model: Path) -> None:
    out = printed("verify", model, "--json", "--require-provider", "cpu")
    report = json.loads(out)
    assert report["holds"] is report["agrees"] is True
    assert report["failures"] == []
    assert report["form"] == "attention"
    assert report["call"]["attn_mask"] == "bool[2,1,1,9]"
    assert {placement["op"] for placement in report["placements"]} >= {"Attention"}
    assert all(0 <= x["agreement"]["absolute"] <= x["agreement"]["bound"] for x in report["runs"])
    assert {one_run["output"] for one_run in report["runs"]} == {"output"}


@pytest.mark.parametrize("flag", ["--provider", "--require-provider"])
def test_a_provider_by_the_name_that_onnxruntime_has(model: Path, flag: str) -> None:
    out = printed("verify", model, flag, "CPUExecutionProvider")
    assert "on CPUExecutionProvider" in out
    assert run("verify", model, "--provider", "cpu", flag, "CPUExecutionProvider")[0] == 0


def test_seed(model: Path) -> None:
    def errors(seed: int) -> list[float]:
        _, out, _ = run("verify", model, "--json", "--seed", seed)
        return [one_run["agreement"]["absolute"] for one_run in json.loads(out)["runs"]]

    assert errors(0) == errors(0) != errors(1)


@pytest.mark.parametrize("how", ["table", "json", "html"])
def test_exits_1_on_a_wrong_model(wrong: Path, how: str) -> None:
    page = wrong.with_name("report.html")
    ways: dict[str, list[Any]] = {"table": [], "json": ["--json"], "html": ["--html", page]}
    code, out, err = run("verify", wrong, *ways[how])
    assert (code, err) == (1, "")
    if how == "json":
        report = json.loads(out)
        assert report["holds"] is report["agrees"] is False
        assert report["failures"][0].startswith(
            "output of query[2,8,5,64] key[2,2,9,64] on CPUExecutionProvider: error"
        )
        return
    assert "attention: DISAGREES in 22 runs" in out
    assert "furthest beyond its bound: output of query[2,8,5,64] key[2,2,9,64]" in out
    assert "FAILS: output of query[2,8,5,64] key[2,2,9,64] on CPUExecutionProvider: error" in out
    assert out.count("FAILS") == 5
    assert "and 11 more; --runs shows all" in out
    assert run("verify", wrong, "--runs")[1].count("FAILS") == 16
    if how == "html":
        assert ">DISAGREES</span>" in page.read_text()


@pytest.mark.usefixtures("fallen_back")
def test_a_node_that_fell_back(model: Path) -> None:
    """It is shown, and fails where a provider is required."""
    out = printed("verify", model)
    assert "fell back: shape_of_it" in out
    code, out, _ = run("verify", model, "--require-provider", "cpu")
    named = "node shape_of_it (Shape) ran on CPUExecutionProvider, not on CUDAExecutionProvider"
    assert code == 1
    assert f"FAILS: {named}" in out
    code, out, _ = run("verify", model, "--require-provider", "cpu", "--json")
    assert code == 1
    assert json.loads(out)["failures"] == [named]
    assert json.loads(out)["agrees"] is True


def test_page(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written whole, and over another file only when told to."""
    page = model.with_name("report.html")
    out = printed("verify", model, "--html", page)
    assert out.startswith(f"wrote {page}\nattention: agrees in 22 runs")
    assert "a.onnx" in page.read_text()
    page.write_text("mine")
    with monkeypatch.context() as patch:  # it is refused before the long work
        patch.setattr("sdpa_xp_export.cli.verify.verify", lambda *_, **__: pytest.fail("verified"))
        refused("verify", model, "--html", page)
    assert page.read_text() == "mine"
    assert run("verify", model, "--html", page, "--force")[0] == 0
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(file.name for file in model.parent.iterdir()) == ["a.onnx", "report.html"]


@pytest.mark.usefixtures("fallen_back")
def test_page_and_json(model: Path) -> None:
    """Standard output is JSON alone."""
    page = model.with_name("report.html")
    for required, code, verdict in (
        ([], 0, '<span class="good">agrees</span></h1>'),
        (["--require-provider", "cpu"], 1, '<span class="bad">agrees, but not as required</span></h1>'),
    ):
        ended, out, err = run("verify", model, "--json", "--html", page, "--force", *required)
        assert (ended, err) == (code, "")
        assert json.loads(out)["agrees"] is True
        assert verdict in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--require-provider", "cuda"], "one that onnxruntime offers here"),
        (["--provider", "tpu"], "It may be cpu, cuda, wasm, webgpu."),
        (["--provider", "cuda"], "pip install '.[export-gpu]'"),
    ],
)
def test_providers_that_are_not_offered(
    model: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert words in refused("verify", model, *arguments)
    assert [file.name for file in model.parent.iterdir()] == ["a.onnx"]


def test_json_is_json_when_the_error_is_infinite(model: Path) -> None:
    loaded = onnx.load(model)
    loaded.graph.node.append(onnx.helper.make_node("Log", ["inner"], ["output"]))
    (last,) = (node for node in loaded.graph.node[:-1] if "output" in node.output)
    last.output[:] = ["inner"]
    onnx.save(loaded, model)
    code, out, _ = run("verify", model, "--json")
    assert code == 1
    report = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert report["runs"][0]["agreement"]["absolute"] is None


def test_a_model_cannot_steer_the_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its metadata, or by the name of a node; nor are these names read as markup."""
    loaded = onnx.load(model)
    for entry in loaded.metadata_props:
        if entry.key.startswith("sdpa_xp.form."):
            entry.value = "\x1b[31mred"
    for index, node in enumerate(loaded.graph.node):
        node.name = f'[bold]{index}"\\\x1b[2J\n'
    onnx.save(loaded, model)

    def elsewhere(*arguments: Any, **keywords: Any) -> Any:
        report = verify(*arguments, **keywords)
        placed = Placement("[bold]0\x1b[2J\n", "Shape", "CPUExecutionProvider", "CUDAExecutionProvider")
        return replace(report, placements=(*report.placements, placed))

    monkeypatch.setattr("sdpa_xp_export.cli.verify.verify", elsewhere)
    out = printed("verify", model, "--runs")
    assert "\\x1b[31mred: agrees" in out
    assert "\x1b" not in out
    assert "[bold]0\\x1b[2J\\n" in out
