"""Pages as notebooks: text becomes text, and Python blocks cells of code.

A forge shows the notebooks in examples/notebooks, which are executed. Write them again: make notebooks
"""

from __future__ import annotations

import os
import re
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from urllib.parse import quote

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
PAGES = {
    f"{page}.md": f"{Path(page).name}.ipynb"
    for page in (
        "tutorials/first-attention-map",
        "tutorials/formula-to-layer",
        "tutorials/decoder-with-a-cache",
        "tutorials/train-in-numpy",
        "tutorials/a-million-keys",
        "how-to/masks",
        "how-to/named-models",
        "how-to/gradients",
        "how-to/long-sequences",
        "how-to/torch-decoder",
        "how-to/export",
        "how-to/export-a-layer",
        "how-to/verify",
        "cheat-sheet",
    )
}
"""Page -> the name of its notebook."""
BLOCK = re.compile(r"^```python(?P<options>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(
    r'^\?\?\? example "[^"]*"\n\n    ```[^\n]*\n    --8<-- "(?P<path>[^"]+)"\n    ```$', re.MULTILINE
)
PART = re.compile(f"{BLOCK.pattern}|{FILE.pattern}", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->|^!\[[^\]]*\]\([^)]*\)$", re.DOTALL | re.MULTILINE)
"""Front matter, comments, and pictures that are files of the site."""
TAB = re.compile(r'^=== "(?P<name>[^"]+)"\n\n(?P<content>(?:(?: {4}.*)?\n)+)', re.MULTILINE)
"""A tab of a page; a notebook shows them one below the other."""
LINK = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?!https?:)(?P<target>[^()\s]+)\)")
PICTURES_AS_PNG = """
import io
import logging

logging.disable(logging.WARNING)  # torch's exporter says what it does not find
formatters = get_ipython().display_formatter.formatters


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


formatters["image/png"].for_type_by_name("sdpa_xp.plot.shown_figure", "ShownFigure", png)
formatters["image/svg+xml"].enabled = False
"""
"""Forges remove the letters of an SVG in a notebook: they stand in it as uses of one drawing."""
REFERENCE = re.compile(r"\[(?P<text>[^\[\]]+)\]\[[\w.]+\]")
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
ONLY_ON_THE_SITE = "*Only the site shows this table, which is made of the files in `results`: `make docs`.*"


def notebook(name: str, page: str) -> NotebookNode:
    """Return the notebook of the page with this name; its links lead to notebooks and to files of the tree."""
    page = TAB.sub(lambda tab: f"**{tab['name']}**\n\n{dedent(tab['content'])}", LEFT_OUT.sub("", page))
    headings = sections(page)
    cells = []
    end = 0
    for part in PART.finditer(page):
        cells += [*_text(page[end : part.start()], name, headings), *_code(part)]
        end = part.end()
    cells += _text(page[end:], name, headings)
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # the same each time
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    document = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(document)
    return document


def sections(page: str) -> dict[str, str]:
    """Return, for each section's address on the site, its address in a notebook: the heading with hyphens."""
    addresses: dict[str, str] = {}
    for heading in HEADING.finditer(FENCED.sub("", page)):
        text = heading["text"].replace("`", "").strip()
        letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        address = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", letters).strip().lower())
        addresses.setdefault(address, quote(text.replace(" ", "-"), safe=""))
    return addresses


def _text(text: str, name: str, headings: dict[str, str]) -> Iterator[NotebookNode]:
    """Yield a cell of text, unless the text is empty. `headings` are the sections of this page."""

    def link(match: re.Match[str]) -> str:
        path, _, section = match["target"].partition("#")
        target = os.path.normpath(Path(name).parent / path) if path else name
        if target in PAGES or target == name:
            known = headings if target == name else sections((ROOT / "docs" / target).read_text())
            file = "" if target == name else PAGES[target]
            return f"[{match['text']}]({file}{f'#{known[section]}' if section else ''})"
        anchor = f"#{section}" if section else ""
        return f"[{match['text']}]({os.path.relpath(ROOT / 'docs' / target, FOLDER)}{anchor})"

    if text.strip():
        yield nbformat.v4.new_markdown_cell(REFERENCE.sub(r"\g<text>", LINK.sub(link, text)).strip())


def _code(part: re.Match[str]) -> Iterator[NotebookNode]:
    """Yield a cell that runs a block or writes a file that the page shows; none for hidden code."""
    if part["path"]:
        source = (ROOT / part["path"]).read_text()
        yield nbformat.v4.new_code_cell(f"%%writefile {Path(part['path']).name}\n{source}".rstrip())
    elif " small" in part["options"]:  # pictures in a row: a cell shows only its last one
        first, _, others = part["code"].rstrip().partition("\n\n")
        for number, line in enumerate(others.splitlines()):
            yield nbformat.v4.new_code_cell(f"{first}\n\n{line}" if number == 0 else line)
    elif "idprefix=" in part["options"]:
        yield nbformat.v4.new_markdown_cell(ONLY_ON_THE_SITE)
    elif 'exec="1"' not in part["options"] or "source=" in part["options"]:
        yield nbformat.v4.new_code_cell(part["code"].rstrip())


def executed(document: NotebookNode) -> NotebookNode:
    """Return the notebook with the outputs of its cells, run in a new folder. A cell that fails raises."""
    from nbclient import NotebookClient

    document.cells.insert(0, nbformat.v4.new_code_cell(PICTURES_AS_PNG))
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(
            document, timeout=300, record_timing=False, coalesce_streams=True, resources=where
        )
        client.extra_arguments = ["--log-level=ERROR"]
        client.execute()
    del document.cells[0]
    for part in (part for cell in document.cells if cell.cell_type == "code" for part in (cell, *cell.outputs)):
        if part.get("execution_count"):
            part.execution_count -= 1
    return nbformat.reads(nbformat.writes(document).replace(f"{folder}/", ""), as_version=4)


def examples(page: str) -> list[Path]:
    """Return the programs that a page includes as a whole."""
    text = (ROOT / "docs" / page).read_text()
    return [ROOT / part["path"] for part in FILE.finditer(text)]


def with_downloads(markdown: str) -> str:
    """Link to each program that a page includes: a reader saves the file and does not read it there."""

    def download(part: re.Match[str]) -> str:
        path = part["path"]
        return f"[Download `{path}`]({Path(path).name}){{ .md-button download }}"

    return FILE.sub(download, markdown)


def with_link(page: str, name: str) -> str:
    """Return a page with a link to its notebook below its title."""
    link = f'[Download this page as a notebook]({name}){{ download="{name}" }}'
    return re.sub(r"^# .+$", lambda title: f"{title[0]}\n\n{link}", page, count=1, flags=re.MULTILINE)


def write() -> None:
    """Execute all notebooks, and write them."""
    FOLDER.mkdir(exist_ok=True)
    for name, file in PAGES.items():
        document = executed(notebook(name, (ROOT / "docs" / name).read_text()))
        nbformat.write(document, FOLDER / file)


if __name__ == "__main__":
    write()
