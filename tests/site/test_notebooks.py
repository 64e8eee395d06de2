"""The notebooks of examples/ are pages, cell by cell, and have been executed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import indent
from types import ModuleType
from urllib.parse import unquote

import nbformat
import pytest
from documented import pages

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_site"))

pytestmark = pytest.mark.needs("nbformat")
PAGE = """---
search:
  boost: 2
---

# Title

See [masks](../how-to/masks.md#causal), [the
index](../index.md), [a *site*](https://example.org) and [`KVCache`][sdpa_xp.KVCache];
[the price](#what-does-kvcache-cost) is below.

```console
$ pip install x
```

```python exec="1" session="s" source="above" result="text"
print(1)
```

```python exec="1" session="s"
assert hidden
```

## What does `KVCache` cost?

```python exec="1" idprefix=""
print(table())
```

```python picture="what is seen" session="s"
plot.mask(mask, (6, 6))
```

```python
save(model, "layer.onnx")
```

<!-- skip: next -->

??? example "examples/one_query.py: the program"

    ``` {.python title="examples/one_query.py"}
    --8<-- "examples/one_query.py"
    ```

![A picture](../assets/dashboard.png)
"""


@pytest.fixture
def notebooks() -> ModuleType:
    import notebooks

    return notebooks


def test_blocks_become_cells(notebooks: ModuleType) -> None:
    text, first, heading, table, picture, plain, file = notebooks.notebook("tutorials/page.md", PAGE).cells
    assert [cell.cell_type for cell in (text, first, table, file)] == ["markdown", "code", "markdown", "code"]
    assert heading.source == "## What does `KVCache` cost?"
    assert "make docs" in table.source
    assert [first.source, picture.source] == ["print(1)", "plot.mask(mask, (6, 6))"]
    assert plain.source == 'save(model, "layer.onnx")'
    assert file.source.startswith("%%writefile one_query.py\n")
    assert "import" in file.source
    assert text.source.startswith("# Title")
    assert "$ pip install x" in text.source


def test_links_lead_to_notebooks_and_to_files_of_the_tree(notebooks: ModuleType) -> None:
    text = notebooks.notebook("tutorials/page.md", PAGE).cells[0].source
    assert "See [masks](masks.ipynb#Causal), [the\nindex](../../docs/index.md)" in text
    assert "[a *site*](https://example.org)" in text
    assert "and `KVCache`;\n[the price](#What-does-KVCache-cost%3F) is below." in text


def test_links_of_the_notebooks_lead_to_files_and_headings(notebooks: ModuleType) -> None:
    """Jupyter's address of a section is its heading with hyphens. The name of a file alone leads to its top."""
    for path in notebooks.FOLDER.glob("*.ipynb"):
        links = re.findall(r"\]\(((?!https?:)[^()\s]+)\)", path.read_text())
        assert path.name not in links
        for link in links:
            file, _, section = link.partition("#")
            assert (path.parent / file).exists(), link
            if section and file in ("", *notebooks.PAGES.values()):
                assert unquote(section) in headings_of(path.parent / (file or path.name)), link


def headings_of(path: Path) -> set[str]:
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {heading.replace("`", "").replace(" ", "-") for heading in headings}


def test_every_tutorial_has_a_notebook_of_its_visible_code(notebooks: ModuleType) -> None:
    tutorials = {name for name in pages() if name.startswith("tutorials/")}
    assert tutorials <= notebooks.PAGES.keys()
    for name in notebooks.PAGES:
        page = pages()[name]
        cells = notebooks.notebook(name, page).cells
        assert len({cell.id for cell in cells}) == len(cells)
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for markup in ("```python\n", "--8<--", "???", "<!--", '=== "'):
            assert markup not in prose, name
        for cell in cells:
            has_no_block = cell.cell_type == "markdown" or cell.source.startswith("%%writefile")
            is_of_a_row = cell.source.rpartition("\n")[2].startswith("plot.mask(")
            source = f"{cell.source}\n" if is_of_a_row else f"```python\n{cell.source}\n```"
            in_a_tab = indent(source, "    ", lambda line: bool(line.strip()))
            assert has_no_block or source in _without_options(page) or in_a_tab in page


def test_the_notebooks_are_those_of_the_pages_and_were_executed(notebooks: ModuleType) -> None:
    """If this fails: make notebooks."""
    assert {path.name for path in notebooks.FOLDER.iterdir()} == set(notebooks.PAGES.values())
    for name, file in notebooks.PAGES.items():
        written = nbformat.read(notebooks.FOLDER / file, as_version=4)
        expected = notebooks.notebook(name, pages()[name])
        assert [cell.source for cell in written.cells] == [cell.source for cell in expected.cells], file
        ran = [cell.execution_count for cell in written.cells if cell.cell_type == "code"]
        assert ran == list(range(1, len(ran) + 1))
        assert any(cell.get("outputs") for cell in written.cells)


def test_a_page_leads_to_its_notebook(notebooks: ModuleType) -> None:
    linked = notebooks.with_link("# One\n\nText\n\n# Two\n", "one.ipynb")
    assert linked.startswith(
        '# One\n\n[Download this page as a notebook](one.ipynb){ download="one.ipynb" }\n\nText'
    )
    assert linked.count("one.ipynb") == 2


def _without_options(page: str) -> str:
    return "\n".join("```python" if line.startswith("```python ") else line for line in page.splitlines())
