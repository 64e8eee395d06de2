"""The site serves the licence of each package of npm that its pages load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_site"))


def _installed(folder: Path, packages: dict[str, dict[str, object]]) -> Path:
    """The folder node_modules of packages, each with the files in its entry `files`."""
    lock: dict[str, object] = {"": {}}
    for name, package in packages.items():
        path = folder / "node_modules" / name
        path.mkdir(parents=True)
        for file, content in package.pop("files", {}).items():  # type: ignore[attr-defined]
            (path / file).write_text(content)
        lock[f"node_modules/{name}"] = {"version": "1.0.0", **package}
    (folder / "package-lock.json").write_text(json.dumps({"packages": lock}))
    return folder / "node_modules"


def test_each_package_with_its_licence(tmp_path: Path) -> None:
    import licences

    modules = _installed(
        tmp_path,
        {
            "katex": {"files": {"LICENSE": "Copyright Khan", "README.md": "no licence"}},
            "@scope/inner": {"files": {"license.md": "Copyright A", "NOTICE": "Notice of A"}},
            "small": {"license": "ISC"},
            "checker": {"dev": True, "files": {"LICENSE": "Copyright B"}},
        },
    )
    assert dict(licences._of_npm(modules)) == {
        "katex 1.0.0": "Copyright Khan",
        "@scope/inner 1.0.0": "Notice of A\n\nCopyright A",
        "small 1.0.0": "License: ISC, as its package.json states.",
    }


def test_a_package_without_a_licence_stops_the_build(tmp_path: Path) -> None:
    import licences

    with pytest.raises(KeyError, match="license"):
        dict(licences._of_npm(_installed(tmp_path, {"unknown": {}})))


def test_licences_of_installed_packages() -> None:
    import licences

    assert "Permission is hereby granted" in licences._of_distribution(*licences.OF_ONNXRUNTIME)
    assert "Apache License" in licences._of_distribution("packaging", ("LICENSE.APACHE",))
