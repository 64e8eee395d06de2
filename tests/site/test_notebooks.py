"""The notebooks are the pages of the tutorials, cell by cell. The build of the site runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

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
index](../index.md), [a *site*](https://example.org) and [`KVCache`][sdpa_xp.KVCache].

```console
$ pip install x
```

```python exec="1" session="s" source="above" result="text"
print(1)
```

```python exec="1" session="s"
assert hidden
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
    text, first, picture, plain, file = notebooks.notebook(PAGE).cells
    assert [cell.cell_type for cell in (text, first, file)] == ["markdown", "code", "code"]
    assert [first.source, picture.source] == ["print(1)", "plot.mask(mask, (6, 6))"]
    assert plain.source == 'save(model, "layer.onnx")'
    assert file.source.startswith("%%writefile one_query.py\n")
    assert "import" in file.source
    assert text.source.startswith("# Title")
    assert "$ pip install x" in text.source


def test_links_lead_to_the_site_if_it_has_an_address(notebooks: ModuleType) -> None:
    plain = notebooks.notebook(PAGE).cells[0].source
    assert "See masks, the\nindex, [a *site*](https://example.org) and `KVCache`." in plain
    linked = notebooks.notebook(PAGE, "https://x.org/docs/tutorials/page/").cells[0].source
    assert "[masks](https://x.org/docs/how-to/masks/#causal)" in linked
    assert "[the\nindex](https://x.org/docs/)" in linked


def test_every_tutorial_has_a_notebook_of_its_visible_code(notebooks: ModuleType) -> None:
    tutorials = {name: text for name, text in pages().items() if name.startswith("tutorials/")}
    assert notebooks.PAGES.keys() == tutorials.keys() - {"tutorials/index.md"}
    for name in notebooks.PAGES:
        cells = notebooks.notebook(tutorials[name]).cells
        assert len({cell.id for cell in cells}) == len(cells)
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for markup in ("```python", "--8<--", "???", "<!--", "](../"):
            assert markup not in prose, name
        for cell in cells:
            has_no_block = cell.cell_type == "markdown" or cell.source.startswith("%%writefile")
            assert has_no_block or f"```python\n{cell.source}\n```" in _without_options(tutorials[name])


def test_a_page_leads_to_its_notebook(notebooks: ModuleType) -> None:
    linked = notebooks.with_link("# One\n\nText\n\n# Two\n", "one.ipynb")
    assert linked.startswith(
        '# One\n\n[Download this page as a notebook](one.ipynb){ download="one.ipynb" }\n\nText'
    )
    assert linked.count("one.ipynb") == 2


def _without_options(page: str) -> str:
    return "\n".join("```python" if line.startswith("```python ") else line for line in page.splitlines())
