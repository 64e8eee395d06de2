"""Tables of HTML: the facts of a value, and values inside of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a row is its name."""
    head = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<div><div><code>{escape(title)}</code></div><table>{head}<tbody>{body}</tbody></table></div>"


def nested(title: str, items: Iterable[str]) -> str:
    """Return a heading that opens and closes, with items of HTML below it."""
    inner = "".join(f"<li>{item}</li>" for item in items)
    return f'<details open=""><summary><code>{escape(title)}</code></summary><ul>{inner}</ul></details>'
