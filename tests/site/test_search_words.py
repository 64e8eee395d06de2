"""What the index of the search gets. `docs/_site/search/check.cjs` asks the search of a built site."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "docs" / "_site"
sys.path.append(str(SITE))

import search_words  # noqa: E402


def index(folder: Path, *locations: str) -> Path:
    """An index with these places, as the plugin writes it."""
    path = folder / "search" / "search_index.json"
    path.parent.mkdir()
    docs = [{"location": location, "title": "title", "text": "text"} for location in locations]
    path.write_text(json.dumps({"config": {}, "docs": docs}))
    return path


@pytest.mark.parametrize(
    ("location", "fields"),
    [
        ("a/#sdpa_xp.masks.causal", {"title": "masks.causal", "name": "causal", "parts": "masks causal"}),
        ("a/#sdpa_xp.PagedKVCache", {"title": "PagedKVCache", "parts": "pagedkvcache paged kv cache"}),
        ("a/#sdpa_xp.layers.Linear.from_mapping", {"parts": "layers linear from_mapping mapping"}),
        ("a/#sdpa_xp_export.report.Run.is_plain", {"title": "sdpa_xp_export.report.Run.is_plain", "name": ""}),
        ("a/#sdpa_xp_export.Report.form", {"title": "sdpa_xp_export.Report.form", "name": "form"}),
    ],
)
def test_an_object_is_found_by_its_name_and_its_parts(location: str, fields: dict[str, str]) -> None:
    assert search_words.added({"location": location, "text": ""}).items() >= fields.items()


def test_an_attribute_comes_behind_the_pages() -> None:
    """A function's text begins with its signature, an attribute's with its type."""
    location = "a/#sdpa_xp_export.report.Run.rows"
    attribute = search_words.added({"location": location, "text": "<pre><code>rows: int\n</code></pre>"})
    function = search_words.added({"location": location, "text": "<pre><code>rows() -&gt; int\n</code></pre>"})
    assert attribute["boost"] < 1
    assert "boost" not in function


def test_private_places_join_their_page() -> None:
    """Nobody looks for the module that a type is written in; the page of types still has its name."""
    page, private = "types/", "types/#sdpa_xp_export._call.call.FormChoice"
    public = ["types/#sdpa_xp.KVCache.__len__", "types/#sdpa_xp.__version__"]
    docs = [{"location": place, "title": place, "text": "<p>text</p>"} for place in (page, private, *public)]
    first, *others = search_words.without_private(docs)
    assert first["text"] == f"<p>text</p><p>{private}</p><p>text</p>"
    assert [entry["location"] for entry in others] == public


@pytest.mark.parametrize("location", ["a/", "a/#sdpa_xp-on-numpy", "a/#sdpa_xp._checks.IntegersLike"])
def test_other_places_keep_their_title(location: str) -> None:
    assert search_words.added({"location": location}) == {}


def test_the_words_of_a_place_join_its_entry(tmp_path: Path) -> None:
    path = index(tmp_path, "other/", *search_words.WORDS)
    search_words.write(tmp_path)
    other, *docs = json.loads(path.read_text())["docs"]
    assert "words" not in other
    assert {entry["location"]: entry["words"] for entry in docs} == search_words.WORDS


def test_a_result_shows_formulas_without_commands() -> None:
    text = r"<p>Heads: \(\mathrm{concat}(head_1, \ldots)\,W_o\), a (pair).</p>"
    assert search_words.without_latex(text) == "<p>Heads: concat (head_1, ldots) W_o, a (pair).</p>"


def test_words_of_a_place_that_is_gone_stop_the_build(tmp_path: Path) -> None:
    gone, *others = search_words.WORDS
    index(tmp_path, *others)
    with pytest.raises(ValueError, match=gone):
        search_words.write(tmp_path)


def test_words_are_searched_as_they_are_written() -> None:
    """The search compares lower case."""
    assert [words for words in search_words.WORDS.values() if words != words.lower()] == []


def test_the_words_of_newcomers_are_among_the_queries() -> None:
    queries = json.loads((SITE / "search" / "queries.json").read_text())
    assert len(queries) >= 10
    assert queries.keys() >= {"rope", "gqa", "mha", "kv cache", "causal mask", "install"}
