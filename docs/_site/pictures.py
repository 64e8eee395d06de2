"""Pictures below their code: a block with `picture="a description"` shows its code, and then its figures.

The figures are those that a notebook would show: of each line that is a call of `sdpa_xp.plot`, of a line that
is a mask, a cache or another value with `_repr_html_`, and of pyplot.
After the description, `folded` folds the code, and `small` shows several pictures in a row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import escape
from textwrap import indent
from typing import Any

import matplotlib
from figures import inline

from sdpa_xp.plot.panels import THEMES

BLOCK = re.compile(
    r'^```python picture="(?P<description>[^"]*)"(?P<options>[^\n]*)\n(?P<code>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
INK = "#7a7a7a"
"""The colour of text in a figure of pyplot; the page replaces it by its own text colour."""
LINE = "#2f7ebc"
"""A blue that stands out from a light and from a dark page."""


def expanded(markdown: str) -> str:
    """Return a page with two blocks for each such block: one shows the code, one runs it during the build."""

    def two_blocks(block: re.Match[str]) -> str:
        flags = {"folded", "small"} & set(block["options"].split())
        options = " ".join(option for option in block["options"].split() if option not in flags)
        code = f"```python\n{block['code']}```\n"
        if "folded" in flags:
            code = f'??? example "The code of this picture"\n\n{indent(code, "    ")}'
        arguments = f"{block['code']!r}, {block['description']!r}, globals(), small={'small' in flags}"
        program = f"from pictures import pictures\n\nprint(pictures({arguments}))\n"
        return f'{code}\n```python exec="1" html="1" {options}\n{program}```'

    return BLOCK.sub(two_blocks, markdown)


def pictures(code: str, description: str, names: dict[str, Any], *, small: bool = False) -> str:
    """Return HTML with the pictures that a block draws, for both colour schemes; `names` are its page's."""
    html = "".join(figures(code, names))
    if not html:
        raise ValueError(f"a block draws nothing: {description}")
    kind = "figures small" if small else "figures"
    # A reader of the screen skips what is inside of a picture, and must not skip a table.
    role = "group" if "<table" in html or "<details" in html else "img"
    return f'<div class="{kind}" role="{role}" aria-label="{escape(description, quote=True)}">{html}</div>'


def figures(code: str, names: dict[str, Any]) -> Iterator[str]:
    """Run a block; yield the HTML of each figure. A call of `plot` runs once for each theme."""
    from matplotlib import pyplot

    inked = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    )
    clear = dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")
    with matplotlib.rc_context({**inked, **clear, "axes.prop_cycle": matplotlib.cycler(color=[LINE])}):
        for line in ast.parse(code).body:
            value = line.value if isinstance(line, ast.Expr | ast.Assign) else None
            if value is not None and ast.unparse(value).startswith("plot."):
                for theme in THEMES:
                    figure = eval(_themed(value, theme), names)
                    yield f'<div class="figure figure-{theme}">{inline(figure)}</div>'
                if isinstance(line, ast.Assign):
                    names[ast.unparse(line.targets[0])] = figure
            elif isinstance(line, ast.Expr):
                shown = eval(compile(ast.Expression(line.value), "<picture>", "eval"), names)
                if show := getattr(shown, "_repr_html_", None):
                    yield f'<div class="figure">{show()}</div>'
            else:
                exec(compile(ast.Module([line], []), "<picture>", "exec"), names)
        for number in pyplot.get_fignums():
            yield f'<div class="figure">{inline(pyplot.figure(number)).replace(INK, "currentColor")}</div>'
    pyplot.close("all")


def _themed(call: ast.expr, theme: str) -> Any:
    """Add the keyword `theme` to a call, and compile it."""
    if not isinstance(call, ast.Call):
        raise ValueError(f"{ast.unparse(call)} is no call of `plot`")
    keywords = [*call.keywords, ast.keyword("theme", ast.Constant(theme))]
    changed = ast.Expression(ast.Call(call.func, call.args, keywords))
    return compile(ast.fix_missing_locations(changed), "<picture>", "eval")
