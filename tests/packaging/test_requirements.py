"""What `make` installs: pinned by hashes, and for `make test-lowest` the lower bound of each range."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import sdpa_xp

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
TESTED_AT_THE_LOWEST = ("test-fast", "export", "cli", "plot", "demo", "jax", "mlx", "dask")


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


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [line.replace(" ", "") for line in recipe["requirements"]["run"][1:]]
    assert stated == project["dependencies"]
    assert recipe["context"]["version"] == sdpa_xp.__version__
    assert recipe["about"]["summary"] == project["description"]
    assert [f"{name} = {place}" for name, place in project["scripts"].items()] == (
        recipe["build"]["python"]["entry_points"]
    )


def test_workflows_name_each_action_by_its_hash() -> None:
    """A tag may be moved to other code; dependabot renews the hashes."""
    used = [
        line.partition("uses:")[2].strip()
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(used) > 15
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action)] == []
