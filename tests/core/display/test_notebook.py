"""The pictures that values show in a notebook, which calls `_repr_html_` and `_repr_svg_`."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from internals import ALLOWED, CELLS, SHADES, Squares
from libraries import Library

from sdpa_xp import biases, explain, masks
from sdpa_xp.layers import MultiHeadAttention

F = np.float32
TILE_COLOURS = {"#": "#2f86c5", "+": "#d55e00"}


def well_formed(html: str | None) -> ElementTree.Element:
    """Parse the HTML, which is XML too."""
    assert html is not None
    return ElementTree.fromstring(html)


def area(html: str, colour: str) -> float:
    """Return the share of the squares of the first picture that have a colour."""
    (picture, *_) = re.findall(r"<svg.*?</svg>", html)
    width, height = map(float, re.findall(r'<rect width="(\d+)" height="(\d+)"', picture)[0])
    runs = [path for fill, path in re.findall(r'<path fill="(\S+)" d="(.*?)"', picture) if fill == colour]
    sides = re.findall(r"h(\d+)v(\d+)", "".join(runs))
    return sum(float(w) * float(h) for w, h in sides) / (width * height)


def entries(count: int, total: int) -> list[str]:
    return [f"entry {n} of {total}" for n in range(count)]


BY_HEAD = np.arange(48).reshape(3, 4, 4) % 5 < np.arange(1, 4)[:, None, None]
BY_BOTH = np.arange(96).reshape(2, 3, 4, 4) % 7 < np.arange(1, 3)[:, None, None, None]
MASKS: dict[str, tuple[Any, tuple[int, ...], list[str]]] = {
    "causal": (masks.causal(), (12, 12), []),
    "lower right": (masks.causal("lower_right"), (6, 12), []),
    "an offset for each entry": (masks.causal([0, 3]), (2, 1, 12, 12), entries(2, 2)),
    "window": (masks.sliding_window(7, 0), (14, 14), []),
    "padding": (masks.padding([4, 6]), (2, 1, 12, 12), entries(2, 2)),
    "many entries": (masks.padding([4, 6, 3, 1, 5]), (5, 1, 12, 12), entries(4, 5)),
    "documents": (masks.document([0, 0, 1, 1, 1, 2]), (6, 6), []),
    "documents of other keys": (masks.document([0, 0, 1], [0, 1, 1, 1]), (3, 4), []),
    "prefix": (masks.causal() | masks.prefix(3), (12, 12), []),
    "chunks": (masks.causal() & masks.chunked(3), (12, 12), []),
    "not": (~masks.causal(), (12, 12), []),
    "array": (masks.from_array(np.tri(6, 8, dtype=bool)), (6, 8), []),
    "array of keys": (masks.from_array(np.asarray([True, False, True])), (3, 3), []),
    "array of a head": (masks.from_array(np.tri(5, dtype=bool)[None, None]), (1, 1, 5, 5), []),
    "array of heads": (masks.from_array(BY_HEAD), (3, 4, 4), [f"head {n} of 3" for n in range(3)]),
    "array of both": (masks.from_array(BY_BOTH), (2, 3, 4, 4), [f"{x}, head 0 of 3" for x in entries(2, 2)]),
    "function": (masks.from_function(lambda b, h, q, k: (q - k) % 3 == 0), (12, 12), []),
    "an image": (masks.neighbourhood((3, 5), 1), (15, 15), []),
}


@pytest.mark.parametrize(("mask", "shape", "labels"), MASKS.values(), ids=MASKS)
def test_a_mask_shows_the_pairs_that_it_allows(mask: Any, shape: tuple[int, ...], labels: list[str]) -> None:
    """Of its first entries or heads, with labels."""
    html = mask._repr_html_()
    well_formed(html)
    assert re.findall(r"<div[^>]*>((?:entry|head) [^<]*)</div>", html) == labels
    pictures, allowed = re.findall(r"<svg.*?</svg>", html), masks.to_array(mask, shape)
    allowed = allowed[:, 0] if len(shape) == 4 else allowed.reshape(-1, *shape[-2:])
    assert len(pictures) == min(len(allowed), 4)
    for picture, pairs in zip(pictures, allowed, strict=False):
        assert area(picture, ALLOWED) == pytest.approx(pairs.mean())
    assert f">blue: may attend; {shape[-2]} queries (down) x {shape[-1]} keys<" in html


def test_a_long_mask_is_sampled() -> None:
    html = masks.sliding_window(255, 0)._repr_html_()
    assert html is not None
    assert "510 queries" in html
    assert len(html) < 5000
    assert area(html, ALLOWED) == pytest.approx(
        masks.to_array(masks.sliding_window(255, 0), (510, 510)).mean(), abs=0.03
    )


def test_a_mask_that_fits_no_guess_shows_as_text() -> None:
    assert masks.document([0, 0], [[0, 1], [0, 1], [1, 1]])._repr_html_() is None
    assert masks.from_function(lambda *_: 1 / 0 > 0)._repr_html_() is None


def test_masks_of_every_library(library: Library) -> None:
    boolean = library.put(np.tri(6, dtype=bool))
    html = (masks.from_array(boolean) & masks.causal())._repr_html_()
    if library.name == "dask":  # a picture computes nothing
        assert html is None
        return
    assert html is not None
    assert area(html, ALLOWED) == pytest.approx(np.tri(6).mean())


PICTURED: dict[str, tuple[biases.Bias, int]] = {
    "alibi": (biases.alibi(4), 4),
    "many heads": (biases.alibi(8), 4),
    "relative": (biases.relative(np.ones((32, 3))), 3),
    "array": (biases.from_array(np.eye(6)), 1),
    "masks": (biases.from_array(np.where(np.eye(6) > 0, 2.0, -np.inf)), 1),
    "function": (biases.from_function(lambda score, b, h, q, k: score - abs(q - k)), 1),
    "sum": (biases.alibi(2) + biases.alibi(2), 2),
}


@pytest.mark.parametrize(("bias", "count"), PICTURED.values(), ids=PICTURED)
def test_each_picture_of_a_bias_has_its_own_scale(bias: Any, count: int) -> None:
    """Its largest number is blue, and its least is faint, if the label has two."""
    html = bias._repr_html_()
    pictures = re.findall(r"<svg.*?</svg>", html)
    assert len(pictures) == count
    assert len(html) < 40_000
    for picture in pictures:
        shades = {SHADES[-1], SHADES[0]} if "faint" in picture or re.search(r"\d to ", picture) else set()
        assert shades <= {fill for fill, _ in re.findall(r'<path fill="(\S+)" d="(.*?)"', picture)}


def test_the_parts_of_a_layer_open_at_a_click() -> None:
    layer = MultiHeadAttention.init(np.random.default_rng(0), 16, num_heads=4, num_kv_heads=2)
    html = layer._repr_html_()
    assert html.count("<details>") == 4
    assert html.count('<details open="">') == 1


def test_a_plan_shows_its_tiles() -> None:
    x = np.zeros((2, 4096, 64), F)
    plan = explain(x, x, x, is_causal=True, implementation="xp")
    drawn = "".join(plan.tile_map)
    assert plan.tiles == 2 * (len(drawn) - drawn.count("."))  # two heads
    assert plan.total_tiles == 2 * len(drawn)
    assert plan.tile_map[0].startswith("+")
    assert plan.tile_map[-1].startswith("#")
    first, *others = str(plan).splitlines()
    assert first == "xp: computed by sdpa_xp, in tiles, because the call asks for it"
    assert [line.text for line in well_formed(plan._repr_html_()).iter("code")] == [first, *others]
    assert repr(plan) == repr(plan._replace(tile_map=()))  # which has a character for each tile
    assert repr(plan).startswith("Explanation(implementation='xp', reason='the call asks for it', tile=(")
    whole = explain(x, x, x, implementation="xp").tile_map
    assert {*"".join(whole)} == {"#"}


@pytest.mark.needs("torch")
def test_a_kernel_has_no_tiles_to_show() -> None:
    import torch

    x = torch.zeros(2, 64, 32)
    html = explain(x, x, x)._repr_html_()
    assert [line.text for line in well_formed(html).iter("code")] == [str(explain(x, x, x)).strip()]
    assert "<svg" not in html


def note_below(html: str) -> str | None:
    """Return what stands below the picture of a plan."""
    return [*well_formed(html).iter("div")][-1].text


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(512, 0)], ids=str)
def test_a_square_of_a_long_call_stands_for_several_tiles(mask: Any) -> None:
    """A window is a band without gaps, and a square problem is a square."""
    x = np.broadcast_to(F(0), (40_000, 64))
    plan = explain(x, x, x, mask, implementation="xp")
    html = plan._repr_html_()
    (picture,) = well_formed(html).iter("{http://www.w3.org/2000/svg}svg")
    assert picture.get("width") == picture.get("height")
    assert 100 < int(picture.get("width", "")) < 200  # pixels, of which a square has at least three
    down, across = map(int, re.findall(r"a square is (\d+) x (\d+) tiles", html)[0])
    assert down * plan.tile[0] == across * plan.tile[1]
    kinds: dict[tuple[int, int], set[str]] = {}
    for i, line in enumerate(plan.tile_map):
        for j, kind in enumerate(line):
            kinds.setdefault((i // down, j // across), set()).add(kind)
    for colour, expected in ((TILE_COLOURS["#"], {"#"}), (TILE_COLOURS["+"], None)):
        shown = [
            kind for kind in kinds.values() if (kind == expected if expected else kind not in ({"#"}, {"."}))
        ]
        assert area(html, colour) == pytest.approx(len(shown) / len(kinds))
    assert note_below(html) == (
        f"queries (down) x keys; a square is {down} x {across} tiles; blue: all computed without a mask; "
        "orange: some masked or skipped; empty: all skipped"
    )


def test_a_square_of_a_short_call_is_a_tile() -> None:
    x = np.broadcast_to(F(0), (4096, 64))
    html = explain(x, x, x, is_causal=True, implementation="xp")._repr_html_()
    assert note_below(html) == (
        "queries (down) x keys; blue: computed without a mask; orange: masked in part; empty: skipped"
    )


@pytest.mark.usefixtures("small_tiles")
def test_a_long_call_of_few_queries_is_shown_in_one_row() -> None:
    x = np.zeros((1000, 4), F)
    html = explain(x[:3], x, x, implementation="xp")._repr_html_()
    assert "a square is 1 x " in html
    assert area(html, TILE_COLOURS["#"]) == 1


@pytest.mark.parametrize("queries", [0, 3, 40_000])
def test_a_plan_without_keys_shows_itself(queries: int) -> None:
    query, key = np.zeros((queries, 4), F), np.zeros((0, 4), F)
    well_formed(explain(query, key, key)._repr_html_())


def test_a_window_that_begins_within_a_tile_is_in_the_map() -> None:
    x = np.zeros((4096, 64), F)
    plan = explain(x, x, x, masks.sliding_window(600, 0), implementation="xp")
    rows, columns = plan.tile
    allowed = masks.to_array(masks.sliding_window(600, 0), (4096, 4096))
    for i, line in enumerate(plan.tile_map):
        for j, place in enumerate(line):
            tile = allowed[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert place != "." or not tile.any()


def test_squares_are_named_for_those_who_cannot_see_them() -> None:
    svg = Squares(["##.", "..#"], {"#": "red"}, "a <b> & c").svg()
    assert well_formed(svg).get("aria-label") == "a <b> & c"
    assert svg.count("<path") == 1


def test_figures_show_themselves() -> None:
    pytest.importorskip("matplotlib")
    from sdpa_xp import plot

    for figure in (plot.mask(masks.causal(), (4, 4)), plot.memory(), plot.attention(np.eye(3))):
        width, height = figure.get_size_inches() * figure.dpi
        assert repr(figure) == f"<Figure size {width:.0f}x{height:.0f} with {len(figure.axes)} Axes>"
        assert "fill: #ffffff" not in figure._repr_svg_().partition('id="axes_1"')[0]  # the notebook's own
        well_formed(figure._repr_svg_().partition("<svg")[1] + figure._repr_svg_().partition("<svg")[2])


def test_no_picture_has_more_cells_than_fit() -> None:
    ids = np.arange(1000) // 30
    html = masks.document(ids)._repr_html_()
    assert html is not None
    assert len(re.findall(r"M\d+", html)) <= CELLS * CELLS
