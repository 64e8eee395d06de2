"""The page of a report: standalone, accessible, and with no markup but its own."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sdpa_xp import masks
from sdpa_xp_export import Report, TensorSpec, export_attention, verify
from sdpa_xp_export.cli.report import page
from sdpa_xp_export.report import Placement

VOID = ("meta", "link")
EVIL = "<script>alert(1)</script>&\"'\x1b[31m\u202e"


class Parsed(HTMLParser):
    """The elements of a page, each with its attributes and the text right in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(len(self.elements))
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.elements[self.open[-1]][2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements if name == tag]


@pytest.fixture(scope="module")
def report() -> Report:
    qkv = TensorSpec("float32", (3, 2, 5, 16))
    model = export_attention(qkv, qkv, qkv, masks.causal("lower_right"), outputs=["output", "lse"])
    return verify(model, provider="cpu")


def fallen(name: str = "n") -> Placement:
    return Placement(name, "Shape", "CPUExecutionProvider", "CUDAExecutionProvider")


def test_needs_nothing_but_itself(report: Report) -> None:
    text = page(report, "a.onnx")
    parsed = Parsed(text)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _, _ in parsed.elements}
    named = [
        attributes.get(name)
        for _, attributes, _ in parsed.elements
        for name in ("src", "href")
        if name in attributes
    ]
    assert named == ["data:,"]  # else a browser asks for an icon
    assert not re.search(r"@import|url\(|https?:|//", text)
    (policy,) = (
        attributes
        for attributes, _ in parsed.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert str(policy["content"]).startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_light_and_dark_and_narrow(report: Report) -> None:
    text = page(report, "a.onnx")
    assert "prefers-color-scheme: dark" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert '<meta name="color-scheme" content="light dark">' in text


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2, section 1.4.3."""

    def luminance(colour: str) -> float:
        digits = colour if len(colour) == 6 else "".join(digit * 2 for digit in colour)
        channels = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_the_ground(report: Report) -> None:
    schemes = re.findall(r":root \{(.*?)\}", page(report, "a.onnx"), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): #(\w+);", scheme))
        for name in ("text", "soft", "good", "bad"):
            assert contrast(colours[name], colours["ground"]) >= 4.5, (name, scheme)


def test_tables_can_be_read_aloud(report: Report) -> None:
    parsed = Parsed(page(replace(report, placements=(fallen(),)), "a.onnx"))
    assert [text for _, text in parsed.all("caption")] == [
        "Runs, each against the float64 reference",
        "Nodes that ran on another provider than the one asked for",
    ]
    assert {attributes["scope"] for attributes, _ in parsed.all("th")} == {"col", "row"}
    columns = [text for attributes, text in parsed.all("th") if attributes["scope"] == "col"]
    assert columns[:8] == ["lengths", "output", "error", "bound", "agrees", "rows", "ms", "peak MB"]
    assert columns[8:] == ["node that fell back", "op", "provider", "asked"]
    rows = [text for attributes, text in parsed.all("th") if attributes["scope"] == "row"]
    assert rows == [run.inputs for run in report.runs] + ["n"]
    assert parsed.all("html")[0][0] == {"lang": "en"}
    assert len(parsed.all("h1")) == len(parsed.all("main")) == len(parsed.all("title")) == 1


def test_says_what_the_report_says(report: Report) -> None:
    parsed = Parsed(page(report, "a.onnx"))
    facts = dict(zip((x for _, x in parsed.all("dt")), (x for _, x in parsed.all("dd")), strict=True))
    assert facts["query"] == "float32[3,2,5,16]"
    assert facts["attn_mask"] == "causal(offset='lower_right')"
    assert facts["outputs"] == "output, lse"
    assert facts["ran on"] == report.engine == f"onnxruntime {report.onnxruntime}"
    assert facts["form"] == f"{report.form} ({report.reason})"
    assert (parsed.all("h1")[0][1], parsed.all("span")[0][1]) == ("a.onnx: ", "agrees")
    assert " ".join(str(report).split()) in [text for _, text in parsed.all("p")]
    cells = [text for _, text in parsed.all("td")]
    assert cells[:2] == ["output", f"{report.runs[0].agreement.absolute:.1e}"]
    assert facts["nodes that ran"] == report.nodes
    assert "node that fell back" not in [text for _, text in parsed.all("th")]


def test_a_picture_shows_each_run_by_its_length(report: Report) -> None:
    far = replace(
        report.runs[0], agreement=replace(report.runs[0].agreement, absolute=float("inf")), longest=9000
    )
    parsed = Parsed(page(replace(report, runs=(far, *report.runs)), "a.onnx"))
    circles = [attributes for attributes, _ in parsed.all("circle")]
    assert len(circles) == len(report.runs) + 1
    assert [attributes["class"] for attributes in circles].count("beyond") == 1
    assert float(str(circles[0]["cx"])) > max(float(str(attributes["cx"])) for attributes in circles[1:])
    assert float(str(circles[0]["cy"])) < min(float(str(attributes["cy"])) for attributes in circles[1:])
    ((picture, _),) = parsed.all("svg")
    assert picture["role"] == "img"
    assert str(picture["aria-label"]).endswith("1 are beyond their bound")


def test_failures_are_named(report: Report) -> None:
    bad = replace(report.runs[0].agreement, absolute=float("inf"))
    runs = (replace(report.runs[0], agreement=bad, peak_bytes=None), *report.runs[1:])
    parsed = Parsed(page(replace(report, runs=runs, placements=(fallen(),)), "a.onnx", ["one", "another"]))
    assert [text for _, text in parsed.all("li")] == ["one", "another"]
    marked = [text for attributes, text in parsed.all("span") if attributes["class"] == "bad"]
    assert marked == ["DISAGREES", "NO", "CPUExecutionProvider"]
    assert "unknown" in [text for _, text in parsed.all("td")]


def test_what_a_model_says_is_no_markup(report: Report) -> None:
    placed = Placement(EVIL, EVIL, EVIL, "another")
    runs = tuple(replace(run, inputs=EVIL, provider=EVIL, output=EVIL) for run in report.runs)
    runs = (*runs, replace(runs[0], provider="another", output="another"))
    evil = replace(
        report, form=EVIL, reason=EVIL, onnxruntime=EVIL, engine=EVIL, runs=runs, placements=(placed,)
    )
    text = page(evil, EVIL, [EVIL])
    parsed = Parsed(text)
    assert parsed.all("script") == []
    assert not {"\x1b", "\u202e"} & set(text)
    cells = [text for tag in ("td", "th", "li") for _, text in parsed.all(tag)]
    assert (
        cells.count(EVIL.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd"))
        == 3 * len(report.runs) + 1 + 2 + 1
    )
