"""The words of a page, as docs/_site/words.py counts them."""

from __future__ import annotations

from documented import pages


def test_words_are_those_of_the_article() -> None:
    from words import words

    code = "<svg><path/>no</svg><br> <pre>x = 1</pre>"
    html = f"<nav>not this</nav><article>Three <b>words</b> here, 4 ={code}</article>"
    assert words(html) == 4


def test_the_site_has_at_most_40_pages_beside_the_changelog() -> None:
    assert len(pages().keys() - {"project/changelog.md"}) <= 40
