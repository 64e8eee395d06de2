"""Hooks of the site's build: npm files and their licences, the playground's models, notebooks, search."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
STATE = {"served": False}
"""Whether `mkdocs serve` runs, which builds the site anew after each change."""
PACKAGES = HERE.parents[1] / ".venv" / "site" / "node_modules"
SERVED = {
    "katex": (
        "dist/katex.min.css",
        "dist/katex.min.js",
        "dist/contrib/auto-render.min.js",
        "dist/fonts/*.woff2",
    ),
    "mermaid": ("dist/mermaid.min.js",),
    "onnxruntime-web": (
        "dist/ort.wasm.min.mjs",
        "dist/ort-wasm-simd-threaded.mjs",
        "dist/ort-wasm-simd-threaded.wasm",
        "dist/ort.webgpu.min.mjs",
        "dist/ort-wasm-simd-threaded.asyncify.mjs",
        "dist/ort-wasm-simd-threaded.asyncify.wasm",
    ),
}
"""Package -> its files that pages load."""
MARKS = {
    "mathematics": 'class="arithmatex"',
    "diagrams": 'class="mermaid"',
    "playground": 'id="playground-form"',
}
"""What a page needs -> the attribute in its HTML that shows it."""


def on_startup(command: str, **_: Any) -> None:
    """Note whether the site is built, or served while it is written."""
    STATE["served"] = command == "serve"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the code blocks of pages import this folder, the examples, the tests and what measures.

    Reports on pages have one seed, so that each build shows the same numbers, and as many words.
    """
    root = HERE.parents[1]
    folders = (HERE, root, root / "examples", root / "tests", root / "benchmarks")
    sys.path += [str(path) for path in folders if str(path) not in sys.path]
    import_module("internals").verify_inputs.new_seed = lambda: 0
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Serve files of npm with their licences, models of the playground, and notebooks beside their pages."""
    for package, patterns in SERVED.items():
        for pattern in patterns:
            paths = sorted((PACKAGES / package).glob(pattern))
            if not paths:
                raise PluginError(f"{package}/{pattern} is not installed: `make docs` installs it.")
            for path in paths:
                uri = f"assets/vendor/{package}/{path.relative_to(PACKAGES / package).as_posix()}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    import licences
    import notebooks
    import playground
    import playground_encoder
    import playground_start

    files.append(File.generated(config, licences.ADDRESS, content=licences.text(PACKAGES)))
    models = ((name, model.SerializeToString()) for name, model in playground.models().items())
    for name, content in (*models, *playground_encoder.files(), *playground_start.files()):
        files.append(File.generated(config, f"assets/playground/{name}", content=content))
    for page, name in notebooks.PAGES.items():
        uri = f"{Path(page).parent}/{name}"
        files.append(File.generated(config, uri, abs_src_path=str(notebooks.FOLDER / name)))
        for path in notebooks.examples(page):
            uri = f"{Path(page).parent}/{path.name}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show pictures next to their code, and link to the notebook and the programs of a tutorial."""
    import notebooks
    import pictures

    if page.file.src_uri in notebooks.PAGES:
        markdown = notebooks.with_downloads(markdown)
        markdown = notebooks.with_link(markdown, notebooks.PAGES[page.file.src_uri])
    return pictures.expanded(markdown)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Note in a page's metadata which scripts the template must load; link names to the reference."""
    from linked import linked  # on_config has added its folder to sys.path

    if 'id="exec-' in html:
        raise PluginError(
            f'{page.file.src_uri}: a block that prints headings needs idprefix="", or its anchors change.'
        )
    for need, mark in MARKS.items():
        page.meta[need] = mark in html
    return linked(html)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Add the words that people search for to the index, which the search plugin has written before."""
    import search_words

    search_words.write(Path(config.site_dir))
