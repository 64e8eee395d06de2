"""Tutorials as notebooks, made from their pages: text becomes text, and Python blocks cells of code."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NAMES = ("first-attention-map", "formula-to-layer", "decoder-with-a-cache", "train-in-numpy", "a-million-keys")
PAGES = {f"tutorials/{name}.md": f"{name}.ipynb" for name in NAMES}
"""Page -> the name of its notebook."""
BLOCK = re.compile(r"^```python(?P<options>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(
    r'^\?\?\? example "[^"]*"\n\n    ```[^\n]*\n    --8<-- "(?P<path>[^"]+)"\n    ```$', re.MULTILINE
)
PART = re.compile(f"{BLOCK.pattern}|{FILE.pattern}", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->|^!\[[^\]]*\]\([^)]*\)$", re.DOTALL | re.MULTILINE)
"""Front matter, comments, and pictures that are files of the site."""
LINK = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?!https?:)(?P<target>[^()\s]+)\)")
REFERENCE = re.compile(r"\[(?P<text>[^\[\]]+)\]\[[\w.]+\]")


def notebook(page: str, address: str = "") -> NotebookNode:
    """Return the notebook of a page. With an address, links lead to the site; without, they are plain text."""
    page = LEFT_OUT.sub("", page)
    cells = []
    end = 0
    for part in PART.finditer(page):
        cells += [*_text(page[end : part.start()], address), *_code(part)]
        end = part.end()
    cells += _text(page[end:], address)
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # the same each time
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    document = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(document)
    return document


def _text(text: str, address: str) -> Iterator[NotebookNode]:
    """Yield a cell of text, unless the text is empty."""

    def link(match: re.Match[str]) -> str:
        if not address:
            return match["text"]
        target = re.sub(r"(?:index)?\.md\b", lambda name: "" if name[0] == "index.md" else "/", match["target"])
        return f"[{match['text']}]({urljoin(address, f'../{target}')})"

    if text.strip():
        yield nbformat.v4.new_markdown_cell(REFERENCE.sub(r"\g<text>", LINK.sub(link, text)).strip())


def _code(part: re.Match[str]) -> Iterator[NotebookNode]:
    """Yield a cell that runs a block or writes a file that the page shows. Hidden blocks are left out."""
    if part["path"]:
        source = (ROOT / part["path"]).read_text()
        yield nbformat.v4.new_code_cell(f"%%writefile {Path(part['path']).name}\n{source}".rstrip())
    elif 'exec="1"' not in part["options"] or "source=" in part["options"]:
        yield nbformat.v4.new_code_cell(part["code"].rstrip())


def executed(document: NotebookNode) -> NotebookNode:
    """Return the notebook with the outputs of its cells, run in a new folder. A cell that fails raises."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(
            document, timeout=300, record_timing=False, coalesce_streams=True, resources=where
        )
        client.extra_arguments = ["--log-level=ERROR"]
        return client.execute()


def with_link(page: str, name: str) -> str:
    """Return a page with a link to its notebook below its title."""
    link = f'[Download this page as a notebook]({name}){{ download="{name}" }}'
    return re.sub(r"^# .+$", lambda title: f"{title[0]}\n\n{link}", page, count=1, flags=re.MULTILINE)
