"""A picture on the site stands below the code that draws it, which anyone may copy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import pages

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_site"))

import pictures

MASK = "from sdpa_xp import masks, plot\n\nplot.mask(masks.causal(), (3, 3))\n"
CURVE = "import matplotlib.pyplot as plt\n\nfigure, axes = plt.subplots()\n_ = axes.plot([1, 2])\n"


def test_a_block_is_shown_and_run() -> None:
    page = f'Text\n\n```python picture="A triangle." session="s"\n{MASK}```\n\nMore\n'
    shown, run = re.findall(r"^```(python[^\n]*)\n", pictures.expanded(page), re.MULTILINE)
    assert shown == "python"
    assert run == 'python exec="1" html="1" session="s"'
    assert f"```python\n{MASK}```\n" in pictures.expanded(page)
    assert repr(MASK) in pictures.expanded(page)


def test_long_code_folds() -> None:
    page = pictures.expanded(f'```python picture="A triangle." folded small session="s"\n{MASK}```\n')
    assert page.startswith('??? example "The code of this picture"\n\n    ```python\n    from sdpa_xp')
    assert 'html="1" session="s"' in page
    assert "small=True" in page


def test_other_blocks_stay_as_they_are() -> None:
    page = '```python exec="1" session="s"\nx = 1\n```\n'
    assert pictures.expanded(page) == page


def test_a_call_of_plot_is_drawn_for_both_schemes() -> None:
    names: dict[str, Any] = {}
    html = pictures.pictures(MASK, 'A "triangle"', names)
    assert html.startswith('<div class="figures" role="img" aria-label="A &quot;triangle&quot;">')
    assert re.findall(r'class="(figure [\w-]+)"', html) == ["figure figure-light", "figure figure-dark"]
    assert html.count("<svg") == 2
    assert "masks" in names


def test_a_figure_may_have_a_name() -> None:
    names: dict[str, Any] = {}
    html = pictures.pictures(MASK.replace("plot.mask", "figure = plot.mask") + "figure\n", "A triangle", names)
    assert re.findall(r'class="(figure [\w-]+)"', html) == ["figure figure-light", "figure figure-dark"]
    assert names["figure"].axes


def test_a_value_is_shown_as_in_a_notebook() -> None:
    from sdpa_xp import masks

    html = pictures.pictures("from sdpa_xp import masks\n\nmasks.causal()\n", "A triangle", {})
    assert f'<div class="figure">{masks.causal()._repr_html_()}</div>' in html


def test_a_table_is_no_picture() -> None:
    """What is inside of a picture is not read aloud, and may not be opened."""
    cache = (
        "import numpy as np\nfrom sdpa_xp import KVCache\n\nKVCache(np.ones((2, 3, 4)), np.ones((2, 3, 4)))\n"
    )
    assert '<div class="figures" role="group" aria-label="A cache">' in pictures.pictures(cache, "A cache", {})


def test_a_figure_of_pyplot_takes_the_ink_of_the_page() -> None:
    from matplotlib import pyplot

    html = pictures.pictures(CURVE, "A line", {})
    assert html.count("<svg") == 1
    assert "currentColor" in html
    assert pictures.INK not in html
    assert pyplot.get_fignums() == []


def test_lines_that_draw_nothing_run_once() -> None:
    names: dict[str, Any] = {"runs": []}
    pictures.pictures(f"runs.append(1)\n{MASK}", "A triangle", names)
    assert names["runs"] == [1]


def test_a_block_that_draws_nothing_stops_the_build() -> None:
    with pytest.raises(ValueError, match="draws nothing: A triangle"):
        pictures.pictures("x = 1\n", "A triangle", {})


def test_no_page_draws_a_picture_out_of_sight() -> None:
    """Two pages make other HTML: the playground a table, and the home page folds the code of its picture."""
    unseen = re.compile(r'^```python exec="1" html="1"', re.MULTILINE)
    hidden = {name for name, text in pages().items() if unseen.search(text)}
    assert hidden == {"index.md", "playground.md"}
    assert "Code for this picture" in pages()["index.md"]
