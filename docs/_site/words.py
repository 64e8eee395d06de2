"""Count the pages and the words that a reader of the built site meets: python docs/_site/words.py build/site

A word has a letter, so numbers and signs are none. Counted is the article of each page, with its code, its
outputs and the generated reference; navigation, pictures and the changelog are not.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

MOST_PAGES, MOST_WORDS = 40, 50_000
LEFT_OUT = ("script", "style", "svg", "nav")
WITHOUT_END = ("br", "col", "hr", "img", "input", "link", "meta", "source", "wbr")


class Article(HTMLParser):
    """Collect the text of the article of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in WITHOUT_END and ("hidden", None) not in attrs:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A shape of a picture, which has no content."""

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "article" in self.open and not set(LEFT_OUT) & set(self.open):
            self.text.append(data)


def words(html: str) -> int:
    """Return the number of words in the article of a page."""
    article = Article()
    article.feed(html)
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in " ".join(article.text).split())


if __name__ == "__main__":
    site = Path(sys.argv[1])
    counts = {
        path.parent.relative_to(site).as_posix(): words(path.read_text()) for path in site.rglob("index.html")
    }
    del counts["project/changelog"]
    total = sum(counts.values())
    print(f"site: {len(counts)} pages, {total:,} words beside the changelog")
    if len(counts) > MOST_PAGES or total > MOST_WORDS:
        sys.exit(f"the site has more than {MOST_PAGES} pages or {MOST_WORDS:,} words")
