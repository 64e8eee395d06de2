"""What `make` installs: pinned by hashes, and for `make test-lowest` the lower bound of each range."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
TESTED_AT_THE_LOWEST = ("test-fast", "export", "cli", "plot", "demo", "jax", "mlx", "dask", "cubed")


def _bounds() -> dict[str, str]:
    """Each dependency that `make test-lowest` installs, with the lower bound of its range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in TESTED_AT_THE_LOWEST]
    requirements = [Requirement(text) for extra in (project["dependencies"], *extras) for text in extra]
    return {
        requirement.name.replace("_", "-"): spec.version
        for requirement in requirements
        for spec in requirement.specifier
        if spec.operator == ">="
    }


@pytest.mark.parametrize(("name", "bound"), _bounds().items())
def test_the_lower_bounds_are_what_is_tested(name: str, bound: str) -> None:
    lowest = (ROOT / "requirements/lowest.txt").read_text()
    pinned = [version for package, version in PIN.findall(lowest) if package == name]
    padded = {".".join([*bound.split("."), "0", "0"][:length]) for length in range(len(bound.split(".")), 4)}
    assert set(pinned[:1]) & padded, f"{name}>={bound}, but the lowest that fits all others is {pinned}"


def test_all_but_torch_is_installed_by_its_hash() -> None:
    lines = re.sub(r"\\\n\s*", "", MAKEFILE).splitlines()
    installs = [line for line in lines if re.search(r"pip (install|download)|\$\((PIP|PINNED)\)", line)]
    unpinned = [line for line in installs if "--require-hashes" not in line and "$(PINNED)/" not in line]
    assert [line.partition("=")[0].strip() for line in unpinned[:1]] == ["PIP"]
    assert [line.strip() for line in unpinned[1:] if "$(TORCH)" not in line] == [
        "THE_PACKAGE = $(PIP) --no-deps --no-build-isolation --editable ."
    ]


def test_each_file_that_is_installed_from_has_hashes() -> None:
    files = sorted((ROOT / "requirements").rglob("*.txt"))
    assert len(files) > 9
    for path in files:
        if path.name != "without-torch.txt":  # an override, from which nothing is installed
            text = path.read_text()
            pins = PIN.findall(text)
            hashed = re.findall(r"^([\w.-]+)==[^\n]*\\\n +--hash=", text, re.MULTILINE)
            assert hashed
            assert hashed == [name for name, _ in pins]
    releases = re.findall(r"^(?:REDUCED|RELEASES) := (.*)$", MAKEFILE, re.MULTILINE)
    assert {release for line in releases for release in line.split()} == {
        path.stem for path in (ROOT / "requirements/onnxruntime").iterdir()
    }
