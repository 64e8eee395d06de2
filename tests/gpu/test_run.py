"""The one run of all that needs a GPU: a step that hangs or fails costs no other its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("gpu_run", Path(__file__).with_name("run.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(script: ModuleType, folder: Path, codes: dict[str, str], seconds: float = 600) -> tuple[int, Any]:
    """What is written of steps that may take a minute, or those called "hangs" 5 s, on a busy machine too."""
    limits = {name: 5 if name == "hangs" else 60 for name in codes}
    chosen = {name: script.Step([sys.executable, "-c", code], limits[name]) for name, code in codes.items()}
    code = script.run(chosen, folder / "results.json", folder, seconds)
    return code, json.loads((folder / "results.json").read_text())


def test_one_that_hangs_is_ended_and_the_rest_runs(script: ModuleType, tmp_path: Path) -> None:
    hangs = "import time; print('begun', flush=True); time.sleep(600)"
    code, report = results(script, tmp_path, {"hangs": hangs, "next": "print('done')"})
    assert code == 1
    assert report["steps"]["hangs"]["ended"] == "ended after 5 s"
    assert report["steps"]["hangs"]["said"] == "begun"
    assert report["steps"]["next"]["ended"] == "exit code 0"
    assert report["torch"]


def test_the_exit_code_is_of_all_steps(script: ModuleType, tmp_path: Path) -> None:
    assert results(script, tmp_path, {"fine": "", "agreement": "print('[1]')"})[0] == 0
    assert json.loads((tmp_path / "results.json").read_text())["agreement"] == [1]
    assert results(script, tmp_path, {"fails": "raise SystemExit(3)", "fine": ""})[0] == 1


def test_without_time_no_step_begins(script: ModuleType, tmp_path: Path) -> None:
    code, report = results(script, tmp_path, {"late": "print('begun')"}, seconds=0)
    assert code == 1
    assert report["steps"]["late"]["ended"] == "no time was left"
    assert report["steps"]["late"]["said"] == ""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_packages_of_this_checkout_are_run(script: ModuleType, tmp_path: Path, device: str) -> None:
    steps = script.steps(device, False, tmp_path)
    assert {script.TABLE, script.AGREEMENT} <= set(steps)
    assert sum(name.startswith("core tests") for name in steps) == 2
    first, second, *_ = script.SETTINGS["PYTHONPATH"].split(":")
    assert (Path(first, "sdpa_xp").is_dir(), Path(second, "sdpa_xp_export").is_dir()) == (True, True)
