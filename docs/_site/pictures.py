"""Pictures beside their code: a block with `picture="what is seen"` shows its code, and below it what it draws.

It draws what a notebook would show: each line that is a call of `sdpa_xp.plot`, and figures of pyplot. `folded`
behind the description folds the code, and `small` shows many pictures in a row.
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
    r'^```python picture="(?P<seen>[^"]*)"(?P<options>[^\n]*)\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE
)
INK = "#7a7a7a"
"""What is written in a figure of pyplot; the page shows it in its own colour of text."""
LINE = "#2f7ebc"
"""A blue that stands out from a light and from a dark page."""


def expanded(markdown: str) -> str:
    """A page in which each such block is two: one shows the code, the other runs it when the page is built."""

    def both(found: re.Match[str]) -> str:
        flags = {"folded", "small"} & set(found["options"].split())
        options = " ".join(each for each in found["options"].split() if each not in flags)
        shown = f"```python\n{found['code']}```\n"
        if "folded" in flags:
            shown = f'??? example "The code of this picture"\n\n{indent(shown, "    ")}'
        arguments = f"{found['code']!r}, {found['seen']!r}, globals(), small={'small' in flags}"
        run = f"from pictures import pictures\n\nprint(pictures({arguments}))\n"
        return f'{shown}\n```python exec="1" html="1" {options}\n{run}```'

    return BLOCK.sub(both, markdown)


def pictures(code: str, seen: str, names: dict[str, Any], *, small: bool = False) -> str:
    """HTML with the pictures that a block draws among the names of its page, for both colour schemes."""
    drawn = [*figures(code, names)]
    if not drawn:
        raise ValueError(f"a block draws nothing: {seen}")
    kind = "figures small" if small else "figures"
    return f'<div class="{kind}" role="img" aria-label="{escape(seen, quote=True)}">{"".join(drawn)}</div>'


def figures(code: str, names: dict[str, Any]) -> Iterator[str]:
    """Run a block once, but for its calls of `plot`, which run for each theme; HTML of each figure."""
    from matplotlib import pyplot

    inked = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    )
    clear = dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")
    with matplotlib.rc_context({**inked, **clear, "axes.prop_cycle": matplotlib.cycler(color=[LINE])}):
        for line in ast.parse(code).body:
            if isinstance(line, ast.Expr) and ast.unparse(line).startswith("plot."):
                for theme in THEMES:
                    drawn = eval(_themed(line.value, theme), names)
                    yield f'<div class="figure figure-{theme}">{inline(drawn)}</div>'
            else:
                exec(compile(ast.Module([line], []), "<picture>", "exec"), names)
        for number in pyplot.get_fignums():
            yield f'<div class="figure">{inline(pyplot.figure(number)).replace(INK, "currentColor")}</div>'
    pyplot.close("all")


def _themed(call: ast.expr, theme: str) -> Any:
    """A call with one more keyword, compiled."""
    if not isinstance(call, ast.Call):
        raise ValueError(f"{ast.unparse(call)} is no call of `plot`")
    keywords = [*call.keywords, ast.keyword("theme", ast.Constant(theme))]
    changed = ast.Expression(ast.Call(call.func, call.args, keywords))
    return compile(ast.fix_missing_locations(changed), "<picture>", "eval")
