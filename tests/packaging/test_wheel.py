"""The wheel holds the two packages and nothing else, and works in an environment with nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, for the slow test too, which runs before."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_wheel_holds_the_two_packages(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sdpa_xp", "sdpa_xp_export"}
    sources = {
        path.relative_to(base).as_posix()
        for base, package in ((ROOT, "sdpa_xp"), (ROOT / "export", "sdpa_xp_export"))
        for path in (base / package).rglob("*")
        if path.suffix in (".py", ".cjs", ".html", ".json", ".toml") or path.name == "py.typed"
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_tests_and_docs(built: Path) -> None:
    """All that git has, but for the settings of the place where it is kept."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    kept = {name for name in listed.splitlines() if not name.startswith((".github/", ".pre-commit"))}
    assert kept - files == set()
    assert files - {"PKG-INFO"} - set(listed.splitlines()) == set()


def test_core_dependencies_are_three(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in archive.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert sorted(name.split(">")[0] for name in required) == ["array-api-compat", "numpy", "threadpoolctl"]


@pytest.mark.slow
def test_installed_alone_it_works(built: Path, tmp_path: Path) -> None:
    """With its dependencies and nothing else: attention on NumPy, and a hint where an extra is missing."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "v")
    python = tmp_path / "v" / "bin" / "python"
    pins = (ROOT / "requirements" / "all.txt").read_text().splitlines()
    versions = tmp_path / "versions.txt"  # without hashes, which a wheel that was built here has not
    versions.write_text("\n".join(line.rstrip(" \\") for line in pins if re.match(r"[a-z0-9-]+==", line)))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "-c", versions, wheel]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        "import numpy, sdpa_xp; x = numpy.eye(2);"
        "print(sdpa_xp.scaled_dot_product_attention(x, x, x, is_causal=True)[0])"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[1. 0.]"
    command = subprocess.run([python.parent / "sdpa-xp"], check=False, capture_output=True, text=True)
    assert command.returncode == 2
    start = "sdpa-xp: No module named 'typer'. In the source folder of sdpa_xp, run: "
    assert command.stderr == start + "pip install '.[cli,export]'\n"
