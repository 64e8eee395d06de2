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
"""By page, the notebook beside it."""
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
    """The notebook of a page. Links lead to the site if the page has an address; else they are plain text."""
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
    made = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(made)
    return made


def _text(text: str, address: str) -> Iterator[NotebookNode]:
    """A cell of text, if there is any."""

    def link(found: re.Match[str]) -> str:
        if not address:
            return found["text"]
        target = re.sub(r"(?:index)?\.md\b", lambda name: "" if name[0] == "index.md" else "/", found["target"])
        return f"[{found['text']}]({urljoin(address, f'../{target}')})"

    if text.strip():
        yield nbformat.v4.new_markdown_cell(REFERENCE.sub(r"\g<text>", LINK.sub(link, text)).strip())


def _code(part: re.Match[str]) -> Iterator[NotebookNode]:
    """A cell that runs a block or writes a file that the page shows. What the page hides is left out."""
    if part["path"]:
        source = (ROOT / part["path"]).read_text()
        yield nbformat.v4.new_code_cell(f"%%writefile {Path(part['path']).name}\n{source}".rstrip())
    elif 'exec="1"' not in part["options"] or "source=" in part["options"]:
        yield nbformat.v4.new_code_cell(part["code"].rstrip())


def executed(made: NotebookNode) -> NotebookNode:
    """The notebook with what its cells print and draw, run in a folder of its own; a cell that fails raises."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(made, timeout=300, record_timing=False, coalesce_streams=True, resources=where)
        client.extra_arguments = ["--log-level=ERROR"]
        return client.execute()


def with_link(page: str, name: str) -> str:
    """A page with a link to its notebook below its title."""
    link = f'[Download this page as a notebook]({name}){{ download="{name}" }}'
    return re.sub(r"^# .+$", lambda title: f"{title[0]}\n\n{link}", page, count=1, flags=re.MULTILINE)
