"""The licences of what the site serves of others: npm packages, the theme, and the weights of the encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

ADDRESS = "assets/licences.txt"
NAMES = ("licen[cs]e*", "copying*", "notice*")
"""The names of files with a licence, in small letters."""
OF_ONNXRUNTIME = ("onnxruntime", ("onnxruntime/LICENSE", "onnxruntime/ThirdPartyNotices.txt"))
"""The npm packages of onnxruntime hold no licence. Its wheel does, and it is the same project."""
OF_THE_ENCODER = """all-MiniLM-L6-v2, a model of the sentence-transformers project, under the licence below.
Changed: the site serves the numbers of four layers, of three of them in fewer bits, and vectors that enter the
fourth."""


def text(modules: Path) -> str:
    """Return each licence below the name. `modules` is the folder node_modules, beside its lock file."""
    parts = dict(_of_npm(modules))
    parts["mkdocs-material"] = _of_distribution("mkdocs-material", ("LICENSE",))
    parts["onnxruntime-web, onnxruntime-common"] = _of_distribution(*OF_ONNXRUNTIME)
    parts["all-MiniLM-L6-v2"] = f"{OF_THE_ENCODER}\n\n{_of_distribution('packaging', ('LICENSE.APACHE',))}"
    line = "=" * 80
    return "\n\n".join(f"{line}\n{name}\n{line}\n\n{licence.strip()}" for name, licence in parts.items())


def _of_npm(modules: Path) -> Iterator[tuple[str, str]]:
    """The packages that pages load, and all that these contain: their files are bundles."""
    lock = json.loads((modules.parent / "package-lock.json").read_text(encoding="utf-8"))
    for path, package in lock["packages"].items():
        if not path or package.get("dev") or "/onnxruntime-" in path:
            continue
        folder = modules.parent / path
        files = [file for file in sorted(folder.iterdir()) if any(_is_named(file, name) for name in NAMES)]
        texts = [file.read_text(encoding="utf-8") for file in files]
        if not texts:  # a few small packages only name their licence
            texts = [f"License: {package['license']}, as its package.json states."]
        yield f"{path.rpartition('node_modules/')[2]} {package['version']}", "\n\n".join(texts)


def _is_named(file: Path, name: str) -> bool:
    return file.is_file() and Path(file.name.lower()).match(name)


def _of_distribution(name: str, ends: tuple[str, ...]) -> str:
    """The files of an installed Python package whose paths end so."""
    paths = [str(path) for path in distribution(name).files or ()]
    files = [next(path for path in paths if path.endswith(f"/{end}") or path == end) for end in ends]
    return "\n\n".join(Path(distribution(name).locate_file(file)).read_text(encoding="utf-8") for file in files)
